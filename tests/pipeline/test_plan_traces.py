"""The reference's traces, tick for tick, and its tables of device occupancy."""

import pytest

from tailrace.errors import PlanError
from tailrace.pipeline import PipelineSchedule, Unit, plan
from tailrace.pipeline.schedule.schedules import schedule_offsets

# Two stages: a = F0, b = F1, c = B1, d = B0.
LETTER = {("F", 0): "a", ("F", 1): "b", ("B", 1): "c", ("B", 0): "d"}


def letters(made):
    return ["".join(LETTER[unit.kind, unit.stage] for unit in tick) for tick in made.ticks]


def rows(made):
    """The lines of the grid from `t` down, without the phases and the stash."""
    lines = str(made).splitlines()
    return [line for line in lines if line.split()[0] == "t" or line.startswith("dev")]


def test_grouped_trace():
    ramp_up, ramp_down = ["a", "ba", "cba", "dcba"], ["dcb", "dc", "d"]
    assert letters(plan(2, 4)) == ramp_up + ramp_down
    assert letters(plan(2, 12)) == ramp_up + ["dcba"] * 8 + ramp_down


def test_interleaved_trace():
    assert letters(plan(2, 4, "interleaved")) == [
        "a",
        "b",
        "ca",
        "db",
        "ac",
        "bd",
        "ca",
        "db",
        "c",
        "d",
    ]


def test_sequential_trace():
    assert letters(plan(2, 5, "sequential")) == list("abcd" * 5)


def test_ticks_are_plain_tuples():
    ticks = plan(2, 4).ticks
    assert isinstance(ticks, tuple)
    assert ticks[0] == ((0, "F", 0, 0),)
    assert ticks[3] == ((0, "B", 0, 0), (1, "B", 1, 1), (1, "F", 1, 2), (0, "F", 0, 3))
    assert ticks[0][0].device == 0
    assert str(Unit(2, "F", 1, 3)) == "F1.3@2"


TABLES = {
    (2, 4, "grouped", True): """
        t     0     1     2     3     4     5     6
        dev0  F0    F1    F2    B0+F3 B1    B2    B3
        dev1  .     F0    B0+F1 B1+F2 B2+F3 B3    .""",
    (3, 6, "grouped", True): """
        t     0     1     2     3     4     5     6     7     8     9     10
        dev0  F0    F1    F2    F3    F4    B0+F5 B1    B2    B3    B4    B5
        dev1  .     F0    F1    F2    B0+F3 B1+F4 B2+F5 B3    B4    B5    .
        dev2  .     .     F0    B0+F1 B1+F2 B2+F3 B3+F4 B4+F5 B5    .     .""",
    (2, 4, "interleaved", True): """
        t     0   1   2   3   4   5   6   7   8   9
        dev0  F0  .   F1  B0  F2  B1  F3  B2  .   B3
        dev1  .   F0  B0  F1  B1  F2  B2  F3  B3  .""",
    (3, 6, "interleaved", True): """
        t     0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15
        dev0  F0  .   F1  .   F2  B0  F3  B1  F4  B2  F5  B3  .   B4  .   B5
        dev1  .   F0  .   F1  B0  F2  B1  F3  B2  F4  B3  F5  B4  .   B5  .
        dev2  .   .   F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5  .   .""",
    (2, 2, "sequential", True): """
        t     0   1   2   3   4   5   6   7
        dev0  F0  .   .   B0  F1  .   .   B1
        dev1  .   F0  B0  .   .   F1  B1  .""",
    (3, 3, "grouped", False): """
        t     0   1   2   3   4
        dev0  F0  F1  F2  .   .
        dev1  .   F0  F1  F2  .
        dev2  .   .   F0  F1  F2""",
}
TABLES[3, 3, "interleaved", False] = TABLES[3, 3, "grouped", False]


@pytest.mark.parametrize("arguments", TABLES)
def test_occupancy_table(arguments):
    stages, count, schedule, training = arguments
    made = plan(stages, count, schedule, training=training)
    expected = [line.strip() for line in TABLES[arguments].strip().splitlines()]
    assert rows(made) == expected
    assert made.num_ticks == len(made.ticks) == len(expected[0].split()) - 1


@pytest.mark.parametrize(
    ("schedule", "training", "overlap", "ticks"),
    [
        ("grouped", True, 8, 24 + 8 - 1),
        ("grouped", False, 4, 24 + 4 - 1),
        ("interleaved", True, 4, 2 * 24 + 2 * 4 - 2),
        ("interleaved", False, 4, 24 + 4 - 1),
        ("sequential", True, 1, 8 * 24),
        ("sequential", False, 1, 4 * 24),
    ],
)
def test_overlap_and_ticks(schedule, training, overlap, ticks):
    made = plan(4, 24, schedule, training=training)
    assert (made.overlap, made.num_ticks) == (overlap, ticks)


