"""The number of steps per execution: given, or derived from the time and the bytes of a step.

Each dispatch costs some tens of microseconds on the host; executions of a fraction of a second make
that negligible and still give the host results often. All elements of an execution are on the device at
once, and so are those of the next: bytes set the other limit. One executable serves executions of
every length, so that finding the length does not compile anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tailrace.base.checks import check_count
from tailrace.base.messages import counted, size_text
from tailrace.devices import devices
from tailrace.errors import OptionError
from tailrace.feeds import dispatch_table
from tailrace.taps.tap import bytes_per_step, check_bytes
from tailrace.trainer.engine import Engine


@dataclasses.dataclass
class Pace:
    """Chooses the number of steps of the next execution.

    Attributes:
        steps: the given number, or None for automatic.
        bytes_per_step: the bytes of the elements that one step reads.
        most_bytes: the most bytes of the elements of one execution.
        most_steps: another limit (the bytes that taps return); None for none.
        period: the period of taps; a chosen number is a multiple of it, if it is not smaller.
        target_s: the target duration of an execution.
        chosen: the chosen number, once it is known.
        reason: the reason of the choice, as text.
        trials: measured seconds per step, until the number is chosen.
        lengths: the steps of each trial.
        times_given: whether to time the first executions even if their length is given.
    """

    steps: int | None
    bytes_per_step: int
    most_bytes: int = dataclasses.field(default_factory=dispatch_table.most_bytes)
    most_steps: int | None = None
    period: int = 1
    target_s: float = dispatch_table.TARGET_S
    chosen: int | None = None
    reason: str = ""
    trials: list[float] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)
    times_given: bool = False

    def __post_init__(self) -> None:
        if self.steps is not None:
            self.chosen = self.steps
            self.reason = f"{counted(self.steps, 'step')} an execution, as asked"

    @property
    def most(self) -> int:
        """The most steps of an execution, however little time they take."""
        return max(1, min(self._most_by_reason.values()))

    @property
    def _most_by_reason(self) -> dict[str, int]:
        """The most steps that each limit allows; the limits do not include time."""
        limits = {
            f"memory of elements, {size_text(self.most_bytes)}": (
                self.most_bytes // max(1, self.bytes_per_step)
            ),
            f"the longest execution, {dispatch_table.LONGEST:,} steps": dispatch_table.LONGEST,
        }
        if self.most_steps is not None:
            limits["memory of records"] = self.most_steps
        return limits

    def capacity(self, before: int | None, total: int | None) -> int:
        """The most steps of an execution, for which the executable has room.

        It is the same for fits of every length, or each would need a compilation. It grows only if an
        execution of the given length would not fit.
        """
        if self.steps is None:
            return self.most
        # A short fit does not need room for a given number of steps that it will never run; but no
        # less than the automatic limit, so that a longer fit later finds the same capacity.
        needed = self.steps if total is None else min(self.steps, max(total, self.most))
        return max(before or 0, needed)

    def chosen_state(self) -> dict[str, Any]:
        """For a checkpoint: records of whole executions depend on their lengths."""
        trials = {"trials": list(self.trials), "lengths": list(self.lengths)}
        return {"chosen": self.chosen, "reason": self.reason, **trials}

    def choose_as(self, state: Mapping[str, Any]) -> None:
        """Continue with the lengths from a checkpoint, unless they are given."""
        if self.steps is None:
            chosen = state["chosen"]
            # The length of the earlier process, for equal records, but within this device's memory.
            self.chosen = None if chosen is None else min(int(chosen), self.most)
            self.reason, self.trials = state["reason"], list(state["trials"])
            self.lengths = list(state.get("lengths", [1] * len(self.trials)))

    @property
    def is_measuring(self) -> bool:
        """Whether to time the next execution: with a given number, only accelerators need that."""
        return self.chosen is None or (
            self.times_given and len(self.trials) < dispatch_table.TRIALS
        )

    @property
    def seconds_per_step(self) -> float:
        """The seconds per step; infinite while unknown."""
        # The minimum: whatever else the host does can only make a trial slower.
        return min(self.trials, default=float("inf"))

    def next(self, remaining: int | None) -> int:
        """The number of steps of the next execution."""
        # Of the first step nothing is known: it may take seconds, and then it goes alone.
        piece = self.chosen or (self._next_trial() if self.trials else 1)
        return piece if remaining is None else min(piece, remaining)

    def _next_trial(self) -> int:
        length, _ = self._ideal()
        # An execution has a cost of its own (buffers for all records that it could make), and one step
        # alone pays all of it. Unless steps take long, more of them together show what a step costs.
        if self.trials[-1] < dispatch_table.ALONE_S and (len(self.trials) == 1 or self._is_falling):
            length = max(length, 2 * self.lengths[-1])
        return min(dispatch_table.TRIAL, self.most, length)

    @property
    def _is_falling(self) -> bool:
        """Whether a longer execution made a step clearly cheaper, so that a still longer one may."""
        before = min(self.trials[:-1], default=float("inf"))
        return self.lengths[-1] < dispatch_table.TRIAL and self.trials[-1] < 0.8 * before

    @property
    def _overhead_s(self) -> float:
        """Seconds of an execution that do not grow with its steps, from trials of unequal lengths."""
        totals = sorted(
            {n: min(s * m for m, s in self._tried if m == n) for n, _ in self._tried}.items()
        )
        if len(totals) < 2:
            return 0.0
        # Two points of a line: total = overhead + steps x seconds. The shortest and the longest
        # trial are farthest apart, so noise matters least.
        (short, less), (long, more) = totals[0], totals[-1]
        return max(0.0, less - short * (more - less) / (long - short))

    @property
    def _tried(self) -> list[tuple[int, float]]:
        return list(zip(self.lengths, self.trials, strict=True))

    def measured(self, steps: int, seconds: float) -> None:
        """Add the time of an execution, without its compilation; after some, choose the length."""
        if not self.is_measuring:
            return
        # Never 0: lengths are computed by dividing by it, and a clock may not have advanced.
        self.trials.append(max(seconds / steps, 1e-7))
        self.lengths.append(steps)
        if self.chosen is not None:
            return
        # The first one alone says "one step" of any large model.
        if len(self.trials) < dispatch_table.TRIALS or self._is_falling:
            self.reason = (
                f"{counted(steps, 'step')} an execution while the time of a step is measured"
            )
            return
        self.chosen, limit = self._ideal()
        self.reason = (
            f"{counted(self.chosen, 'step')} an execution: a step takes "
            f"{self.seconds_per_step * 1e6:,.0f} microseconds and its elements "
            f"{self.bytes_per_step / 1e6:,.2f} MB (limit: {limit})"
        )

    def _ideal(self) -> tuple[int, str]:
        """The best length as far as it is known, and what limits it."""
        target, reason = self._target()
        limits = {reason: int(target / self.seconds_per_step), **self._most_by_reason}
        limit = min(limits, key=lambda name: limits[name])
        # Whole periods: a loop of fixed length ends with a look.
        length = max(1, limits[limit])
        return max(length - length % self.period, min(length, self.period)), limit

    def _target(self) -> tuple[float, str]:
        """Seconds of an execution, and their reason."""
        # Long enough that the cost of an execution itself does not count, up to a limit.
        overhead, longest = self._overhead_s, max(self.target_s, dispatch_table.LONGEST_S)
        wanted = dispatch_table.OVERHEADS * overhead
        if wanted <= self.target_s:
            return self.target_s, f"the target time, {self.target_s:g} s"
        if wanted > longest:
            return longest, f"the longest execution, {longest:g} s"
        times = f"{dispatch_table.OVERHEADS} x {overhead * 1e3:,.1f} ms"
        return wanted, f"the overhead of an execution, {times}"


def pace_for(engine: Engine, steps: int | None, most_bytes: int, before: Pace | None) -> Pace:
    """The pace of fits on the engine's current program; `before` if it still applies.

    Args:
        engine: the engine.
        steps: the given number, or None for automatic.
        most_bytes: the most bytes of one execution's records on the device.
        before: the pace found earlier.
    """
    sight, runner = engine.sight, engine.runner
    count, replicas = engine.accumulation.microbatches, engine.placement.replicas
    recorded = bytes_per_step(sight.chosen, count, replicas)
    if steps is not None:
        check_bytes(sight.chosen, steps, count, replicas, most_bytes)
    # Automatic lengths also keep the buffers of records small: every execution clears all of them.
    room = most_bytes if steps is not None else min(most_bytes, dispatch_table.RECORD_BYTES)
    most = int(room / recorded) if recorded else None
    # Periodic taps need executions of at least one period: refuse those that cannot fit.
    if most is not None and most < sight.period:
        check_bytes(sight.chosen, sight.period, count, replicas, most_bytes)
        most = sight.period
    size = runner.bytes_per_pass
    # Measuring again would hold up the first executions of every fit. Elements of another size are
    # another program, with other times.
    if before is not None and before.bytes_per_step == size:
        return before
    return Pace(
        steps,
        size,
        most_steps=most,
        period=sight.period,
        target_s=dispatch_table.LIVE_S if engine.live else dispatch_table.TARGET_S,
        # Where a loop of fixed length is faster than one whose length is data: `LoopRunner.fix`
        # decides by the time of a step.
        times_given=devices.platform() != "cpu",
    )


def parse_steps(value: int | str) -> int | None:
    """`steps_per_execution` as a number, or None for "auto"."""
    if isinstance(value, str) and value == "auto":
        return None
    more = ", or 'auto'"
    return check_count("steps_per_execution", value, at_least=1, error=OptionError, more=more)
