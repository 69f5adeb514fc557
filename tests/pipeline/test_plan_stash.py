"""What a stage must hold: depths of the reference, and what the ticks really need."""

import numpy as np
import pytest

from tailrace.errors import PlanError
from tailrace.pipeline import plan


@pytest.mark.parametrize(
    ("stages", "schedule", "depths"),
    [
        (4, "grouped", [6, 4, 2, 0]),
        (4, "interleaved", [3, 2, 1, 0]),
        (3, "interleaved", [2, 1, 0]),
        (4, "sequential", [0, 0, 0, 0]),
    ],
)
def test_stash_depths_by_schedule(stages, schedule, depths):
    made = plan(stages, 2 * stages, schedule)
    assert [made.stash_depth(stage) for stage in range(stages)] == depths
    assert [made.slots(stage) for stage in range(stages)] == [depth + 1 for depth in depths]
    assert made.stash_total == sum(depths) + stages


def test_inference_stashes_nothing():
    made = plan(4, 8, training=False)
    assert [made.stash_depth(stage) for stage in range(4)] == [0, 0, 0, 0]
    assert [made.slots(stage) for stage in range(4)] == [0, 0, 0, 0]
    assert made.stash_total == 0
    assert made.stash_bytes([10, 10, 10, 10]).peak == 0


def test_a_group_stashes_on_each_of_its_devices():
    made = plan([1, 2, 1], 6)
    assert made.stash_total == 5 + 2 * 3 + 1
    sizes = made.stash_bytes([100, [10, 20], 1])
    assert sizes.stages == (500, 90, 1)
    assert sizes.devices == {0: 500, 1: 30, 2: 60, 3: 1}
    assert (sizes.total, sizes.peak) == (591, 500)
    # Stages that share a device add up there.
    assert plan(2, 4, device_mapping=[7, 7]).stash_bytes([10, 1]).devices == {7: 31}


def test_wrong_sizes():
    with pytest.raises(PlanError, match="1 sizes for 2 stages"):
        plan(2, 4).stash_bytes([1])
    with pytest.raises(PlanError, match=r"Stage 1 has 1 member\(s\); received \[1, 2\]"):
        plan(2, 4).stash_bytes([1, [1, 2]])
    with pytest.raises(PlanError, match="zero or more"):
        plan(2, 4).stash_bytes([1, -1])


@pytest.mark.parametrize("schedule", ["grouped", "interleaved", "sequential"])
def test_timetable_is_the_ticks(schedule):
    made = plan(3, 12, schedule)
    table = made.timetable()
    again = made.with_ticks(made.ticks).timetable()
    for ours, theirs in zip(table, again, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for t, tick in enumerate(made.ticks):
        for _, kind, stage, microbatch in tick:
            column = table.forward if kind == "F" else table.backward
            slots = table.forward_slot if kind == "F" else table.backward_slot
            assert column[t, stage] == microbatch
            assert slots[t, stage] == made.slot(stage, microbatch)
    assert (table.forward >= 0).sum() + (table.backward >= 0).sum() == sum(map(len, made.ticks))


def test_timetable_of_inference():
    table = plan(3, 3, training=False).timetable()
    assert table.forward[:, 0].tolist() == [0, 1, 2, -1, -1]
    assert (table.backward == -1).all()