def test_interleaved_offsets_follow_the_mapping():
    made = plan(6, 6, "interleaved", [0, 1, 2, 1, 0, 1], training=False)
    assert made.offsets == (0, 1)
    assert [made.start(m) for m in range(6)] == [0, 1, 6, 7, 12, 13]
    everything_on_one = plan(4, 3, "interleaved", [5, 5, 5, 5], training=False)
    assert everything_on_one.offsets == (0,)


@pytest.mark.parametrize("mapping", [[0, 1, 2, 1, 0, 1], [0, 0, 1], [2, 0, 1, 2], [3, 1, 3, 0, 1]])
def test_offsets_against_the_definition(mapping):
    """The rule as it is written: compare whole rotated rows, position by position."""
    length = len(mapping)
    rotations = [mapping[i:] + mapping[:i] for i in range(length)]
    accepted = [0]
    for i in range(1, length):
        if all(
            all(x != y for x, y in zip(rotations[i], rotations[j], strict=True)) for j in accepted
        ):
            accepted.append(i)
    virtual = tuple((device,) for device in mapping)
    assert schedule_offsets(PipelineSchedule.INTERLEAVED, virtual) == tuple(accepted)


def test_phases_are_ranges_of_ticks():
    phases = plan(2, 12).phases
    assert phases == (range(4), range(4, 12), range(12, 15))
    assert [phases.of(t) for t in (3, 4, 11, 12)] == ["ramp-up", "steady", "steady", "ramp-down"]
    assert len(plan(2, 4).phases.steady) == 0
    assert plan(3, 6, "interleaved").phases == (range(6), range(6, 12), range(12, 16))
    assert plan(2, 3, "sequential").phases == (range(4), range(4, 12), range(12, 12))


def test_reordered_devices():
    made = plan(3, 6, device_mapping=[2, 0, 1]).check()
    assert made.ticks[0] == ((2, "F", 0, 0),)
    assert made.devices == (0, 1, 2)


def test_several_stages_on_one_device():
    made = plan(3, 6, device_mapping=[0, 1, 0]).check()
    assert made.ticks[2] == ((0, "F", 2, 0), (1, "F", 1, 1), (0, "F", 0, 2))
    assert "F2.0+F0.2" in str(made)


def test_concurrent_stages_count_as_one():
    made = plan(3, 6, device_mapping=[0, [1, 2], 3]).check()
    assert made == plan([1, 2, 1], 6)
    assert made.stages == 3
    assert made.ticks[1] == ((1, "F", 1, 0), (2, "F", 1, 0), (0, "F", 0, 1))
    shared = plan([1, 2, 1], 6, device_mapping=[0, [1, 2], 2]).check()
    assert shared.ticks[2] == (
        (2, "F", 2, 0), (1, "F", 1, 1), (2, "F", 1, 1), (0, "F", 0, 2),
    )  # fmt: skip


def test_members_on_one_device_are_one_unit():
    made = plan([1, 2], 4, "interleaved", [0, [1, 1]]).check()
    assert made.ticks[1] == ((1, "F", 1, 0),)


def test_concurrent_first_and_interleaved():
    made = plan([2, 1, 3], 6, "interleaved").check()
    assert made.device_mapping == ((0, 1), 2, (3, 4, 5))
    assert made.offsets == (0, 2, 4)


def test_a_tick_out_of_range():
    with pytest.raises(IndexError, match="ticks 0 to 6; asked for 7"):
        plan(2, 4).tick(7)


def test_large_plans_are_made_at_once():
    made = plan(4096, 8192)
    assert made.num_ticks == 8192 + 8191
    assert len(made.tick(8191)) == 8192
    assert plan(4096, 8192, "interleaved").overlap == 4096
    assert "ticks" not in vars(made)  # nothing made all of them


def test_schedules_accept_strings_and_teach():
    assert plan(2, 4, "Interleaved").schedule is PipelineSchedule.INTERLEAVED
    assert plan(2, 4, PipelineSchedule.GROUPED).schedule == "grouped"
    with pytest.raises(PlanError, match=r"'grouped', 'interleaved', 'sequential'.*'groupd'"):
        plan(2, 4, "groupd")
    with pytest.raises(PlanError, match="Did you mean 'interleaved'"):
        PipelineSchedule("interleave")
    with pytest.raises(PlanError, match="Received: None"):
        PipelineSchedule(None)
