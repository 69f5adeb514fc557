"""One execution: on its way (a ticket), and when its results are on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from tailrace.errors import NonFiniteError
from tailrace.program.running.loop_state import Origin
from tailrace.records.records import Part
from tailrace.taps.frame import Emission


@dataclasses.dataclass(frozen=True, eq=False)
class Ticket:
    """An execution that was dispatched and whose results nobody has collected yet.

    Attributes:
        first_step: the number of its first step.
        steps: how many steps it has.
        emitted: what leaves the program, still on the device.
        scalars: loss and metrics by name, still on the device; empty if they were muted.
        ready: an array that is ready when the execution is over.
        origin: what it started from, if that is kept for a guard.
        digests: of state and elements after it, still on the device; None if nobody wants them.
        reading: which elements it consumes: epoch, number of the first, how many; None if unknown.
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
    """What an execution left behind, on the host.

    Attributes:
        first_step: the number of its first step.
        steps: how many of its steps count: all, or those before a guard stopped it.
        parts: what its taps emitted.
        scalars: loss and metrics by name, each [steps, microbatches, replicas].
        weights: what a mean over microbatches and replicas weighs each with; None for equally.
        failure: why a guard stopped it, if one did.
        fingerprint: 8 bytes for each group of tensors; empty if nobody wants them.
        elements: the digest of each element, [steps, microbatches, replicas].
        reading: which elements it consumed: epoch, number of the first, how many; None if unknown.
    """

    first_step: int
    steps: int
    parts: Sequence[Part]
    scalars: dict[str, np.ndarray]
    weights: np.ndarray | None = None
    failure: NonFiniteError | None = None
    fingerprint: Mapping[str, int] = dataclasses.field(default_factory=dict)
    elements: np.ndarray | None = None
    reading: tuple[int, int, int] | None = None
