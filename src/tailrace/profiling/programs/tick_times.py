"""Planned and measured times of each unit of a pipeline.

In the compiled program a unit (the forward or backward of one microbatch at one stage) is a loop of at
most one iteration that every device runs in every tick; see `pipeline/running/emit_ticks.py`. So a
device's n-th run of that instruction is tick n of the plan, whatever the times are.
"""

from __future__ import annotations

import bisect
import dataclasses
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
    found: dict[tuple[int, int, Unit], TimedUnit] = {}
    for (ordinal, who), times in loops.items():
        if ordinal not in number:
            continue
        ran = _by_loop(times, inside.get((ordinal, who), []))
        for index, loop in enumerate(times):
            step, tick = divmod(index, len(ticks))
            for unit in ticks[tick]:
                if unit[:3] == (number[ordinal], who[0], who[1]):
                    one = TimedUnit(
                        step, tick, unit, *(ran.get(index) or (*loop, loop[1] - loop[0]))
                    )
                    before = found.get((step, tick, unit))
                    found[step, tick, unit] = one if before is None else _together(before, one)
    return MeasuredTicks(plan, steps, sorted(found.values(), key=lambda one: one.start))


def _together(one: TimedUnit, other: TimedUnit) -> TimedUnit:
    """Join two members of a stage on one device."""
    return dataclasses.replace(
        one,
        start=min(one.start, other.start),
        end=max(one.end, other.end),
        busy=one.busy + other.busy,
    )


Who = tuple[str, int, int]
Times = list[tuple[int, int]]


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
        if opcode == "while" and not place.scope and place.operation == "while":
            loops.setdefault((one.device, place.unit), []).append((one.start, one.end))
        elif opcode not in CONTAINERS:
            inside.setdefault((one.device, place.unit), []).append((one.start, one.end))
    for times in (*loops.values(), *inside.values()):
        times.sort()
    return loops, inside


def _by_loop(loops: Times, operations: Times) -> dict[int, tuple[int, int, int]]:
    """Start, end and busy time of the operations of each loop, by its index.

    A loop may be entered before its operations get a thread, so its cost is the time of the operations.
    """
    found: dict[int, tuple[int, int, int]] = {}
    starts = [start for start, _ in loops]
    for start, end in operations:
        index = bisect.bisect_right(starts, start) - 1
        if index < 0 or start > loops[index][1]:
            continue
        if index not in found:
            found[index] = (start, end, end - start)
            continue
        first, last, busy = found[index]
        # Operations of one unit may overlap (several threads, several streams): time counts once.
        found[index] = (first, max(last, end), busy + max(0, end - max(start, last)))
    return found
