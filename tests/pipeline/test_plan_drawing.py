"""Grids and pictures."""

import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from tailrace.errors import PlanError
from tailrace.pipeline import compare_plans, plan
from tailrace.pipeline.drawing.grid import visible


def texts(svg):
    root = ElementTree.fromstring(svg)
    return [element.text for element in root.iter() if element.tag.endswith("}text")]


def cells(svg):
    """How many cells there are of each kind, by their hints."""
    root = ElementTree.fromstring(svg)
    hints = [element.text for element in root.iter() if element.tag.endswith("}title")]
    return Counter(
        word for hint in hints for word in ("forward", "backward") if f" {word} " in hint
    )


def test_draw_is_a_string_that_shows_itself():
    drawing = plan(2, 4).draw()
    assert isinstance(drawing, str)
    assert repr(drawing) == drawing == str(plan(2, 4))


def test_grid_names_phases_and_stash():
    lines = plan(2, 12).draw().splitlines()
    assert lines[0].startswith("grouped, 2 stages, 12 microbatches, training: 15 ticks, bubble")
    phases = lines[2]
    assert lines[1].index(" 4 ") + 1 == phases.index("steady")
    assert lines[1].index(" 12 ") + 1 == phases.index("ramp-down")
    assert lines[-1] == "stash 4 slots: 3, 1"
    assert plan([1, 2, 1], 6).draw().splitlines()[-1] == "stash 12 slots: 5, 2 x 3, 1"


def test_a_large_grid_leaves_out_the_middle():
    lines = plan(256, 1024).draw(max_ticks=9, max_devices=6).splitlines()
    ticks = ["0", "1", "2", "...", "766", "767", "768", "...", "1532", "1533", "1534"]
    assert lines[1].split() == ["t", *ticks]
    devices = [line.split()[0] for line in lines[3:-1]]
    assert devices == ["dev0", "dev1", "...", "dev127", "dev128", "...", "dev254", "dev255"]


def test_visible_keeps_both_ends_and_the_middle():
    assert visible(5, 5) == [0, 1, 2, 3, 4]
    assert visible(10, 3) == [0, None, 4, None, 9]
    for count in range(1, 40):
        shown = visible(count, 9)
        kept = [index for index in shown if index is not None]
        assert kept == sorted(set(kept))
        assert {0, count - 1} <= set(kept)
        assert len(kept) <= 9


@pytest.mark.parametrize("schedule", ["grouped", "interleaved", "sequential"])
@pytest.mark.parametrize("training", [True, False])
def test_svg_has_every_unit(schedule, training):
    made = plan(2, 8, schedule, training=training)
    drawn = made.draw(format="svg", max_ticks=100)
    assert drawn == made.svg(max_ticks=100)
    assert cells(drawn) == Counter(
        {"F": "forward", "B": "backward"}[unit.kind] for tick in made.ticks for unit in tick
    )
    words = texts(drawn)
    assert {"device 0", "device 1", "stage 0", "tick", "ramp-up"} <= set(words)
    assert ("update" in words) is training
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")  # needs nothing else


def test_svg_of_shared_devices_and_groups():
    words = texts(plan([1, 2, 1], 6, device_mapping=[0, [1, 2], 2]).svg())
    assert {"stage 1a", "stage 1b", "stage 2"} <= set(words)
    words = texts(plan(["in", ["left & co", "right"], "out"], 6).svg())
    assert {"in", "left & co", "right", "out"} <= set(words)


def test_svg_of_a_large_plan_stays_small():
    assert len(plan(512, 4096).svg()) < 200_000


def test_a_plan_shows_itself_in_a_notebook():
    made = plan(2, 4)
    assert made._repr_svg_().startswith("<svg ")
    assert "<svg " in made._repr_html_()


def test_svg_of_ticks_by_hand():
    made = plan(2, 4)
    gap = made.with_ticks([*made.ticks[:3], (), *made.ticks[3:]])
    assert cells(gap.svg()) == cells(made.svg())


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_comparison_draws_both_plans_and_their_difference(layout):
    concurrent = plan(["in", ["text", "image"], "out"], 12, "interleaved")
    drawn = compare_plans(
        concurrent, concurrent.serialised(), titles=["Concurrent", "Serialised"], layout=layout
    )
    words = texts(drawn)
    assert {"Concurrent", "Serialised", "8 slots in all", "10 slots in all"} <= set(words)
    assert "28 against 30 ticks; 8 against 10 stash slots" in words


def test_comparisons_that_are_none():
    with pytest.raises(PlanError, match="1 plans and 0 titles"):
        compare_plans(plan(2, 4))
    with pytest.raises(PlanError, match="2 plans and 1 titles"):
        compare_plans(plan(2, 4), plan(2, 8), titles=["one"])
    with pytest.raises(PlanError, match="received 'diagonal'"):
        compare_plans(plan(2, 4), plan(2, 8), layout="diagonal")
