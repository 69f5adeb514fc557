"""The simulator: the reference's table, closed forms, and a slow simulator beside the fast one."""

import pytest

from tailrace.errors import PlanError
from tailrace.pipeline import PipelineSchedule, SimulationMode, plan
from work import calls_of

# S, M, F, B | Grouped ungated, gated | Interleaved ungated, gated | 1F1B | Sequential | ideal
TABLE = [
    (4, 16, 1, 2, 69, 57, 76, 72, 57, 192, 48),
    (4, 8, 1, 2, 45, 33, 44, 40, 33, 96, 24),
    (8, 32, 1, 2, 141, 117, 156, 148, 117, 768, 96),
    (4, 16, 1, 1, 46, 38, 38, 38, 38, 128, 32),
]


@pytest.mark.parametrize("row", TABLE)
def test_the_table_of_the_reference(row):
    stages, count, forward, backward, *expected = row
    plans = [plan(stages, count, schedule) for schedule in PipelineSchedule]

    def total(made, mode):
        return made.simulate(forward, backward, mode=mode).total

    grouped, interleaved, sequential = plans
    assert expected == [
        total(grouped, "ungated"),
        total(grouped, "gated"),
        total(interleaved, "ungated"),
        total(interleaved, "gated"),
        total(interleaved, "free"),
        total(sequential, "gated"),
        grouped.simulate(forward, backward).ideal,
    ]
    assert total(grouped, "free") == total(interleaved, "free")


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (4, 64), (3, 30)])
def test_the_bubble_follows_the_formula(stages, count):
    expected = (stages - 1) / (count + stages - 1)
    for training in (True, False):
        assert plan(stages, count, training=training).bubble == expected
    if count % stages == 0:
        assert plan(stages, count, "interleaved").bubble == expected
    assert plan(stages, count, "sequential").bubble == pytest.approx(1 - 1 / stages)
    assert plan(stages, count).utilisation == 1 - expected
    # Grouped's bubble does not depend on how long a backward takes.
    assert plan(stages, count).simulate(1.0, 3.0).bubble == pytest.approx(expected)
    # Without gates it is the reference's share of busy slots, M / (M + N - 1).
    busy = 1 - plan(stages, count).simulate(1.0, 1.0, mode="ungated").bubble
    assert busy == pytest.approx(count / (count + 2 * stages - 1))


def test_masked_closed_forms():
    """What an engine that computes on garbage takes, from the slowest stages alone."""
    forward, backward = [1.0, 3.0, 2.0, 1.5], [2.0, 4.0, 7.0, 1.0]
    stages, count, ahead, back = 4, 16, 3.0, 7.0
    assert plan(4, 16).simulate(forward, backward, mode="masked").total == (
        (count + stages - 1) * (ahead + back)
    )
    assert plan(4, 16, "interleaved").simulate(forward, backward, mode="masked").total == (
        stages * ahead + stages * back + (2 * count - 2) * max(ahead, back)
    )


def test_unequal_stages_in_step():
    made = plan(2, 4)
    # Forwards: 1 alone, then 5 with it four times; backwards: 6 four times, then 2 alone.
    assert made.simulate([1, 5], [2, 6]).total == 1 + 4 * 5 + 4 * 6 + 2
    assert made.simulate([1, 5], [2, 6], mode="ungated").total == 7 * 11
    assert plan(2, 3, "sequential").simulate([1, 5], [2, 6]).total == 3 * 14


def test_a_tick_ends_when_its_slowest_device_is_done():
    """Devices meet once a tick: one may have the slow backward, and another the slow forward."""
    made = plan(2, 4)
    # Device 0 has F0 = 1 and B0 = 6, device 1 has F1 = 5 and B1 = 2.
    assert made.simulate([1, 5], [6, 2]).total == 1 + 5 + 7 + 7 + 7 + 6 + 6
    for mode in ("masked", "ungated"):
        assert made.simulate([1, 5], [6, 2], mode=mode).total >= made.simulate([1, 5], [6, 2]).total


def test_backward_is_twice_the_forward():
    made = plan(3, 6)
    assert made.simulate([1, 2, 3]) == made.simulate([1, 2, 3], [2, 4, 6])


def test_transfers_add_to_the_ticks_that_have_them():
    made = plan(2, 4)
    # Values travel once a tick, in both directions at once; in the last of seven nothing does.
    assert made.simulate(1.0, 1.0, transfer=0.25).total == 10 + 6 * 0.25
    assert made.simulate(1.0, 1.0, transfer=[0.25]).total == 11.5
    # On one device nothing travels.
    assert plan(2, 4, device_mapping=[0, 0]).simulate(1.0, 1.0, transfer=9.0).bubble == 0.0
    alone = plan(2, 3, "sequential")
    assert alone.simulate(1.0, 1.0, transfer=0.5).total == 3 * (4 + 2 * 0.5)
    assert alone.simulate(1.0, 1.0, transfer=0.5, mode="free").total == 3 * (4 + 2 * 0.5)


