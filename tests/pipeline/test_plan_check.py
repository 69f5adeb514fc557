"""Plans broken on purpose: `check()` finds each, and shows the place."""

import pytest

from tailrace.errors import PlanError
from tailrace.pipeline import plan


def broken(made, edit):
    """The text of the error that `check()` raises once `edit` has changed the ticks."""
    ticks = [list(tick) for tick in made.ticks]
    edit(ticks)
    with pytest.raises(PlanError) as caught:
        made.with_ticks(ticks).check()
    return str(caught.value)


def move(ticks, unit, to):
    for tick in ticks:
        if unit in tick:
            tick.remove(unit)
    ticks[to].append(unit)


def test_the_ticks_of_a_plan_pass():
    made = plan(3, 6)
    assert made.check() is made
    assert made.with_ticks(made.ticks).check()


def test_the_arrow_points_at_the_place():
    text = broken(plan(2, 4), lambda ticks: move(ticks, (1, "F", 1, 1), to=1))
    assert "tick 1" in text
    assert "F1.1@1" in text
    assert text.splitlines()[2:7] == [
        "    t     0     1     2     3     4     5     6",
        "    dev0  F0    F1    F2    B0+F3 B1    B2    B3",
        "--> dev1  .     F0+F1 B0    B1+F2 B2+F3 B3    .",
        "                ^",
        "",
    ]


def test_an_input_that_is_not_there_yet():
    def too_early(ticks):
        ticks[0].append((1, "F", 1, 0))
        ticks[1].remove((1, "F", 1, 0))

    assert "needs the forward of stage 0, finished in an earlier tick" in broken(
        plan(2, 4), too_early
    )


def test_a_gradient_that_is_not_there_yet():
    text = broken(plan(2, 4), lambda ticks: move(ticks, (0, "B", 0, 0), to=2))
    assert "needs the backward of stage 1, finished in an earlier tick" in text


def test_a_backward_in_the_tick_of_its_forward():
    text = broken(plan(2, 4), lambda ticks: move(ticks, (1, "B", 1, 0), to=1))
    assert "needs the forward of its own stage 1, finished in an earlier tick" in text


def test_a_unit_that_is_missing():
    text = broken(plan(2, 4), lambda ticks: ticks[6].remove((0, "B", 0, 3)))
    assert "microbatch 3 at stage 0 on device 0 (B0.3@0) never runs" in text
    assert "-->" in text


def test_a_unit_that_runs_twice():
    text = broken(plan(2, 4), lambda ticks: ticks[6].append((1, "F", 1, 0)))
    assert "has run already: each forward runs exactly once" in text


def test_microbatches_out_of_order():
    def swap(ticks):
        ticks[0][0], ticks[1][1] = (0, "F", 0, 1), (0, "F", 0, 0)

    text = broken(plan(2, 4), swap)
    assert "microbatch 0 has not run yet: a stage takes microbatches in order" in text


def test_a_slot_overwritten_early():
    def rush(ticks):
        """Stage 0 starts microbatch 2 before the backward of microbatch 0."""
        ticks[1] = [(1, "F", 1, 0), (0, "F", 0, 1)]
        ticks[2] = [(1, "B", 1, 0), (0, "F", 0, 2)]

    made = plan(2, 4, "interleaved")
    assert made.slots(0) == 2
    text = broken(made, rush)
    assert "overwrites stash slot 0 of stage 0 (2 slots), which microbatch 0 still needs" in text


def test_a_slot_is_free_once_its_backward_ran_in_the_same_tick():
    made = plan(2, 8)
    forward_first = [sorted(tick, key=lambda unit: unit.kind, reverse=True) for tick in made.ticks]
    with pytest.raises(PlanError, match="overwrites stash slot"):
        made.with_ticks(forward_first).check()


def test_two_units_where_one_is_allowed():
    text = broken(plan(2, 4, "interleaved"), lambda ticks: move(ticks, (0, "F", 0, 1), to=0))
    assert "Interleaved allows one unit on a device in a tick, and F0.0@0 is there too" in text
    text = broken(plan(2, 4), lambda ticks: move(ticks, (0, "F", 0, 1), to=0))
    assert "Grouped allows one forward and one backward of a stage on a device in a tick" in text


def test_sequential_runs_one_thing_at_a_time():
    made = plan(2, 2, "sequential", training=False)
    text = broken(made, lambda ticks: move(ticks, (0, "F", 0, 1), to=1))
    assert "Sequential runs one stage at a time, and F1.0@1 is there too" in text

    def overlap(ticks):
        ticks[1:3] = [ticks[2], ticks[1]]

    assert "microbatch 0 is still in flight" in broken(made, overlap)


@pytest.mark.parametrize(
    ("unit", "sentence"),
    [
        ((1, "F", 0, 0), "stage 0 is on device 0, not on device 1"),
        ((9, "F", 0, 0), "stage 0 is on device 0, not on device 9"),
        ((0, "F", 5, 0), "there is no stage 5; stages are 0 to 1"),
        ((0, "F", 0, 7), "there is no microbatch 7; they are 0 to 1"),
        ((0, "B", 0, 0), "an inference plan has no backward"),
    ],
)
def test_units_that_cannot_be(unit, sentence):
    text = broken(plan(2, 2, training=False), lambda ticks: ticks[0].__setitem__(0, unit))
    assert sentence in text
    assert "-->" in text


def test_a_member_of_a_group_that_is_left_out():
    text = broken(plan([1, 2, 1], 6), lambda ticks: ticks[1].remove((2, "F", 1, 0)))
    # The next stage needs both members.
    assert "F2.0@3" in text
    assert "needs the forward of stage 1" in text


@pytest.mark.parametrize("ticks", [[], 5, [5], [[5]], [[(0, "X", 0, 0)]], [[(0, "F", "0", 0)]]])
def test_ticks_that_are_none(ticks):
    with pytest.raises(PlanError, match="received"):
        plan(2, 4).with_ticks(ticks)
