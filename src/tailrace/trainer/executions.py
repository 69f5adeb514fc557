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
    """

    first_step: int
    steps: int
    emitted: dict[Hashable, Emission]
    scalars: Mapping[str, Any]
    ready: Any
    origin: Origin | None = None


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
    """

    first_step: int
    steps: int
    parts: Sequence[Part]
    scalars: dict[str, np.ndarray]
    weights: np.ndarray | None = None
    failure: NonFiniteError | None = None
