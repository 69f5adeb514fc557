"""How many steps one execution runs: given, or found from the time and the bytes of a step.

Each dispatch costs some tens of microseconds on the host; a fraction of a second of steps makes that
vanish and still lets the host see results often. The elements of an execution are on the device all
at once, and so are those of the next: bytes set the other limit.
"""

from __future__ import annotations

import dataclasses

from tailrace.errors import OptionError
from tailrace.program.running.dispatch_lengths import MOST_BYTES, good_piece

TARGET_S = 0.25
"""How long one execution should take, in seconds."""

FIRST = 10
"""Steps of the first executions, whose time is measured."""

TRIALS = 3
"""How many of them: the first ones after a compilation take several times as long."""


@dataclasses.dataclass
class Pace:
    """Chooses the number of steps of the next execution.

    Attributes:
        steps: what was given, or None to find out.
        bytes_per_step: bytes of the elements that one step reads.
        multiple_of: executions are a multiple of this (taps that look at every n-th step).
        most_bytes: what the elements of one execution may take.
        most_steps: a limit that something else sets (what taps return); None for none.
        target_s: how long an execution should take.
        chosen: what was found, once it is.
        reason: why, in words.
        trials: seconds a step, as measured until it is chosen.
    """

    steps: int | None
    bytes_per_step: int
    multiple_of: int = 1
    most_bytes: int = MOST_BYTES
    most_steps: int | None = None
    target_s: float = TARGET_S
    chosen: int | None = None
    reason: str = ""
    trials: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.steps is not None:
            self.chosen, self.reason = self.steps, f"{self.steps} steps an execution, as asked"

    @property
    def most(self) -> int:
        """The most steps whose elements fit into the memory set aside for them."""
        fitting = max(1, self.most_bytes // max(1, self.bytes_per_step))
        return fitting if self.most_steps is None else max(1, min(fitting, self.most_steps))

    def next(self, remaining: int | None) -> int:
        """The number of steps of the next execution."""
        if self.chosen is not None:
            piece = self.chosen
        else:
            piece = good_piece(remaining or FIRST, min(FIRST, self.most), self.multiple_of)
        return piece if remaining is None else min(piece, remaining)

    def measured(self, steps: int, seconds: float, remaining: int | None) -> None:
        """Learn from an execution, without its compilation; after some, choose the length."""
        if self.chosen is not None:
            return
        self.trials.append(max(seconds / steps, 1e-7))
        if len(self.trials) < TRIALS:
            self.reason = f"{steps} steps an execution while the time of a step is measured"
            return
        per_step = min(self.trials)
        ideal = min(self.most, max(1, int(self.target_s / per_step)))
        rest_s = per_step * remaining if remaining is not None else float("inf")
        if ideal > 2 * steps and rest_s < 2 * self.target_s:
            # Another length would have to be compiled, and there is too little to gain. A later,
            # longer fit may decide otherwise.
            self.reason = f"{steps} steps an execution: too few are left for more to pay"
            return
        worth_it = ideal > 2 * steps
        ideal = good_piece(remaining or ideal, ideal, self.multiple_of) if worth_it else steps
        self.chosen = ideal
        limit = "memory" if ideal >= self.most else "time"
        self.reason = (
            f"{ideal} steps an execution: a step takes {per_step * 1e6:,.0f} microseconds and its "
            f"elements {self.bytes_per_step / 1e6:,.2f} MB (limit: {limit})"
        )


def parse_steps(value: int | str) -> int | None:
    """`steps_per_execution` as a number, or None for "auto"."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(
            f"steps_per_execution is 'auto' or a number of steps of at least 1. Received: {value!r}."
        )
    return value
