"""How many batches there are, and the rules that steps, replicas and accumulation follow.

Arguments count batches. `steps_per_execution` counts those that each replica works through in one
execution; `steps`, `steps_per_epoch` and the length of a dataset count the batches of all replicas.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from tailrace.errors import DataError, OptionError, ProgramError
from tailrace.messages import logger, note_once


def batches_in(x: Any, batch_size: int | None, share: float = 1.0) -> int | None:
    """How many batches a dataset of Keras' has; None where that is not known before it ends."""
    if hasattr(x, "cardinality"):  # tf.data
        found = int(x.cardinality())
        return found if found >= 0 else None
    if hasattr(x, "num_batches"):  # PyDataset
        return x.num_batches
    if read_once(x):
        return None
    if hasattr(x, "dataset") and hasattr(x, "batch_size"):  # DataLoader
        try:
            return len(x)
        except TypeError:
            return None
    if not isinstance(x, list | tuple | dict) and not hasattr(x, "shape"):
        return len(x) if hasattr(x, "__len__") else None  # a dataset of batches
    leaves = [leaf for leaf in jax.tree.leaves(x) if hasattr(leaf, "__len__")]
    if not leaves or any(not hasattr(leaf, "shape") for leaf in leaves):
        return None
    examples = math.floor(int(np.shape(leaves[0])[0]) * share)
    return math.ceil(examples / (batch_size or 32))


def read_once(x: Any) -> bool:
    """Whether a dataset can be read once only, element by element."""
    return hasattr(x, "__next__")


def per_replica(
    steps: int | None, size: int | None, execution: int, replicas: int
) -> tuple[int, int]:
    """Check how many batches are asked for; returns those of each replica and of an execution.

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
    if total % replicas and size is not None:
        note_once(
            f"{total} batches do not divide evenly over {replicas} replicas: the last "
            f"{total % replicas} are dropped.",
            key=f"keras remainder {total} {replicas}",
        )
    each = total // replicas
    if each == 0:
        raise DataError(
            f"The provided dataset contains {total} items, but all {replicas} replicas are "
            f"requested to run 1 steps each. Make sure the dataset contains at least {replicas} "
            f"items."
        )
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
    return each, execution


def check_accumulation(execution: int, count: int, pipelined: bool) -> None:
    """An execution is made of whole steps."""
    if execution % count:
        what = "pipelined model" if pipelined else "model"
        raise ProgramError(
            f"The {what} has been configured to use gradient accumulation for training, however "
            f"the current steps_per_execution value (set to {execution}) is not divisible by "
            f"gradient_accumulation_steps_per_replica ({count}). Use a multiple of {count}."
        )


def check_enough(needed: int, size: int | None, restarts: bool) -> None:
    """A dataset that is not restarted each epoch has enough for all of them."""
    if size is not None and not restarts and needed > size:
        raise DataError(
            f"Your input does not have enough data. Make sure that your dataset or generator can "
            f"generate at least {needed} batches (currently it can only generate {size} batches). "
            f"Ask for fewer steps, or repeat the dataset."
        )


def _nearest_divisor(of: int, to: int) -> int:
    return min((d for d in range(1, of + 1) if of % d == 0), key=lambda d: (abs(d - to), -d))
