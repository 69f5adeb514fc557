"""The memory that a stage needs between its forward and its backward.

The residuals of a microbatch are kept from its forward to its backward. A schedule runs `k * (S-1-s)`
later forwards of stage s in between (k is 2 for Grouped, 1 for Interleaved, 0 for Sequential): that is
the *depth*. With the microbatch itself, `depth + 1` are held at once: the *slots*, used in turn.
Weights and loop-wide inputs are not stashed, and inference stashes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.errors import PlanError
from tailrace.pipeline.schedule.device_mapping import is_group
from tailrace.pipeline.schedule.planned_ticks import PlannedTicks
from tailrace.pipeline.schedule.schedules import PipelineSchedule

_FORWARDS_PER_STAGE = {
    PipelineSchedule.GROUPED: 2,
    PipelineSchedule.INTERLEAVED: 1,
    PipelineSchedule.SEQUENTIAL: 0,
}


@dataclass(frozen=True)
class StashBytes:
    """The bytes of the stashes of a plan.

    Attributes:
        stages: for each stage, over all its members.
        devices: for each device in use, in the order of `plan.devices`.
        total: over all devices.
        peak: on the device with the most.
    """

    stages: tuple[int, ...]
    devices: dict[int, int]
    total: int
    peak: int


def depth(plan: PlannedTicks, stage: int) -> int:
    """The number of later forwards of a stage between a microbatch's forward and its backward."""
    _require_stage(plan, stage)
    if not plan.training:
        return 0
    # Between a forward and its backward a microbatch travels to the last stage and back: 2 (S-1-s)
    # ticks. Grouped starts a forward in each of them, Interleaved in every second one.
    return _FORWARDS_PER_STAGE[plan.schedule] * (plan.stages - 1 - stage)


def slots(plan: PlannedTicks, stage: int) -> int:
    """The number of microbatches whose residuals a stage holds at once; 0 in inference."""
    # One more than the depth: the slot of the microbatch itself is free only after its backward.
    held = depth(plan, stage) + 1
    return held if plan.training else 0


def slot(plan: PlannedTicks, stage: int, microbatch: int) -> int:
    """The slot of a microbatch: slots are used in turn."""
    if not plan.training:
        raise PlanError("An inference plan keeps no residuals, so it has no stash slots.")
    if not 0 <= microbatch < plan.microbatches:
        raise PlanError(
            f"This plan has microbatches 0 to {plan.microbatches - 1}; asked for {microbatch}."
        )
    return microbatch % slots(plan, stage)


def total(plan: PlannedTicks) -> int:
    """Slots over all stages and devices."""
    return sum(
        slots(plan, stage) * len(set(devices)) for stage, devices in enumerate(plan.placement)
    )


def in_bytes(plan: PlannedTicks, sizes: Sequence[Any]) -> StashBytes:
    """Bytes from the size of one microbatch's residuals at each stage.

    A concurrent stage takes a list with a size for each member. Slots are allocated permanently, so a
    device with several stages holds the sum of theirs.
    """
    if len(sizes) != plan.stages:
        raise PlanError(
            f"Stash sizes are given for each stage: {len(sizes)} sizes for {plan.stages} stages. "
            "Give the bytes that one microbatch leaves behind at each stage."
        )
    stages: list[int] = []
    devices = dict.fromkeys(plan.devices, 0)
    for stage, size in enumerate(sizes):
        each = _member_sizes(plan, stage, size)
        held = slots(plan, stage)
        stages.append(held * sum(each))
        for device, member in zip(plan.placement[stage], each, strict=True):
            # By device, not by stage: a device with several stages holds all their slots at once.
            devices[device] += held * member
    return StashBytes(tuple(stages), devices, sum(stages), max(devices.values()))


def _member_sizes(plan: PlannedTicks, stage: int, size: Any) -> list[int]:
    members = len(plan.placement[stage])
    each: list[int] = list(size) if is_group(size) else [size] * members
    if len(each) != members or any(one < 0 for one in each):
        raise PlanError(
            f"Stage {stage} has {members} member(s); received {size!r} as its stash size. Give "
            "bytes of zero or more: one number for all members, or a list with one for each."
        )
    return each


def _require_stage(plan: PlannedTicks, stage: int) -> None:
    if not 0 <= stage < plan.stages:
        raise PlanError(f"This plan has stages 0 to {plan.stages - 1}; asked for stage {stage}.")
