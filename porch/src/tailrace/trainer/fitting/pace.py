"""How many steps one execution runs: given, or found from the time and the bytes of a step.

Each dispatch costs some tens of microseconds on the host; a fraction of a second of steps makes that
vanish and still lets the host see results often. The elements of an execution are on the device all
at once, and so are those of the next: bytes set the other limit. Executions of every length run in
one executable, so that finding the length compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tailrace.errors import OptionError
from tailrace.program.running.dispatch_lengths import LIVE_S, LONGEST, most_bytes
from tailrace.taps.tap import bytes_per_step, check_bytes
from tailrace.trainer.engine import Engine

TARGET_S = 0.25
"""How long one execution should take, in seconds."""

TRIAL = 10
"""The most steps of the first executions, whose time is measured."""

TRIALS = 3
"""How many of them: the first ones after a compilation take several times as long."""


@dataclasses.dataclass
class Pace:
    """Chooses the number of steps of the next execution.

    Attributes:
        steps: what was given, or None to find out.
        bytes_per_step: bytes of the elements that one step reads.
        most_bytes: what the elements of one execution may take.
        most_steps: a limit that something else sets (what taps return); None for none.
        target_s: how long an execution should take.
        chosen: what was found, once it is.
        reason: why, in words.
        trials: seconds a step, as measured until it is chosen.
        times_given: whether the first executions are timed also where their length is given.
    """

    steps: int | None
    bytes_per_step: int
    most_bytes: int = dataclasses.field(default_factory=most_bytes)
    most_steps: int | None = None
    target_s: float = TARGET_S
    chosen: int | None = None
    reason: str = ""
    trials: list[float] = dataclasses.field(default_factory=list)
    times_given: bool = False

    def __post_init__(self) -> None:
        if self.steps is not None:
            self.chosen, self.reason = self.steps, f"{self.steps} steps an execution, as asked"

    @property
    def most(self) -> int:
        """The most steps whose elements fit into the memory set aside for them."""
        fitting = max(1, self.most_bytes // max(1, self.bytes_per_step))
        most = LONGEST if self.most_steps is None else self.most_steps
        return max(1, min(fitting, most, LONGEST))

    def capacity(self, before: int | None, total: int | None) -> int:
        """The most steps of an execution: what is compiled has room for that many, and no more.

        It is the same for fits of every length, or each would be compiled for itself. It grows only
        where an execution as long as was asked for would not fit.
        """
        if self.steps is None:
            return self.most
        needed = self.steps if total is None else min(self.steps, max(total, self.most))
        return max(before or 0, needed)

    def chosen_state(self) -> dict[str, Any]:
        """What a checkpoint keeps: records of whole executions depend on their lengths."""
        return {"chosen": self.chosen, "reason": self.reason, "trials": list(self.trials)}

    def choose_as(self, state: Mapping[str, Any]) -> None:
        """Go on with the lengths that a checkpoint kept, unless they were given."""
        if self.steps is None:
            chosen = state["chosen"]
            self.chosen = None if chosen is None else min(int(chosen), self.most)
            self.reason, self.trials = state["reason"], list(state["trials"])

    @property
    def is_measuring(self) -> bool:
        """Whether the next execution is timed: a given number needs that on accelerators only."""
        return len(self.trials) < TRIALS if self.times_given else self.chosen is None

    @property
    def seconds_per_step(self) -> float:
        """How long a step takes; infinite while that is unknown."""
        return min(self.trials, default=float("inf"))

    def next(self, remaining: int | None) -> int:
        """The number of steps of the next execution."""
        # Of the first step nothing is known: it may take seconds, and then it goes alone.
        piece = self.chosen or (min(TRIAL, self._ideal()) if self.trials else 1)
        return piece if remaining is None else min(piece, remaining)

    def measured(self, steps: int, seconds: float) -> None:
        """Learn from an execution, without its compilation; after some, choose the length."""
        if not self.is_measuring:
            return
        self.trials.append(max(seconds / steps, 1e-7))
        if self.chosen is not None:
            return
        if len(self.trials) < TRIALS:  # the first one alone says "one step" of any large model
            self.reason = f"{steps} steps an execution while the time of a step is measured"
            return
        self.chosen = self._ideal()
        limit = "memory" if self.chosen >= self.most else "time"
        self.reason = (
            f"{self.chosen} steps an execution: a step takes {self.seconds_per_step * 1e6:,.0f} "
            f"microseconds and its elements {self.bytes_per_step / 1e6:,.2f} MB (limit: {limit})"
        )

    def _ideal(self) -> int:
        return min(self.most, max(1, int(self.target_s / self.seconds_per_step)))


def pace_for(engine: Engine, steps: int | None, most_bytes: int, before: Pace | None) -> Pace:
    """The pace of fits on the engine's program in use; the one from before where it still holds.

    Args:
        engine: what will run.
        steps: what was given, or None to find out.
        most_bytes: what the records of one execution may take on the device.
        before: what was found earlier.
    """
    sight, runner = engine.sight, engine.runner
    count, replicas = engine.accumulation.microbatches, engine.placement.replicas
    recorded = bytes_per_step(sight.chosen, count, replicas)
    if steps is not None:
        check_bytes(sight.chosen, steps, count, replicas, most_bytes)
    most = int(most_bytes / recorded) if recorded else None
    if most is not None and most < sight.period:
        check_bytes(sight.chosen, sight.period, count, replicas, most_bytes)
    size = runner.bytes_per_pass
    if before is not None and before.bytes_per_step == size:
        return before
    return Pace(
        steps,
        size,
        most_steps=most,
        target_s=LIVE_S if engine.live else TARGET_S,
        times_given=engine.placement.device.platform != "cpu",
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
