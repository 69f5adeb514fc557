"""Measured bubbles: the time of each cell of a pipeline's grid, and the cause of each idle second."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from tailrace.pipeline.schedule.units import Unit
from tailrace.profiling.profile.quantities import time_text
from tailrace.profiling.programs.tick_times import MeasuredTicks

WORK, SLOWEST, NEIGHBOUR, EXCHANGE, UPDATE, HOST = (
    "works",
    "waits for the slowest stage",
    "waits for a neighbour",
    "exchanges",
    "updates",
    "waits for data or the host",
)
"""What a device does in a step. It waits for the slowest stage if it has work in that tick, but less
than another device. It waits for a neighbour if it has none, in ramp-up and ramp-down."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One unit in the grid. Times are seconds, averaged over the steps.

    Attributes:
        tick: the column.
        device: the row.
        kind: "F" or "B".
        stage: the stage.
        microbatch: the microbatch.
        planned: the mean time of such a unit over all microbatches.
        measured: the time of this unit.
    """

    tick: int
    device: int
    kind: str
    stage: int
    microbatch: int
    planned: float
    measured: float


@dataclasses.dataclass(frozen=True)
class PipelineTimes:
    """The measured times of a pipeline, in seconds.

    Attributes:
        cells: the cells of one step, in the order of the plan.
        devices: for each device, the seconds of a step by activity; they add up to the step.
        forward: the forward time of each stage.
        backward: the backward time of each stage; empty for inference.
        exchange: the time of a tick in addition to its slowest device: transfers and synchronization.
        update: the time between the last tick of a step and the first of the next.
        predicted: the time of a step by the simulator, from these costs.
        step: the measured time of a step.
        planned_bubble: the planned fraction of idle device time, for equal stages.
    """

    cells: tuple[Cell, ...]
    devices: dict[int, dict[str, float]]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    exchange: float
    update: float
    predicted: float
    step: float
    planned_bubble: float

    @property
    def bubble(self) -> float:
        """The measured fraction of idle device time."""
        whole = sum(sum(each.values()) for each in self.devices.values())
        return 1 - sum(each[WORK] for each in self.devices.values()) / whole if whole else 0.0

    def __str__(self) -> str:
        kinds = list(next(iter(self.devices.values()), {}))
        head = ["device", *kinds]
        rows = [
            [str(device), *(time_text(each[kind]) for kind in kinds)]
            for device, each in self.devices.items()
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        table = "\n".join(
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))
            for row in [head, *rows]
        )
        return (
            f"A step took {time_text(self.step)}; from the costs of its stages the simulator expects "
            f"{time_text(self.predicted)} ({self.step / max(self.predicted, 1e-30):.2f} times). "
            f"Bubble: {self.bubble:.1%}, planned for equal stages {self.planned_bubble:.1%}.\n{table}"
        )

    def grid(self) -> str:
        """The grid, each cell with its time relative to the mean time of such a unit."""
        ticks = max((cell.tick for cell in self.cells), default=-1) + 1
        texts: dict[tuple[int, int], list[str]] = {}
        for cell in self.cells:
            ratio = cell.measured / max(cell.planned, 1e-30)
            text = f"{cell.kind}{cell.stage}.{cell.microbatch}x{ratio:.2g}"
            texts.setdefault((cell.device, cell.tick), []).append(text)
        rows = [
            [f"dev{device}", *("+".join(texts.get((device, t), ["."])) for t in range(ticks))]
            for device in self.devices
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(ticks + 1)]
        return "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> PipelineTimes:
        """The inverse of `dataclasses.asdict`."""
        values = dict(found)
        values["cells"] = tuple(Cell(**cell) for cell in values["cells"])
        values["devices"] = {int(key): dict(each) for key, each in values["devices"].items()}
        for name in ("forward", "backward"):
            values[name] = tuple(values[name])
        return PipelineTimes(**values)


def pipeline_times(ticks: MeasuredTicks, per_execution: int, wall_s: float) -> PipelineTimes:
    """The times of a pipeline, from the measured ticks of some steps.

    Args:
        ticks: the measured ticks.
        per_execution: the number of steps per execution.
        wall_s: the duration of all steps, including the time between executions.
    """
    plan = ticks.plan
    seconds: dict[Unit, list[float]] = {}
    by_stage: dict[tuple[str, int], list[float]] = {}
    for one in ticks.units:
        seconds.setdefault(one.unit, []).append(one.busy * 1e-9)
        by_stage.setdefault((one.unit.kind, one.unit.stage), []).append(one.busy * 1e-9)
    # Means, not medians: only the means of the parts add up to the mean of a step.
    cost = {key: statistics.fmean(found) for key, found in by_stage.items()}
    cells = tuple(
        Cell(tick, *unit, cost[unit.kind, unit.stage], statistics.fmean(seconds[unit]))
        for tick, units in enumerate(plan.ticks)
        for unit in units
    )
    forward = tuple(cost["F", stage] for stage in range(plan.stages))
    backward = tuple(cost["B", stage] for stage in range(plan.stages)) if plan.training else ()
    steps = _Steps(ticks, per_execution)
    exchange, update = steps.exchange(), steps.update()
    simulated = plan.simulate(list(forward), list(backward) or None, exchange, update).total
    # With one step per execution no step follows another on the devices, and only the host has seen
    # how long one takes.
    step = steps.seconds() or wall_s / ticks.steps
    return PipelineTimes(
        cells,
        steps.by_device(update, step, wall_s / ticks.steps),
        forward,
        backward,
        exchange,
        update,
        simulated,
        step,
        plan.bubble,
    )


class _Steps:
    """The measured steps: their start, their end, and the load of each tick."""

    def __init__(self, ticks: MeasuredTicks, per_execution: int) -> None:
        self.plan, self.count, self.per_execution = ticks.plan, ticks.steps, per_execution
        self.first = [math.inf] * ticks.steps
        self.last = [0.0] * ticks.steps
        self.loads: dict[tuple[int, int, int], float] = {}
        for one in ticks.units:
            self.first[one.step] = min(self.first[one.step], one.start * 1e-9)
            self.last[one.step] = max(self.last[one.step], one.end * 1e-9)
            # Units of one device in one tick run one after the other, so their times add up.
            key = (one.step, one.tick, one.unit.device)
            self.loads[key] = self.loads.get(key, 0.0) + one.busy * 1e-9

    def followed(self) -> list[int]:
        """The steps that are not the last of their execution."""
        # After the last one the host dispatches the next execution; that gap is not an update.
        return [n for n in range(self.count - 1) if (n + 1) % self.per_execution]

    def seconds(self) -> float:
        """The mean time from the start of a step to the start of the next."""
        return _mean([self.first[n + 1] - self.first[n] for n in self.followed()])

    def update(self) -> float:
        """The mean time between the ticks of a step and those of the next."""
        return _mean([max(0.0, self.first[n + 1] - self.last[n]) for n in self.followed()])

    def exchange(self) -> float:
        """The mean time of a tick in addition to the work of its slowest device."""
        found = []
        for step in self.followed() or range(self.count):
            # All devices exchange at the end of a tick: without that, a step would take as long as
            # the slowest devices of its ticks.
            work = sum(self._most(step, tick) for tick in range(self.plan.num_ticks))
            found.append(max(0.0, self.last[step] - self.first[step] - work))
        return _mean(found) / self.plan.num_ticks

    def by_device(self, update: float, step: float, whole: float) -> dict[int, dict[str, float]]:
        """The seconds of each device in a step, by activity."""
        found = {}
        for device in self.plan.devices:
            each = [self._waits(n, device) for n in self.followed() or range(self.count)]
            work, slowest, neighbour = (_mean([one[i] for one in each]) for i in range(3))
            # Exchange is the rest of a step: measured directly, it would be counted once for the
            # sender and once for the receiver. The host has the rest of the wall time.
            done = work + slowest + neighbour + update
            found[device] = {
                WORK: work,
                SLOWEST: slowest,
                NEIGHBOUR: neighbour,
                EXCHANGE: max(0.0, step - done),
                UPDATE: update,
                HOST: max(0.0, whole - max(step, done)),
            }
        return found

    def _waits(self, step: int, device: int) -> tuple[float, float, float]:
        """The seconds a device works, waits for the slowest stage, and waits for a neighbour."""
        work = slowest = neighbour = 0.0
        for tick in range(self.plan.num_ticks):
            most, mine = self._most(step, tick), self.loads.get((step, tick, device))
            if mine is None:  # nothing is planned for this device: ramp-up or ramp-down
                neighbour += most
            else:
                work, slowest = work + mine, slowest + most - mine
        return work, slowest, neighbour

    def _most(self, step: int, tick: int) -> float:
        return max(self.loads.get((step, tick, device), 0.0) for device in self.plan.devices)


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0