def test_update_and_parts_add_up():
    result = plan(2, 12).simulate(1.0, 2.0, update=[0.5, 0.25])
    assert result.update == 0.5
    assert result.ramp_up + result.steady + result.ramp_down + result.update == result.total
    assert result.work == (36.5, 36.25)
    assert result.busy == {0: 36.5 / result.total, 1: 36.25 / result.total}
    shared = plan(2, 12, device_mapping=[3, 3]).simulate(1.0, 2.0, update=[0.5, 0.25])
    assert (shared.update, shared.bubble) == (0.75, 0.0)
    assert "bubble 0.0 %" in str(shared)


def test_ramps_shrink_with_the_count():
    shares = [plan(4, count).simulate(1.0, 2.0).ramp_share for count in (8, 16, 64, 512)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert shares[-1] < 0.05


def test_concurrent_members_take_the_time_of_the_slowest():
    made = plan([1, 2, 1], 6)
    assert made.simulate([1, [2, 4], 1], [2, [4, 8], 2]).total == (
        plan(3, 6).simulate([1, 4, 1], [2, 8, 2]).total
    )
    # On one device they run one after the other.
    together = plan([1, 2], 4, device_mapping=[0, [1, 1]])
    assert together.simulate([1, [2, 4]]).total == plan(2, 4).simulate([1, 6]).total


@pytest.mark.parametrize("mode", SimulationMode)
@pytest.mark.parametrize(
    "made",
    [
        plan(3, 12),
        plan(4, 16, device_mapping=[0, 1, 1, 0]),
        plan(3, 12, device_mapping=[0, [1, 2], 2]),
        plan([2, 1, 2], 12, "interleaved"),
        plan(4, 8, "interleaved", [0, 1, 0, 2], training=False),
        plan(3, 4, "sequential", [0, 1, 0]),
    ],
    ids=repr,
)
def test_fast_and_slow_simulators_agree(made, mode):
    """A plan with its ticks spelled out is simulated tick by tick and unit by unit."""
    spelled = made.with_ticks(made.ticks)
    times = [1.0 + 0.5 * stage for stage in range(made.stages)]
    back = times[::-1] if made.training else None
    fast = made.simulate(times, back, 0.125, 0.25, mode)
    slow = spelled.simulate(times, back, 0.125, 0.25, mode)
    assert fast == slow


def test_free_running_never_loses_to_the_clock():
    for schedule in PipelineSchedule:
        made = plan(3, 12, schedule)
        times = [3.0, 1.0, 2.0]
        free = made.simulate(times, mode="free")
        assert free.total <= made.simulate(times).total
        assert free.total >= free.ideal
        assert 0 <= free.ramp_share <= 1


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_thousands_of_devices(schedule):
    made = plan(1024, 4096, schedule)
    units = 2 * 1024 * 4096
    for mode in ("gated", "free"):
        found = []
        calls = calls_of(lambda: found.append(made.simulate(1.0, 2.0, mode=mode)))  # noqa: B023
        assert found[0].total > 0
        assert calls < units / 20, "no unit is looked at on its own"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([1.0],), "`forward` is one time for all stages .* received 1 times for 2 stages"),
        (([1.0, -1.0],), "`forward` of stage 1 is a time of zero or more"),
        (([1.0, float("nan")],), "`forward` of stage 1"),
        (([1.0, [1.0, 2.0]],), "one for each of its 1 member"),
        ((1.0, 1.0, [1.0, 1.0]), "one for each of the 1 boundaries"),
        ((1.0, 1.0, -1.0), "`transfer` is a time of zero or more"),
        ((1.0, 1.0, 0.0, [1.0]), "`update` is one time"),
        ((1.0, 1.0, 0.0, 0.0, "fast"), "'gated', 'masked', 'ungated', 'free'. Received: 'fast'"),
    ],
)
def test_times_that_are_none(arguments, sentence):
    with pytest.raises(PlanError, match=sentence):
        plan(2, 4).simulate(*arguments)


def test_inference_has_no_backward():
    with pytest.raises(PlanError, match="leave `backward` out"):
        plan(2, 4, training=False).simulate(1.0, 1.0)
    assert plan(2, 4, training=False).simulate(1.0).total == 5


def test_broken_ticks_cannot_be_simulated():
    made = plan(2, 2, training=False)
    strange = made.with_ticks([[(5, "F", 0, 0)]])
    for mode in ("gated", "free"):
        with pytest.raises(PlanError, match=r"Run `plan\.check\(\)`"):
            strange.simulate(1.0, mode=mode)
    with pytest.raises(PlanError, match="its input is never made"):
        made.with_ticks([[(1, "F", 1, 0)]]).simulate(1.0, mode="free")


def test_sequential_stays_alone_without_a_clock():
    made = plan(3, 2, "sequential", training=False)
    for each in (made, made.with_ticks(made.ticks)):
        assert each.simulate(1.0, transfer=0.5, mode="free").total == 2 * 4
