"""Planned and measured times of each unit of a pipeline.

In the compiled program a unit (the forward or backward of one microbatch at one stage) is a loop of at
most one iteration that every device runs in every tick; see `pipeline/running/emit_ticks.py`. So a
device's n-th run of that instruction is tick n of the plan, whatever the times are.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator

from tailrace.pipeline.schedule.plan import Plan
from tailrace.pipeline.schedule.units import Unit
from tailrace.profiling.programs.device_operations import Operation
from tailrace.profiling.programs.named_operations import CONTAINERS, NamedProgram


@dataclasses.dataclass(frozen=True, slots=True)
class TimedUnit:
    """One unit of the plan with its times, in nanoseconds.

    Attributes:
        step: the index of the step in the execution.
        tick: the tick in that step.
        unit: device, kind, stage and microbatch.
        start: its start.
        end: its end.
        busy: how long its operations ran in between.
    """

    step: int
    tick: int
    unit: Unit
    start: int
    end: int
    busy: int


def planned(plan: Plan, start: int, end: int, steps: int) -> Iterator[TimedUnit]:
    """The planned units of an execution: all steps and ticks of equal length, within its time."""
    ticks = plan.ticks
    length = (end - start) / (steps * len(ticks))
    for step in range(steps):
        for number, tick in enumerate(ticks):
            begin = start + (step * len(ticks) + number) * length
            for device in plan.devices:
                mine = [unit for unit in tick if unit.device == device]
                for place, unit in enumerate(mine):
                    share = length / len(mine)
                    first, last = begin + place * share, begin + (place + 1) * share
                    yield TimedUnit(step, number, unit, round(first), round(last), round(share))


@dataclasses.dataclass(frozen=True)
class MeasuredTicks:
    """The measured ticks of some steps, on the devices of one replica.

    Attributes:
        plan: the plan of the pipeline.
        steps: the number of steps.
        units: every unit, ordered by start.
    """

    plan: Plan
    steps: int
    units: list[TimedUnit]


def measured(
    plan: Plan, operations: Iterable[Operation], program: NamedProgram, steps: int
) -> MeasuredTicks | None:
    """The measured ticks of some steps; None if the profiler did not record all of them.

    Args:
        plan: the plan of the pipeline.
        operations: the operations of those steps only.
        program: the program.
        steps: the number of steps.
    """
    ticks = plan.ticks
    loops, inside = _loops_and_operations(operations, program)
    # Ticks are found by counting, so one event that the profiler lost would shift all after it:
    # nothing is better than a wrong grid.
    if not loops or any(len(times) != steps * len(ticks) for times in loops.values()):
        return None
    # Devices of a plan are numbered from 0; replicas of a pipeline have more of them.
    ordinals = sorted({device for device, _ in loops})[: len(plan.devices)]
    if len(ordinals) < len(plan.devices):
        return None
    number = dict(zip(ordinals, plan.devices, strict=True))
    found: dict[int, dict[_Place, Times]] = {}
    for (ordinal, who), times in loops.items():
        if ordinal not in number:
            continue
        device = number[ordinal]
        ran = _by_loop(times, inside.get((ordinal, who), []))
        for index, loop in enumerate(times):
            step, tick = divmod(index, len(ticks))
            for unit in ticks[tick]:
                if unit[:3] == (device, who[0], who[1]):
                    # Two members of a stage on one device are one unit.
                    mine = found.setdefault(device, {}).setdefault((step, tick, unit), [])
                    mine += ran.get(index) or [loop]
    units = [one for places in found.values() for one in _one_by_one(places)]
    return MeasuredTicks(plan, steps, sorted(units, key=lambda one: one.start))


Who = tuple[str, int, int]
"""The kind, stage and member of a unit."""
Times = list[tuple[int, int]]
"""Starts and ends, in nanoseconds."""
_Place = tuple[int, int, Unit]
"""The step, the tick and the unit."""


def _one_by_one(places: dict[_Place, Times]) -> Iterator[TimedUnit]:
    """The units of one device, none before the end of the one before it.

    On a CPU an operation that no later one needs (the copy of a gradient's sum) is recorded until some
    thread has time for it, ticks later: at two stages of an MLP 27 ms instead of 9. The plan knows no
    such overlap. So a moment counts for the unit that started last, and none counts for a tick once
    the next one has started.
    """
    ran = {place: _merged(times) for place, times in places.items()}
    ordered = sorted(ran, key=lambda place: (place[:2], ran[place]))
    groups = [list(group) for _, group in itertools.groupby(ordered, lambda place: place[:2])]
    starts = [min(ran[place][0][0] for place in group) for group in groups]
    for group, next_tick in zip(groups, [*starts[1:], sys.maxsize], strict=True):
        for at, place in enumerate(group):
            (start, _), *_ = ran[place]
            mine = [(a, min(b, next_tick)) for a, b in ran[place] if a < next_tick]
            later = _merged([time for other in group[at + 1 :] for time in ran[other]])
            end = min(max([start, *(b for _, b in mine)]), later[0][0] if later else sys.maxsize)
            busy = sum(b - a for a, b in mine) - _overlap(mine, later)
            yield TimedUnit(*place, start, end, busy)


def _loops_and_operations(
    operations: Iterable[Operation], program: NamedProgram
) -> tuple[dict[tuple[int, Who], Times], dict[tuple[int, Who], Times]]:
    """For each device and unit: the times of its loop, and of the operations inside."""
    instructions = program.module.instructions
    loops: dict[tuple[int, Who], Times] = {}
    inside: dict[tuple[int, Who], Times] = {}
    for one in operations:
        place = program.place(one.name)
        if place is None or place.unit is None:
            continue
        opcode = instructions[one.name].opcode
        # The unit's own loop, not a loop of the model in it.
        if opcode == "while" and not place.scope and place.operation == "while":
            loops.setdefault((one.device, place.unit), []).append((one.start, one.end))
        elif opcode not in CONTAINERS:
            inside.setdefault((one.device, place.unit), []).append((one.start, one.end))
    for times in (*loops.values(), *inside.values()):
        times.sort()
    return loops, inside


def _by_loop(loops: Times, operations: Times) -> dict[int, Times]:
    """The times of the operations of each loop, by its index.

    A loop may be entered before its operations get a thread, so its cost is the time of the operations.
    """
    found: dict[int, Times] = {}
    starts = [start for start, _ in loops]
    for start, end in operations:
        index = bisect.bisect_right(starts, start) - 1
        if index >= 0 and start <= loops[index][1]:
            found.setdefault(index, []).append((start, end))
    return found


def _merged(times: Times) -> Times:
    """The same moments without overlaps, in order.

    Operations of one unit may overlap (several threads, several streams): time counts once.
    """
    found: Times = []
    for start, end in sorted(times):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _overlap(one: Times, other: Times) -> int:
    """How long both last, of times without overlaps."""
    return sum(
        max(0, min(end, last) - max(start, first)) for start, end in one for first, last in other
    )
