"""What a plan refuses, and the sentence it refuses it with."""

import re

import pytest

from tailrace.errors import PlanError, TailraceError
from tailrace.pipeline import Plan, plan


def refusal(*args, **kwargs):
    with pytest.raises(PlanError) as caught:
        plan(*args, **kwargs)
    assert isinstance(caught.value, TailraceError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("stages", "count", "schedule", "training", "multiple"),
    [
        (3, 10, "grouped", False, 3),
        (3, 10, "interleaved", False, 3),
        (3, 9, "grouped", True, 6),
        (3, 10, "interleaved", True, 3),
        (4, 10, "grouped", True, 8),
        (2, 2, "grouped", True, 4),
    ],
)
def test_count_is_a_multiple_of_the_overlap(stages, count, schedule, training, multiple):
    text = refusal(stages, count, schedule, training=training)
    start = "The number of iterations of the pipeline must be a multiple of "
    assert text.startswith(f"{start}{multiple}, but it is {count}.")
    assert f"microbatches={-(-count // multiple) * multiple}" in text
    assert "sequential schedule" in text


@pytest.mark.parametrize(("schedule", "least"), [("grouped", 8), ("sequential", 1)])
def test_count_is_at_least_the_overlap(schedule, least):
    text = refusal(4, 0, schedule)
    assert f"must be at least {least}, but it is 0." in text
    assert f"Use microbatches={least}" in text


@pytest.mark.parametrize("count", [2.0, "8", None, True])
def test_count_is_a_whole_number(count):
    assert refusal(2, count) == f"`microbatches` must be a whole number; received {count!r}."


@pytest.mark.parametrize("stages", [1, 0, -3, [1], ["all of it"], []])
def test_two_stages_at_least(stages):
    text = refusal(stages, 4)
    assert text.startswith("Pipeline requires at least two computational stages.")
    assert f"stages={stages!r}" in text


def test_stages_of_a_wrong_kind():
    assert "`stages` must be a whole number; received 2.5" in refusal(2.5, 4)
    assert "`stages` must be a whole number; received True" in refusal(True, 4)
    assert "nested lists are not supported" in refusal(["a", ["b", ["c", "d"]]], 4)
    assert "Each stage has at least one member. Stage 1 is 0" in refusal([1, 0], 4)
    assert "Each stage has at least one member. Stage 0 is []" in refusal([[], 1], 4)


@pytest.mark.parametrize("mapping", [[0], [0, 1, 2], []])
def test_mapping_has_an_entry_for_each_stage(mapping):
    text = refusal(2, 4, device_mapping=mapping)
    assert f"Each stage must be mapped to a device: {len(mapping)} mappings != 2 stages" in text


def test_mapping_of_a_wrong_kind():
    text = refusal(2, 4, device_mapping={0: 0, 1: 1})
    assert "device_mapping argument needs to be a list or a tuple" in text
    assert "device_mapping[1]` must be a whole number" in refusal(2, 4, device_mapping=[0, "one"])
    text = refusal(2, 4, device_mapping=[0, -1])
    assert "Devices are numbered from 0. Stage 1 is mapped to -1." in text
    text = refusal(3, 6, device_mapping=[0, [1, [2]], 3])
    assert "nested lists are not supported" in text


@pytest.mark.parametrize(
    ("stages", "mapping"),
    [([1, 2, 1], [0, 1, 2]), ([1, 2, 1], [0, [1, 2, 3], 4]), ([1, 1], [0, [1, 2]]), (2, [0, []])],
)
def test_groups_have_a_device_for_each_member(stages, mapping):
    text = refusal(stages, 12, device_mapping=mapping)
    assert "a list with one device for each member" in text
    assert "Stage 1 is" in text


@pytest.mark.parametrize("mapping", [[0, 1, 0], [0, [1, 2], 2]])
def test_interleaved_training_has_one_stage_a_device(mapping):
    text = refusal(3, 6, "interleaved", mapping)
    assert "does not support multiple pipeline stages on the same device for training" in text
    assert re.search(r"stages \d and 2 are both on device", text)
    assert plan(3, 6, "interleaved", mapping, training=False).check()
    assert plan(3, 6, "grouped", mapping).check()


def test_asking_a_plan_for_what_it_has_not():
    made = plan(2, 4)
    with pytest.raises(PlanError, match="stages 0 to 1; asked for stage 2"):
        made.stash_depth(2)
    with pytest.raises(PlanError, match="microbatches 0 to 3; asked for 4"):
        made.slot(0, 4)
    with pytest.raises(PlanError, match="no stash slots"):
        plan(2, 4, training=False).slot(0, 0)
    with pytest.raises(PlanError, match='"text" or as "svg"; received format=\'png\''):
        made.draw(format="png")


def test_a_plan_is_a_value():
    made = plan(4, 16)
    assert made == plan(stages=4, microbatches=16, schedule="grouped", device_mapping=range(4))
    assert hash(made) == hash(plan(4, 16))
    assert made != plan(4, 16, "interleaved")
    assert eval(repr(made), {"plan": plan}) == made
    with pytest.raises(AttributeError):
        made.microbatches = 8


def test_stages_have_all_names_or_none():
    made = plan(["embed", ["text", "image"], "head"], 6)
    assert made.names == ("embed", ("text", "image"), "head")
    assert made.stage_name(1) == "text+image"
    assert eval(repr(made), {"plan": plan}) == made
    assert plan([len, [len, len], len], 6) == plan([1, 2, 1], 6)  # functions count, unnamed
    assert plan([["only"], "next"], 4).names == ("only", "next")
    with pytest.raises(PlanError, match="1 names for 2 stages"):
        Plan(4, "grouped", (0, 1), names=("one",))


def test_serialised_puts_concurrent_members_in_sequence():
    made = plan(["embed", ["text", "image"], "head"], 24)
    flat = made.serialised()
    assert flat == plan(["embed", "text", "image", "head"], 24)
    assert made.stash_total < flat.stash_total
    assert made.num_ticks < flat.num_ticks
    with pytest.raises(PlanError, match="must be a multiple of 8, but it is 6"):
        plan([1, 2, 1], 6).serialised()
    assert plan([1, 2, 1], 6).serialised(microbatches=8).microbatches == 8


@pytest.mark.parametrize(
    ("stages", "microbatches", "text"),
    [
        (2**31, 4, "at most 10,000 stages, members of groups counted. Received: 2,147,483,648"),
        ([1, 2**40], 4, "at most 10,000 stages"),
        (2, 3 * 10**30, "at most 1,000,000,000,000 microbatches"),
    ],
)
def test_numbers_that_no_plan_has_take_no_memory(stages, microbatches, text):
    with pytest.raises(PlanError, match=text):
        plan(stages, microbatches)
