"""A plan as a picture: an SVG that needs nothing else, for documents and notebooks.

Devices are rows, time runs to the right. A device that hosts several stages has a lane for each.
A Grouped tick has two columns, its backwards and its forwards. The engine skips a phase in which no
device has work, and so does the picture: its width is proportional to time.
"""

from collections.abc import Sequence
from typing import Literal

from tailrace.errors import PlanError
from tailrace.pipeline.drawing import grid
from tailrace.pipeline.drawing.canvas import Canvas
from tailrace.pipeline.drawing.grid import Drawing
from tailrace.pipeline.drawing.painting import TEXT, paint
from tailrace.pipeline.drawing.panel import MARGIN, label_room, lanes, lay_out
from tailrace.pipeline.schedule.planned_ticks import PlannedTicks
from tailrace.pipeline.schedule.stash import total as stash_total


def draw(
    plan: PlannedTicks, title: str | None = None, max_ticks: int = 40, max_devices: int = 16
) -> Drawing:
    """One plan as an SVG.

    Args:
        plan: what to draw.
        title: the heading; the schedule and its sizes if not given.
        max_ticks: the most ticks to show; the middle of a longer plan is left out.
        max_devices: the most devices to show, likewise.
    """
    rows = lanes(plan, max_devices)
    panel = lay_out(plan, title or _title(plan), max_ticks, rows, *label_room(rows))
    canvas = Canvas()
    paint(canvas, panel)
    return Drawing(canvas.svg(panel.width, panel.height, grid.summary(plan)))


def compare_plans(
    *plans: PlannedTicks,
    titles: Sequence[str] = (),
    layout: Literal["rows", "columns"] = "rows",
    max_ticks: int = 40,
    max_devices: int = 16,
) -> Drawing:
    """Several plans in one SVG, on one scale of time, with their ticks and stash totals.

    Args:
        plans: two or more, for instance a plan with concurrent stages and its `serialised()`.
        titles: a heading for each.
        layout: "rows" puts them one above the other, "columns" side by side.
        max_ticks: the most ticks of each to show.
        max_devices: the most devices of each to show.

    >>> from tailrace.pipeline import plan
    >>> concurrent = plan(stages=[1, 2, 1], microbatches=12, schedule="interleaved")
    >>> picture = compare_plans(concurrent, concurrent.serialised())
    >>> "8 slots in all" in picture, "10 slots in all" in picture
    (True, True)
    """
    if len(plans) < 2 or (titles and len(titles) != len(plans)):
        raise PlanError(
            "A comparison has two plans or more, and a title for each of them or none; received "
            f"{len(plans)} plans and {len(titles)} titles."
        )
    if layout not in ("columns", "rows"):
        raise PlanError(f'A comparison is laid out in "columns" or "rows"; received {layout!r}.')
    heads = titles or [_title(plan) for plan in plans]
    rows = [lanes(plan, max_devices) for plan in plans]
    # One width for the labels of all panels, so that equal ticks are aligned.
    room = label_room([lane for each in rows for lane in each])
    panels = [
        lay_out(plan, head, max_ticks, each, *room)
        for plan, head, each in zip(plans, heads, rows, strict=True)
    ]
    canvas = Canvas()
    x = y = 0.0
    for panel in panels:
        with canvas.moved(x, y):
            paint(canvas, panel)
        x, y = (x + panel.width, y) if layout == "columns" else (x, y + panel.height)
    # Of `x` and `y`, one has grown with each panel and the other is still 0.
    width = x or max(panel.width for panel in panels)
    height = (y or max(panel.height for panel in panels)) + 28
    canvas.text(MARGIN, height - 16, _verdict(plans), size=12.5, fill=TEXT, weight="600")
    return Drawing(canvas.svg(width, height, "; ".join(grid.summary(plan) for plan in plans)))


def _verdict(plans: Sequence[PlannedTicks]) -> str:
    """The comparison in one line."""
    ticks = " against ".join(str(plan.num_ticks) for plan in plans)
    stash = " against ".join(str(stash_total(plan)) for plan in plans)
    # Inference stashes nothing.
    return f"{ticks} ticks" + (f"; {stash} stash slots" if plans[0].training else "")


def _title(plan: PlannedTicks) -> str:
    work = "training" if plan.training else "inference"
    return f"{plan.schedule.value.capitalize()}, {plan.stages} stages, {work}"
