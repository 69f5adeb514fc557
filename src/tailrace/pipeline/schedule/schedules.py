"""When each piece of work runs: the three schedules and their count rules.

A microbatch visits the *virtual stages* of a pipeline one after the other, one a tick: F0 to F(S-1)
and, in training, B(S-1) to B0. With N virtual stages, the work of one microbatch is a row of N
ticks, and a schedule is the set of rotations of that row that may run concurrently:

    start(m) = N * (m div L) + offsets[m mod L]

`offsets` are the allowed rotations and L is their number. Everything else about a plan (ticks, phases,
stash, bubble) follows from these two lines.
"""

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tailrace.base.checks import member_named
from tailrace.errors import PlanError


class PipelineSchedule(StrEnum):
    """How the stages of a pipeline share time. Strings are accepted wherever one is expected.

    Raises:
        PlanError: there is no schedule of that name.

    >>> import tailrace as tr
    >>> tr.PipelineSchedule("Grouped") is tr.PipelineSchedule.GROUPED
    True
    """

    GROUPED = "grouped"
    """A microbatch starts in every tick; in a tick each device runs one backward and one forward."""

    INTERLEAVED = "interleaved"
    """A device runs one forward or one backward per tick, with about half the stash of Grouped."""

    SEQUENTIAL = "sequential"
    """One microbatch at a time, as plain sharding does it; for debugging."""

    @classmethod
    def parse(cls, value: object) -> "PipelineSchedule":
        """The member that a string names; a value of another type is an error."""
        return cls(value) if isinstance(value, str) else cls._missing_(value)

    @classmethod
    def _missing_(cls, value: object) -> "PipelineSchedule":
        return member_named(cls, value, "A pipeline schedule", error=PlanError)


class Phases(NamedTuple):
    """The ticks of each phase of an execution, as ranges."""

    ramp_up: range
    steady: range
    ramp_down: range

    def of(self, tick: int) -> str:
        """The phase of a tick: "ramp-up", "steady" or "ramp-down"."""
        if tick in self.ramp_up:
            return "ramp-up"
        return "steady" if tick in self.steady else "ramp-down"


def virtual_placement(
    placement: Sequence[tuple[int, ...]], training: bool
) -> tuple[tuple[int, ...], ...]:
    """The devices of each virtual stage: forward order, then the reverse for training."""
    forward = tuple(placement)
    return forward + forward[::-1] if training else forward


@lru_cache(maxsize=256)
def schedule_offsets(
    schedule: PipelineSchedule, virtual: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """The rotations of a microbatch's row that may run concurrently.

    Grouped takes all of them, Sequential the first. Interleaved goes through them in order and takes
    each one that never gives a device two units in one tick.

    >>> schedule_offsets(PipelineSchedule.INTERLEAVED, ((0,), (1,), (1,), (0,)))
    (0, 2)
    >>> schedule_offsets(PipelineSchedule.INTERLEAVED, tuple((d,) for d in (0, 1, 2, 1, 0, 1)))
    (0, 1)
    """
    if schedule is PipelineSchedule.SEQUENTIAL:
        return (0,)
    if schedule is PipelineSchedule.GROUPED:
        return tuple(range(len(virtual)))
    # Greedy, from rotation 0 on: with one stage per device this is 1F1B, and it is deterministic.
    # `blocked` are the rotations that conflict with an accepted one.
    clash = _clashing_rotations(virtual)
    blocked = np.zeros(len(virtual), dtype=bool)
    accepted: list[int] = []
    for rotation in range(len(virtual)):
        if not blocked[rotation]:
            accepted.append(rotation)
            blocked |= np.roll(clash, rotation)
    return tuple(accepted)


def _clashing_rotations(virtual: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """For each rotation, whether it has the same device as the unrotated row at some position.

    Whether two rotations conflict depends only on their difference, so one row of N flags is enough.
    """
    count = len(virtual)
    visits: dict[int, list[int]] = {}
    for position, devices in enumerate(virtual):
        for device in set(devices):
            visits.setdefault(device, []).append(position)
    clash = np.zeros(count, dtype=bool)
    for positions in visits.values():
        # A rotation by the distance of two visits of a device brings both to one tick.
        places = np.array(positions)
        # The distance 0 is among them: a rotation conflicts with itself, so each is taken once.
        for place in positions:
            clash[(places - place) % count] = True
    return clash


def require_count(
    microbatches: int, overlap: int, schedule: PipelineSchedule, stages: int, training: bool
) -> None:
    """Refuse a number of microbatches that is not a multiple of `overlap`."""
    if microbatches % overlap:
        rule = f"must be a multiple of {overlap}, but it is {microbatches}."
    elif microbatches < overlap:
        rule = f"must be at least {overlap}, but it is {microbatches}."
    else:
        return
    # Numbers to suggest instead: the nearest multiples, if they are positive.
    below = microbatches // overlap * overlap
    choices = [count for count in (below, below + overlap) if count >= overlap] or [overlap]
    use = " or ".join(f"microbatches={count}" for count in choices)
    work = "training" if training else "inference"
    # "The number of iterations of the pipeline must be a multiple of" is the original's wording:
    # programs written for IPUs may match it.
    text = (
        f"The number of iterations of the pipeline {rule} The {schedule} schedule for {work} with "
        f"{stages} stages on these devices keeps {overlap} in flight and runs them in whole "
        f"rounds. Use {use}"
    )
    if microbatches >= 1:
        text += ", or the sequential schedule, which takes any count"
    raise PlanError(f"{text}.")
