"""One execution: in flight (a ticket), and with its results on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from tailrace.errors import TailraceError
from tailrace.program.running.loop_state import Origin
from tailrace.records.history import one_of, step_means
from tailrace.records.parts import Part
from tailrace.records.records import Records
from tailrace.taps.frame import Emission


# Compared by identity: `==` of the fields would compare arrays, and wait for the device.
@dataclasses.dataclass(frozen=True, eq=False)
class Ticket:
    """An execution in flight, whose results are not collected yet.

    Attributes:
        first_step: the number of its first step.
        steps: the number of its steps.
        emitted: its emissions, still on the device.
        scalars: loss and metrics by name, still on the device; empty if they were muted.
        ready: an array that is ready when the execution has finished.
        origin: its inputs, if they are kept for a guard.
        digests: digests of the state and elements after it, on the device; None if not requested.
        reading: the elements it consumes: epoch, index of the first, number; None if unknown.
        watch: what a sentinel compares when it is collected.
    """

    first_step: int
    steps: int
    emitted: dict[Hashable, Emission]
    scalars: Mapping[str, Any]
    ready: Any
    origin: Origin | None = None
    digests: Any = None
    reading: tuple[int, int, int] | None = None
    watch: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """The results of an execution, on the host.

    Attributes:
        first_step: the number of its first step.
        steps: the number of its steps that count: all, or those before a guard stopped it.
        parts: the emissions of its taps.
        scalars: loss and metrics by name, each [steps, microbatches, replicas].
        weights: the weights of a mean over microbatches and replicas; None for equal ones.
        arrays: arrays of aux by name, each [steps, microbatches, replicas, ...].
        failure: why the training ends with it: a guard stopped it, or an outfeed is full.
        fingerprint: 8 bytes per group of tensors; empty if not requested.
        elements: the digest of each element, [steps, microbatches, replicas].
        reading: the elements it consumed: epoch, index of the first, number; None if unknown.
    """

    first_step: int
    steps: int
    parts: Sequence[Part]
    scalars: dict[str, np.ndarray]
    weights: np.ndarray | None = None
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    failure: TailraceError | None = None
    fingerprint: Mapping[str, int] = dataclasses.field(default_factory=dict)
    elements: np.ndarray | None = None
    reading: tuple[int, int, int] | None = None

    @property
    def losses(self) -> np.ndarray:
        """The loss of each step, as the history of a fit has it, or the metric in its place."""
        return step_means(one_of(self.scalars), self.weights)

    @property
    def records(self) -> Records:
        """The emissions of its taps alone, as records by name."""
        # Made when asked for: a fit adds the same parts to the records of all its executions.
        records = Records()
        for part in self.parts:
            records.add(part)
        return records
