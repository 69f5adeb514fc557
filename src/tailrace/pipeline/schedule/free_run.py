"""A plan without a common clock: every device runs as soon as its inputs arrive.

The plan still determines the order of units on each device. A unit starts when its device has finished
the previous one and its input has arrived.
"""

import numpy as np

from tailrace.errors import PlanError
from tailrace.pipeline.schedule.costs import Costs
from tailrace.pipeline.schedule.planned_ticks import PlannedTicks
from tailrace.pipeline.schedule.schedules import PipelineSchedule


def free_running(plan: PlannedTicks, costs: Costs) -> tuple[float, float, float]:
    """The total with the update, the time until all devices have started, and the ramp-down."""
    clock = _Clock(costs)
    if plan.own_ticks is not None:
        _run_units(plan, costs, clock)
    elif plan.schedule is PipelineSchedule.SEQUENTIAL:
        _run_alone(plan, costs, clock)
    else:
        _run_waves(plan, costs, clock)
    end = float(clock.free.max())
    # Devices update as soon as they are done, so the last one to finish need not be the last to update.
    total = float((clock.free + costs.update).max())
    up = float(clock.begin.max())
    return total, up, end - max(float(clock.free.min()), up)


class _Clock:
    """When each device started, and when it is free again."""

    def __init__(self, costs: Costs) -> None:
        self.begin = np.full(costs.devices, np.inf)
        self.free = np.zeros(costs.devices)


def _run_alone(plan: PlannedTicks, costs: Costs, clock: _Clock) -> None:
    """Sequential: a microbatch starts when the previous one has finished, so times add up."""
    # Members of a group run at the same time, so the slowest one decides.
    slowest = np.maximum.reduceat(costs.time, costs.first[:-1])
    hop = costs.hop[costs.first[:-1]]
    starts = np.concatenate([[0.0], np.cumsum(slowest + hop)])
    before = (plan.microbatches - 1) * starts[-1]
    np.minimum.at(clock.begin, costs.device, starts[costs.virtual])
    np.maximum.at(clock.free, costs.device, before + starts[costs.virtual] + costs.time)


def _run_waves(plan: PlannedTicks, costs: Costs, clock: _Clock) -> None:
    """Tick by tick, all devices at once.

    In a tick a device may have several units; those of equal rank on their devices form a wave
    and depend on nothing within it. A unit's input was computed one tick before, by the previous
    virtual stage, so one finish time per virtual stage is enough.
    """
    length, rounds = plan.virtual_stages, plan.microbatches // plan.overlap
    offsets = np.array(plan.offsets)
    waves = _waves(plan, costs)
    arrived = np.zeros(length + 1)  # arrived[v]: when the input of virtual stage v arrives
    for t in range(plan.num_ticks):
        # As in lockstep, the plan says what runs; only the start times are computed.
        turn, virtual = np.divmod(t - offsets, length)
        running = np.zeros(length, dtype=bool)
        running[virtual[(turn >= 0) & (turn < rounds)]] = True
        made = np.zeros(length)
        for wave in waves:
            units = wave[running[costs.virtual[wave]]]
            devices, stages = costs.device[units], costs.virtual[units]
            start = np.maximum(clock.free[devices], arrived[stages])
            clock.begin[devices] = np.minimum(clock.begin[devices], start)
            clock.free[devices] = start + costs.time[units]
            # Of the members of a concurrent stage, the last one to finish counts.
            np.maximum.at(made, stages, clock.free[devices] + costs.hop[units])
        # Only now: a unit reads what was made in earlier ticks, not in this one.
        arrived[1:][running] = made[running]


def _waves(plan: PlannedTicks, costs: Costs) -> list[np.ndarray]:
    """The units by their rank on their device, in the order in which a tick runs them."""
    # Other schedules give a device one unit per tick: all units are one wave.
    if plan.schedule is not PipelineSchedule.GROUPED:
        return [np.arange(len(costs.virtual))]
    rank: dict[int, int] = {}
    waves: list[list[int]] = []
    # Later virtual stages first, as the executor does: backwards, then forwards.
    for unit in reversed(range(len(costs.virtual))):
        device = int(costs.device[unit])
        place = rank.get(device, 0)
        rank[device] = place + 1
        if place == len(waves):
            waves.append([])
        waves[place].append(unit)
    return [np.array(wave) for wave in waves]


def _run_units(plan: PlannedTicks, costs: Costs, clock: _Clock) -> None:
    """Unit by unit, for ticks of any form."""
    rows = {device: row for row, device in enumerate(plan.devices)}
    times = {
        (int(v), int(d)): float(time)
        for v, d, time in zip(costs.virtual, costs.device, costs.time, strict=True)
    }
    alone = plan.schedule is PipelineSchedule.SEQUENTIAL
    arrived: dict[tuple[int, int], float] = {}
    for tick in plan.iter_ticks():
        for unit in tick:
            virtual = unit.stage if unit.kind == "F" else 2 * plan.stages - 1 - unit.stage
            row = rows.get(unit.device, -1)
            needed = (virtual, unit.microbatch)
            if alone and virtual == 0:
                # Sequential's rule holds without a clock too: the previous microbatch must have
                # finished.
                arrived[needed] = arrived.get((plan.virtual_stages, unit.microbatch - 1), 0.0)
            if (virtual, row) not in times or (virtual and needed not in arrived):
                raise PlanError(
                    f"{unit} cannot run: its input is never made before it, or this pipeline does "
                    "not have it. Run `plan.check()` before simulating ticks written by hand."
                )
            start = max(clock.free[row], arrived.get(needed, 0.0))
            clock.begin[row] = min(clock.begin[row], start)
            clock.free[row] = start + times[virtual, row]
            hop = float(costs.hop[costs.first[virtual]])
            there = (virtual + 1, unit.microbatch)
            arrived[there] = max(arrived.get(there, 0.0), clock.free[row] + hop)
