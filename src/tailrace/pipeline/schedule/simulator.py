"""The predicted time of an execution, from stage times.

The engine keeps devices in lockstep: a tick ends when the slowest device has finished its units of
that tick; then values are transferred. Four ways to run a plan:

    gated      a device without work waits for the slowest one. This is what the engine does.
    masked     an idle device computes on garbage. In a Grouped tick come all backwards, then all
               forwards: each of these phases costs its slowest stage, working or not.
    ungated    every tick costs what a full one does.
    free       no common clock: each device runs the plan's units in the plan's order, each as
               soon as its input is there. An Interleaved plan run freely is 1F1B.

The middle of a plan repeats, so the lockstep modes simulate one round of it: the cost of a simulation
does not depend on the number of microbatches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from tailrace.base.checks import member_named
from tailrace.errors import PlanError
from tailrace.pipeline.schedule.costs import Costs, Times, costs_of
from tailrace.pipeline.schedule.free_run import free_running
from tailrace.pipeline.schedule.planned_ticks import PlannedTicks
from tailrace.pipeline.schedule.schedules import PipelineSchedule


class SimulationMode(StrEnum):
    """How devices are synchronized; see the module docstring."""

    GATED = "gated"
    MASKED = "masked"
    UNGATED = "ungated"
    FREE = "free"

    @classmethod
    def parse(cls, value: object) -> "SimulationMode":
        """The member that a string names; a value of another type is an error."""
        return cls(value) if isinstance(value, str) else cls._missing_(value)

    @classmethod
    def _missing_(cls, value: object) -> "SimulationMode":
        return member_named(cls, value, "A simulation mode", error=PlanError)


@dataclass(frozen=True)
class Simulation:
    """A predicted execution. Times are in the unit of the times that were given.

    In lockstep, the phases are the plan's; running freely, ramp-up lasts until the last device starts
    and ramp-down begins when the first device has finished its last unit.

    Attributes:
        mode: how devices are synchronized.
        total: the whole execution, with the update.
        ramp_up: the time of the ramp-up.
        steady: the time between ramp-up and ramp-down.
        ramp_down: the time of the ramp-down.
        update: the time of the update.
        devices: the devices, in order.
        work: the busy time of each.
    """

    mode: SimulationMode
    total: float
    ramp_up: float
    steady: float
    ramp_down: float
    update: float
    devices: tuple[int, ...]
    work: tuple[float, ...]

    @property
    def busy(self) -> dict[int, float]:
        """The busy share of each device."""
        return {
            device: work / self.total if self.total else 0.0
            for device, work in zip(self.devices, self.work, strict=True)
        }

    @property
    def bubble(self) -> float:
        """The idle share of device time."""
        available = len(self.devices) * self.total
        return (available - sum(self.work)) / available if available else 0.0

    @property
    def ideal(self) -> float:
        """The time if the work were divided evenly and no device waited."""
        return sum(self.work) / len(self.devices)

    @property
    def ramp_share(self) -> float:
        """The share of ramp-up and ramp-down in the total."""
        return (self.ramp_up + self.ramp_down) / self.total if self.total else 0.0

    def __str__(self) -> str:
        busiest = max(self.busy.values())
        return (
            f"{self.mode}: {self.total:g} (ramp-up {self.ramp_up:g}, steady {self.steady:g}, "
            f"ramp-down {self.ramp_down:g}, update {self.update:g}); "
            f"bubble {self.bubble * 100:.1f} %, busiest device {busiest * 100:.1f} %"
        )


def simulate(
    plan: PlannedTicks,
    forward: Times,
    backward: Times | None = None,
    transfer: float | Sequence[float] = 0.0,
    update: Times = 0.0,
    mode: SimulationMode | str = SimulationMode.GATED,
) -> Simulation:
    """Predict one execution of a plan.

    Args:
        plan: the plan.
        forward: the time of one forward: a number for all stages, or a list with one for each; a
            concurrent stage may have a list with a time for each member.
        backward: likewise; twice the forward if not given. Not for inference.
        transfer: the time of a transfer between the devices of neighbouring stages; a number, or a
            list with one for each of the S-1 boundaries. In lockstep, a tick with a transfer takes
            that much longer; running freely, it only delays the receiver.
        update: the time of the weight update of a stage; a number for all, or a list.
        mode: "gated", "masked", "ungated" or "free".

    Returns:
        A `Simulation`: total time, its parts, busy share of each device, bubble.

    >>> from tailrace.pipeline import plan
    >>> [plan(4, 16).simulate(1.0, 2.0, mode=mode).total for mode in ("gated", "ungated")]
    [57.0, 69.0]
    >>> plan(4, 16, "interleaved").simulate(1.0, 2.0, mode="free").total
    57.0
    """
    mode = SimulationMode.parse(mode)
    costs = costs_of(plan, forward, backward, transfer, update)
    # The busy time of devices does not depend on their synchronization; only their waiting time does.
    work = plan.microbatches * np.bincount(costs.device, costs.time, costs.devices) + costs.update
    last = float(costs.update.max())
    if mode is SimulationMode.FREE:
        total, up, down = free_running(plan, costs)
        # Without a clock, a device updates when it has finished, while others still work: the parts
        # overlap, and are cut so that they add up to the total.
        last = min(last, total - up)
        parts = {"ramp-up": up, "ramp-down": down, "steady": max(total - up - down - last, 0.0)}
    else:
        parts = _lockstep(plan, costs, mode)
        total = sum(parts.values()) + last
    return Simulation(
        mode=mode,
        total=float(total),
        ramp_up=float(parts["ramp-up"]),
        steady=float(parts["steady"]),
        ramp_down=float(parts["ramp-down"]),
        update=last,
        devices=plan.devices,
        work=tuple(map(float, work)),
    )


class _Round(NamedTuple):
    """The units of a tick, and the number of ticks like it."""

    phase: str
    units: np.ndarray
    repeats: int


def bubble(plan: PlannedTicks) -> float:
    """The idle share of device time, if every unit takes the same time."""
    return simulate(plan, 1.0, 1.0 if plan.training else None).bubble


def _lockstep(plan: PlannedTicks, costs: Costs, mode: SimulationMode) -> dict[str, float]:
    """The time of each phase of the plan."""
    two_phases = plan.schedule is PipelineSchedule.GROUPED and plan.training
    price = _Price(costs, mode, two_phases)
    parts = {"ramp-up": 0.0, "steady": 0.0, "ramp-down": 0.0}
    for phase, units, repeats in _rounds(plan, costs):
        parts[phase] += repeats * price.of(units)
    return parts


class _Price:
    """The cost of a tick, from its units."""

    def __init__(self, costs: Costs, mode: SimulationMode, two_phases: bool) -> None:
        self.costs = costs
        self.mode = mode
        self.two_phases = two_phases
        self.backward = costs.backward
        everything = np.arange(len(costs.virtual))
        # The cost of a phase in which no device is idle: "masked" and "ungated" charge it.
        self.full = {kind: self._phase(everything[self.backward == kind]) for kind in (False, True)}

    def of(self, units: np.ndarray) -> float:
        back = self.backward[units]
        kinds = [kind for kind in (True, False) if (back == kind).any()]
        # All backwards, then all forwards; or both at once, on different devices.
        join = sum if self.two_phases else max
        if self.mode is SimulationMode.UNGATED:
            return join(self.full.values())
        if self.mode is SimulationMode.MASKED:
            return join(self.full[kind] for kind in kinds)
        return self._phase(units)

    def _phase(self, units: np.ndarray) -> float:
        """The slowest device, then the slowest transfer."""
        if not len(units):
            return 0.0
        costs = self.costs
        # A device with several units runs them one after the other; transfers start when all
        # devices have finished.
        load = np.bincount(costs.device[units], costs.time[units])
        return float(load.max() + costs.hop[units].max())


def _rounds(plan: PlannedTicks, costs: Costs) -> Iterator[_Round]:
    """The ticks of a plan; those of the repeating middle once, with their count."""
    phases = plan.phases
    if plan.own_ticks is not None:
        yield from _own_rounds(plan, costs)
        return
    offsets = np.array(plan.offsets)
    # All of Grouped's steady ticks are alike; the others repeat after one round of N.
    alike = 1 if plan.overlap == plan.virtual_stages else plan.virtual_stages
    for phase, ticks, repeats in (
        ("ramp-up", phases.ramp_up, 1),
        ("steady", phases.steady[:alike], len(phases.steady) // alike),
        ("ramp-down", phases.ramp_down, 1),
    ):
        for t in ticks:
            yield _Round(phase, costs.units_of(_running(plan, t, offsets)), repeats)


def _running(plan: PlannedTicks, t: int, offsets: np.ndarray) -> np.ndarray:
    """The virtual stages that run in tick `t`."""
    length = plan.virtual_stages
    if plan.schedule is PipelineSchedule.GROUPED:
        return np.arange(max(0, t - plan.microbatches + 1), min(t, length - 1) + 1)
    # Each offset is a series of microbatches, one every `length` ticks: which one, and its position.
    turn, virtual = np.divmod(t - offsets, length)
    return virtual[(turn >= 0) & (turn < plan.microbatches // plan.overlap)]


def _own_rounds(plan: PlannedTicks, costs: Costs) -> Iterator[_Round]:
    """Every tick of a plan with its own ticks."""
    rows = {device: row for row, device in enumerate(plan.devices)}
    number = {
        (int(virtual), int(device)): unit
        for unit, (virtual, device) in enumerate(zip(costs.virtual, costs.device, strict=True))
    }
    for t, tick in enumerate(plan.iter_ticks()):
        units: list[int] = []
        for unit in tick:
            virtual = unit.stage if unit.kind == "F" else 2 * plan.stages - 1 - unit.stage
            # -1 for a device that the mapping does not have: it is in no key, so the message below
            # follows.
            key = (virtual, rows.get(unit.device, -1))
            if key not in number:
                raise PlanError(
                    f"Tick {t} has {unit}, which this pipeline does not have. "
                    "Run `plan.check()` before simulating ticks written by hand."
                )
            units.append(number[key])
        yield _Round(plan.phases.of(t), np.array(units, dtype=int), 1)
