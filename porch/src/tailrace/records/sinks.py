"""What a training loop tells somebody who keeps its results: one small interface.

The trainer knows this much of run directories. Who keeps results stands behind it: see
`tailrace.runs`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from tailrace.records.records import Part, Source


@dataclasses.dataclass(frozen=True)
class Finished:
    """One execution that has ended, and what it left behind.

    Attributes:
        first_step: the number of its first step.
        steps: how many of its steps count; those after a stop do not.
        parts: what its taps emitted.
        scalars: loss and metrics by name, each [steps, microbatches, replicas].
        weights: what a mean over microbatches and replicas weighs each with; None for equally.
        ended: when its results were taken in, in seconds since 1970.
        fingerprint: 8 bytes for each group of tensors, and the chain; empty if there are none.
        elements: the digest of each element, [steps, microbatches, replicas]; None if there are none.
        reading: which elements it consumed: where they come from, by name; empty if unknown.
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

    @property
    def nbytes(self) -> int:
        """About how much memory it holds."""
        import jax

        arrays = [*self.scalars.values(), *jax.tree.leaves([part.value for part in self.parts])]
        return sum(array.nbytes for array in arrays)


class Sink(Protocol):
    """Keeps what executions leave behind."""

    def fitting(self, info: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """A fit, from its beginning to its end; `info` says what runs, ready for JSON.

        Everything is kept when the context ends. What went wrong with keeping it is raised then at
        the latest, unless another exception is on its way.
        """
        ...

    def execution(self, done: Finished) -> None:
        """Take one execution. Waits if the sink cannot follow; raises what went wrong before."""
        ...

    def compilation(self, row: Mapping[str, Any]) -> None:
        """Take what was compiled: purpose, cause, seconds; ready for JSON."""
        ...

    def flush(self) -> None:
        """Wait until everything handed over so far is kept for good."""
        ...

    def mark(self) -> Callable[[], Any]:
        """Mark what was handed over so far. The call that is returned waits until all of it is kept for
        good, and tells where it ends, ready for JSON."""
        ...

    def take_up(self, end: Any) -> None:
        """The next fit goes on from a checkpoint: what was kept behind this mark is cut."""
        ...

    def stored(self) -> dict[tuple[str, str], list[Source]]:
        """The records of the fit that runs, or of the last one, by name and kind."""
        ...
