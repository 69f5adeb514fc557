"""Plans to text and JSON and back."""

import json

import pytest

from tailrace.errors import PlanError
from tailrace.pipeline import Plan, plan

PLANS = [
    plan(2, 4),
    plan(3, 6, "interleaved", [2, 0, 1]),
    plan(["embed", ["text", "image"], "the head"], 6),
    plan(3, 6, "interleaved", [0, [1, 2], 2], training=False),
    plan(2, 3, "sequential", [0, 0]),
]


@pytest.mark.parametrize("made", PLANS, ids=repr)
def test_round_trips(made):
    assert Plan.from_text(made.to_text()) == made
    assert Plan.from_json(made.to_json()) == made
    assert Plan.from_json(made.to_json(ticks=False, indent=2)) == made
    assert "ticks" not in json.loads(made.to_json(ticks=False))


def test_text_reads_well():
    assert plan(2, 1, "sequential", [0, 3]).to_text() == (
        "tailrace plan 1\n"
        "schedule: sequential\n"
        "training: yes\n"
        "microbatches: 1\n"
        "devices: [0, 3]\n"
        "ticks: 4\n"
        "F0.0@0\n"
        "F1.0@3\n"
        "B1.0@3\n"
        "B0.0@0\n"
    )


def test_ticks_written_by_hand_are_kept():
    made = plan(2, 4)
    stretched = made.with_ticks([*made.ticks[:3], (), *made.ticks[3:]])
    assert stretched != made
    assert stretched.check().num_ticks == 8
    assert "of its own" in str(stretched)
    assert "with_ticks(<8 ticks>)" in repr(stretched)
    for copy in (Plan.from_text(stretched.to_text()), Plan.from_json(stretched.to_json())):
        assert copy == stretched
    # A count that the schedule itself refuses is the hand's to answer for.
    odd = made.to_text().replace("microbatches: 4", "microbatches: 3")
    assert Plan.from_text(odd).own_ticks is not None


def test_a_saved_plan_that_was_damaged_fails_its_check():
    text = plan(2, 4).to_text().replace("F1.0@1", "F1.1@1")
    with pytest.raises(PlanError, match="-->"):
        Plan.from_text(text).check()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "begins with 'tailrace plan 1'"),
        ("schedule: grouped", "begins with 'tailrace plan 1'"),
        ("tailrace plan 1\nwhat", "Line 2 of the plan is 'name: value'"),
        ("tailrace plan 1\nschedule: grouped", "does not say its training, microbatches"),
        ("tailrace plan 1\ntraining: yes\nmicrobatches: x", "'microbatches' cannot be read"),
    ],
)
def test_text_that_is_no_plan(text, sentence):
    with pytest.raises(PlanError, match=sentence):
        Plan.from_text(text)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("training: yes", "training: maybe", "'training' is true or false"),
        ("schedule: grouped", "schedule: gruped", "Did you mean 'grouped'"),
        ("ticks: 7", "ticks: 9", "says 'ticks: 9', and 7 lines follow"),
        ("F1.0@1", "F1.0", r"A unit is written F1\.3@2 .* Line 8 of the plan has 'F1\.0'"),
        ("devices: [0, 1]", "devices: 5", "'devices' is a list"),
        ("devices: [0, 1]", "devices: [0]", "at least two"),
    ],
)
def test_text_with_a_mistake(old, new, sentence):
    with pytest.raises(PlanError, match=sentence):
        Plan.from_text(plan(2, 4).to_text().replace(old, new))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not the JSON of a plan"),
        ("[]", '"tailrace_plan": 1'),
        ('{"tailrace_plan": 2}', '"tailrace_plan": 1'),
        ('{"tailrace_plan": 1}', "does not say its schedule"),
    ],
)
def test_json_that_is_no_plan(text, sentence):
    with pytest.raises(PlanError, match=sentence):
        Plan.from_json(text)
