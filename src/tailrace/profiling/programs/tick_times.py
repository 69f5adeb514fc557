"""When each unit of a pipeline ran: planned, and measured.

In the compiled program a unit (the forward or backward of one microbatch at one stage) is a loop of
at most one pass, run on every device in every tick; see `pipeline/running/emit_ticks.py`. So the
n-th time that a device runs that instruction is tick n of the plan, whatever the times are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tailrace.pipeline.schedule.plan import Plan
from tailrace.pipeline.schedule.units import Unit
from tailrace.profiling.programs.device_operations import Operation
from tailrace.profiling.programs.named_operations import NamedProgram


@dataclasses.dataclass(frozen=True, slots=True)
class TimedUnit:
    """One unit of the plan, when it ran. Times are nanoseconds.

    Attributes:
        step: which step of the execution.
        tick: of that step.
        unit: device, kind, stage and microbatch.
        start: when it began.
        end: when it was over.
    """

    step: int
    tick: int
    unit: Unit
    start: int
    end: int


def planned(plan: Plan, start: int, end: int, steps: int) -> Iterator[TimedUnit]:
    """The units of an execution as planned: all steps alike, all ticks alike, within its time."""
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
                    yield TimedUnit(step, number, unit, round(first), round(last))


def measured(
    plan: Plan, operations: Iterable[Operation], program: NamedProgram, steps: int
) -> list[TimedUnit] | None:
    """The units of one execution as they ran; None where the profiler did not see them all.

    Args:
        plan: of the pipeline.
        operations: of that execution alone.
        program: what ran.
        steps: how many steps it had.
    """
    runs = _runs(operations, program)
    if not runs:
        return None
    ticks = plan.ticks
    expected = steps * len(ticks)
    ordinals = sorted({device for device, _ in runs})
    if any(len(times) != expected for times in runs.values()):
        return None
    # Devices of a plan are numbered from 0; replicas of a pipeline have more of them.
    per_replica = len(plan.devices)
    number = {ordinal: plan.devices[i % per_replica] for i, ordinal in enumerate(ordinals)}
    first_replica = set(ordinals[:per_replica])
    found = []
    for (ordinal, (kind, stage)), times in runs.items():
        if ordinal not in first_replica:
            continue
        for index, (start, end) in enumerate(times):
            step, tick = divmod(index, len(ticks))
            for unit in ticks[tick]:
                if unit[:3] == (number[ordinal], kind, stage):
                    found.append(TimedUnit(step, tick, unit, start, end))
    return sorted(found, key=lambda one: one.start)


def _runs(
    operations: Iterable[Operation], program: NamedProgram
) -> Mapping[tuple[int, tuple[str, int]], Sequence[tuple[int, int]]]:
    """For each device and unit, when its loop ran; members of one stage on one device as one."""
    instructions = program.module.instructions
    loops: dict[str, tuple[str, int, int]] = {}
    found: dict[tuple[int, tuple[str, int, int]], list[tuple[int, int]]] = {}
    for one in operations:
        if one.name not in loops:
            place = program.place(one.name)
            is_loop = instructions[one.name].opcode == "while"
            if not is_loop or place is None or place.unit is None or not _is_unit(place):
                loops[one.name] = ("", 0, 0)
            else:
                loops[one.name] = place.unit
        who = loops[one.name]
        if who[0]:
            found.setdefault((one.device, who), []).append((one.start, one.end))
    joined: dict[tuple[int, tuple[str, int]], list[tuple[int, int]]] = {}
    for (device, (kind, stage, _)), times in found.items():
        times.sort()
        before = joined.get((device, (kind, stage)))
        # Of several members on one device, that which computes takes the time.
        joined[device, (kind, stage)] = (
            times
            if before is None or len(before) != len(times)
            else [max(a, b, key=lambda t: t[1] - t[0]) for a, b in zip(before, times, strict=True)]
        )
    return joined


def _is_unit(place: object) -> bool:
    """Whether an instruction is the loop of a unit itself, not a loop inside of it."""
    return getattr(place, "scope", None) == "" and getattr(place, "operation", None) == "while"
