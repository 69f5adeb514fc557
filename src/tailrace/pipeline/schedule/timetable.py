"""A plan as arrays: what an executor indexes by tick and stage."""

from typing import NamedTuple

import numpy as np

from tailrace.pipeline.schedule import stash
from tailrace.pipeline.schedule.planned_ticks import PlannedTicks

IDLE = -1


class Timetable(NamedTuple):
    """Arrays of shape (ticks, stages) with a microbatch or a slot; -1 if a stage is idle.

    A forward writes its residuals to `forward_slot`, and a backward reads them from `backward_slot`.
    Within a tick the backwards come first, so a slot may be read and written in one tick. A phase in
    which no stage has work may be skipped: `(table.forward >= 0).any(axis=1)`.
    """

    forward: np.ndarray
    backward: np.ndarray
    forward_slot: np.ndarray
    backward_slot: np.ndarray


def timetable(plan: PlannedTicks) -> Timetable:
    """The arrays of a plan."""
    shape = (plan.num_ticks, plan.stages)
    forward = np.full(shape, IDLE, dtype=np.int32)
    backward = np.full(shape, IDLE, dtype=np.int32)
    if plan.own_ticks is None:
        # By the formula of `schedules`, without creating units: plans may have millions of them.
        microbatches = np.arange(plan.microbatches)
        turn, row = np.divmod(microbatches, plan.overlap)
        start = plan.virtual_stages * turn + np.array(plan.offsets)[row]
        for stage in range(plan.stages):
            forward[start + stage, stage] = microbatches
            if plan.training:
                backward[start + plan.virtual_stages - 1 - stage, stage] = microbatches
    else:
        for t, tick in enumerate(plan.own_ticks):
            for unit in tick:
                (forward if unit.kind == "F" else backward)[t, unit.stage] = unit.microbatch
    # A modulus of one avoids a division by zero in inference, which has no slots.
    slots = np.array([max(stash.slots(plan, stage), 1) for stage in range(plan.stages)])
    return Timetable(forward, backward, _slots(forward, slots), _slots(backward, slots))


def _slots(microbatch: np.ndarray, slots: np.ndarray) -> np.ndarray:
    return np.where(microbatch == IDLE, IDLE, microbatch % slots).astype(np.int32)
