"""The interface between a training loop and the storage of its results.

This is all that the trainer knows of run directories; `tailrace.runs` implements it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np

from tailrace.records.parts import Part
from tailrace.records.record import Source


@dataclasses.dataclass(frozen=True)
class Finished:
    """One execution that has ended, with its results.

    Attributes:
        first_step: the index of its first step.
        steps: the number of its steps that count; those after a stop do not.
        parts: the emissions of its taps.
        scalars: loss and metrics by name, each [steps, microbatches, replicas].
        weights: the weights of a mean over microbatches and replicas; None for equal ones.
        ended: when its results arrived, in seconds since 1970.
        fingerprint: 8 bytes for each group of tensors, and the chain; empty if there are none.
        elements: the digest of each element, [steps, microbatches, replicas]; None if there are none.
        reading: the elements it consumed: their origin, by name; empty if unknown.
        times: the seconds of each of `ACTIVITIES` since the execution before; empty if unknown.
    """

    first_step: int
    steps: int
    parts: Sequence[Part]
    scalars: Mapping[str, np.ndarray]
    weights: np.ndarray | None = None
    ended: float = dataclasses.field(default_factory=time.time)
    fingerprint: Mapping[str, int] = dataclasses.field(default_factory=dict)
    elements: np.ndarray | None = None
    reading: Mapping[str, int] = dataclasses.field(default_factory=dict)
    times: Sequence[float] = ()

    @property
    def nbytes(self) -> int:
        """The approximate memory it holds."""
        # By the arrays alone: a queue of finished executions is bounded by memory, not by their number.
        arrays = [*self.scalars.values(), *jax.tree.leaves([part.value for part in self.parts])]
        return sum(array.nbytes for array in arrays)


@dataclasses.dataclass(frozen=True)
class Validated:
    """One validation, with its results.

    Attributes:
        step: the number of steps before it.
        values: by name, without the prefix `val_`.
    """

    step: int
    values: Mapping[str, float]

    @property
    def nbytes(self) -> int:
        """The approximate memory it holds."""
        return 8 * (1 + len(self.values))


class Sink(Protocol):
    """Stores the results of executions and validations."""

    def fitting(
        self, info: Mapping[str, Any], goes_on: bool = False
    ) -> AbstractContextManager[Any]:
        """A context around a fit; `info` describes it, ready for JSON.

        With `goes_on`, around the next part of the same fit.

        Everything is stored when the context ends. An error while storing is raised then at the latest,
        unless another exception is propagating.
        """
        ...

    def go_back(self, step: int, end: int) -> None:
        """Prepare for a fit that begins at a step before the `end` of the last one: the rows in between
        were undone, and are cut off."""
        ...

    def execution(self, done: Finished) -> None:
        """Store one execution. Waits if the sink is too slow; raises an earlier error, if any."""
        ...

    def validation(self, validated: Validated) -> None:
        """Store one validation, after the executions so far; otherwise as `execution`."""
        ...

    def compilation(self, row: Mapping[str, Any]) -> None:
        """Store a compilation: purpose, cause, seconds; ready for JSON."""
        ...

    def flush(self) -> None:
        """Wait until everything received so far is durable."""
        ...

    def mark(self) -> Callable[[], Any]:
        """Mark the current end. The returned function waits until everything before it is durable, and
        returns its position, ready for JSON."""
        ...

    def take_up(self, end: Mapping[str, Any] | None) -> None:
        """Prepare to resume from a checkpoint: everything after this mark is cut off."""
        ...

    def stored(self) -> dict[tuple[str, str], list[Source]]:
        """The records of the running fit, or of the last one, by name and kind."""
        ...
