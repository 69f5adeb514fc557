"""The rules of the original's Keras: lengths are known, and executions divide epochs."""

from __future__ import annotations

from tailrace.base.messages import logger, note_once
from tailrace.errors import DataError, OptionError
from tailrace.keras.data.batch_counts import Counts, too_few


def per_replica(steps: int | None, size: int | None, execution: int, replicas: int) -> Counts:
    """Check how many batches are asked for.

    Args:
        steps: what the caller gave: `steps_per_epoch` or `steps`.
        size: the batches of the dataset, if known.
        execution: `steps_per_execution`.
        replicas: how many replicas there are.
    """
    total = size if steps is None else steps
    if total is None:
        raise DataError(
            "Could not infer the size of the data. You must specify the number of steps to run. "
            "Give steps_per_epoch= (fit), validation_steps= or steps= (evaluate, predict)."
        )
    # A generator loses nothing: what is not asked for is not read.
    if total % replicas and size is not None:
        note_once(
            f"{total} batches do not divide evenly over {replicas} replicas: the last "
            f"{total % replicas} are dropped.",
            key=f"keras remainder {total} {replicas}",
        )
    each = total // replicas
    if each == 0:
        raise too_few(total, replicas)
    # As the original does, which warns and goes on; a length that does not divide is refused.
    if execution > each:
        note_once(
            f"steps_per_execution ({execution}) is larger than the number of batches ({each}). "
            f"Using {each} as steps_per_execution.",
            key=f"keras truncated {execution} {each}",
        )
        execution = each
    if each % execution:
        whose = " to this replica" if replicas > 1 else ""
        raise OptionError(
            f"`steps_per_execution` ({execution}) must be a divisor of the number of batches "
            f"({each}) in the dataset provided{whose}. Use "
            f"{_nearest_divisor(each, execution)}, or give another number of steps."
        )
    if execution == 1:
        logger.info(
            "steps_per_execution is 1: every batch is a dispatch of its own. A larger value keeps "
            "the device busy: compile(steps_per_execution=...)."
        )
    return Counts(each * replicas, execution * replicas)


def check_enough(needed: int, size: int | None, restarts: bool) -> None:
    """A dataset that is not restarted each epoch has enough for all of them."""
    if size is not None and not restarts and needed > size:
        raise DataError(
            f"Your input does not have enough data. Make sure that your dataset or generator can "
            f"generate at least {needed} batches (currently it can only generate {size} batches). "
            f"Ask for fewer steps, or repeat the dataset."
        )


def _nearest_divisor(of: int, to: int) -> int:
    # Of two divisors that are equally near, the larger: fewer dispatches.
    return min((d for d in range(1, of + 1) if of % d == 0), key=lambda d: (abs(d - to), -d))
