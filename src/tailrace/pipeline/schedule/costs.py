"""The cost of each unit of a plan: stage times, in the layout of the simulator.

Units are numbered by virtual stage (F0 … F(S-1), B(S-1) … B0) and, within a concurrent stage, by
device. Arrays indexed by unit: `virtual`, `device` (a row, not a device number), `time`, `hop`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import numpy as np

from tailrace.errors import PlanError
from tailrace.pipeline.schedule.planned_ticks import PlannedTicks

Times = float | Sequence[float | Sequence[float]]


@dataclass(frozen=True, eq=False)
class Costs:
    """The units of a plan and their times."""

    virtual: np.ndarray
    device: np.ndarray
    time: np.ndarray
    hop: np.ndarray
    """The transfer time of the unit's result to its next device; 0 if it stays."""

    first: np.ndarray
    """The first unit of each virtual stage, and one more entry for the end."""

    update: np.ndarray
    """For each device row, the time of the weight update."""

    stages: int

    @property
    def devices(self) -> int:
        """The number of device rows."""
        return len(self.update)

    @property
    def backward(self) -> np.ndarray:
        """For each unit, whether it is a backward."""
        return self.virtual >= self.stages

    def units_of(self, virtual: np.ndarray) -> np.ndarray:
        """The units of some virtual stages, in their order."""
        if len(self.virtual) == len(self.first) - 1:
            return virtual  # no concurrent stages: a unit is a virtual stage
        counts = self.first[virtual + 1] - self.first[virtual]
        ends = np.cumsum(counts)
        # Numpy's stubs have no type for this sum.
        return np.arange(counts.sum()) + np.repeat(self.first[virtual] - ends + counts, counts)  # pyright: ignore[reportUnknownVariableType]


def costs_of(
    plan: PlannedTicks,
    forward: Times,
    backward: Times | None,
    transfer: float | Sequence[float],
    update: Times,
) -> Costs:
    """Parse the times that a user gives; see `simulator.simulate` for the accepted forms."""
    ahead = member_times(plan, forward, "forward")
    if backward is None:
        # A backward computes two gradients, of inputs and of weights, for one product of the forward.
        back = [[2.0 * time for time in stage] for stage in ahead]
    elif not plan.training:
        raise PlanError("An inference plan has no backward: leave `backward` out.")
    else:
        back = member_times(plan, backward, "backward")
    rows = {device: row for row, device in enumerate(plan.devices)}
    hops = _hops(plan, transfer)
    virtual: list[int] = []
    device: list[int] = []
    time: list[float] = []
    hop: list[float] = []
    first = [0]
    for index in range(plan.virtual_stages):
        stage = index if index < plan.stages else 2 * plan.stages - 1 - index
        times = (ahead if index < plan.stages else back)[stage]
        loads: dict[int, float] = {}
        for place, each in zip(plan.placement[stage], times, strict=True):
            # Members of a group on one device run one after the other: together they are one unit.
            loads[rows[place]] = loads.get(rows[place], 0.0) + each
        for row, load in loads.items():
            virtual.append(index)
            device.append(row)
            time.append(load)
            hop.append(hops[index])
        first.append(len(virtual))
    updates = np.zeros(len(rows))
    for stage, times in enumerate(member_times(plan, update, "update")):
        for place, each in zip(plan.placement[stage], times, strict=True):
            updates[rows[place]] += each
    return Costs(
        np.array(virtual),
        np.array(device),
        np.array(time),
        np.array(hop),
        np.array(first),
        updates,
        plan.stages,
    )


def member_times(plan: PlannedTicks, times: object, name: str) -> list[list[float]]:
    """The time of each member of each stage, from one number, one per stage, or lists for groups."""
    if _is_number(times):
        times = [times] * plan.stages
    if not is_list(times):
        raise PlanError(
            f"`{name}` is one time for all stages or a list with one for each; received {times!r}."
        )
    if len(times) != plan.stages:
        raise PlanError(
            f"`{name}` is one time for all stages or a list with one for each: received "
            f"{len(times)} times for {plan.stages} stages."
        )
    return [_stage_times(plan, stage, each, name) for stage, each in enumerate(times)]


def _stage_times(plan: PlannedTicks, stage: int, given: object, name: str) -> list[float]:
    members = len(plan.placement[stage])
    each: Any = [given] * members if _is_number(given) else given
    if not _are_times(each) or len(each) != members:
        raise PlanError(
            f"`{name}` of stage {stage} is a time of zero or more, or a list with one for each of "
            f"its {members} member(s); received {given!r}."
        )
    return [float(time) for time in each]


def _is_number(given: object) -> bool:
    return isinstance(given, int | float | np.number)


def is_list(given: object) -> TypeGuard[Sequence[Any]]:
    """Whether a user gave several numbers: a sequence or an array, not text."""
    if isinstance(given, str | bytes) or not isinstance(given, Sequence | np.ndarray):
        return False
    return getattr(cast(Any, given), "ndim", 1) > 0  # a 0-d array is not a sequence


def _are_times(given: object) -> bool:
    """Whether it is a list of finite numbers of zero or more."""
    return is_list(given) and all(
        _is_number(time)
        # `np.number` includes complex numbers, which have no order.
        and not isinstance(time, complex | np.complexfloating)
        and 0.0 <= time < float("inf")
        for time in given
    )


def _hops(plan: PlannedTicks, transfer: float | Sequence[float]) -> list[float]:
    """The transfer time from each virtual stage to the next."""
    boundaries = plan.stages - 1
    given: Any = [transfer] * boundaries if _is_number(transfer) else transfer
    if not _are_times(given) or len(given) != boundaries:
        raise PlanError(
            f"`transfer` is a time of zero or more, or a list with one for each of the "
            f"{boundaries} boundaries between stages; received {transfer!r}."
        )
    moves = [
        float(time) if set(plan.placement[i]) != set(plan.placement[i + 1]) else 0.0
        for i, time in enumerate(given)
    ]
    # The last stage goes from forward to backward on the same devices; the gradient of the first is
    # not sent.
    return [*moves, 0.0, *moves[::-1], 0.0] if plan.training else [*moves, 0.0]
