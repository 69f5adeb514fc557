"""The numbers of batches of a dataset, an epoch and an execution.

Arguments count batches. `steps_per_execution` counts those of each replica per execution; `steps`,
`steps_per_epoch` and the length of a dataset count the batches of all replicas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import DataError, ProgramError


def batches_in(
    x: Tree, batch_size: int | None, steps: int | None = None, share: float = 1.0
) -> int | None:
    """The number of batches of a dataset; None if it is unknown before it ends."""
    if hasattr(x, "cardinality"):  # tf.data; of distributed datasets it is an attribute
        said: Any = x.cardinality
        count: Any = said() if callable(said) else said
        found = int(count)
        # tf.data says -1 for an infinite dataset, and -2 for one of unknown length.
        return found if found >= 0 else None
    if hasattr(x, "num_batches"):  # PyDataset
        return x.num_batches
    # Before the questions below: an iterator may have a length that says nothing of what is left.
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
    # Rounded down, as Keras splits validation data off.
    examples = math.floor(int(np.shape(leaves[0])[0]) * share)
    if not batch_size:  # as Keras chooses it
        batch_size = math.ceil(examples / steps) if steps else 32
    return math.ceil(examples / batch_size)


def read_once(x: object) -> bool:
    """Whether a dataset can be read only once."""
    return hasattr(x, "__next__")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Numbers of batches, over all replicas.

    Attributes:
        batches: the batches of an epoch; None for all of the data.
        execution: the batches of an execution.
    """

    batches: int | None
    execution: int


def counted(steps: int | None, size: int | None, execution: int, replicas: int) -> Counts:
    """The numbers of batches that Keras requests.

    Args:
        steps: the caller's `steps_per_epoch` or `steps`.
        size: the batches of the dataset, if known.
        execution: `steps_per_execution`.
        replicas: the number of replicas.
    """
    total = size if steps is None else steps
    if total is not None and replicas > 1:
        if total % replicas and size is not None:
            note_once(
                f"{total} batches do not divide evenly over {replicas} replicas: the last "
                f"{total % replicas} are dropped.",
                key=f"keras remainder {total} {replicas}",
            )
        total -= total % replicas
        if not total:
            raise too_few(size if steps is None else steps, replicas)
    if total:  # an execution is at most an epoch
        execution = min(execution, total // replicas)
    return Counts(total, execution * replicas)


def too_few(total: int | None, replicas: int) -> DataError:
    """The error for data without a single step."""
    return DataError(
        f"The provided dataset contains {total} items, but all {replicas} replicas are requested to "
        f"run 1 steps each. Make sure the dataset contains at least {replicas} items."
    )


def check_accumulation(counts: Counts, count: int, replicas: int, pipelined: bool) -> None:
    """Check that an execution, and an epoch, consist of whole steps."""
    execution = counts.execution // replicas
    if counts.batches is not None:
        execution = min(execution, counts.batches // replicas)
    if execution % count:
        what = "pipelined model" if pipelined else "model"
        raise ProgramError(
            f"The {what} has been configured to use gradient accumulation for training, however "
            f"the current steps_per_execution value (set to {execution}) is not divisible by "
            f"gradient_accumulation_steps_per_replica ({count}). Use a multiple of {count}."
        )
    if counts.batches is not None and (counts.batches // replicas) % count:
        raise DataError(
            f"A step takes {count} batches of a replica, and an epoch is made of whole steps. "
            f"Received: {counts.batches // replicas} batches. Give a multiple of {count}, for example "
            f"with steps_per_epoch=."
        )


@contextlib.contextmanager
def remainders(dropped: bool) -> Iterator[None]:
    """Silence Keras' warning about missing data if a remainder was dropped on purpose."""
    with warnings.catch_warnings():
        if dropped:
            warnings.filterwarnings("ignore", "Your input ran out of data")
        yield
