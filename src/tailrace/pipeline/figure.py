"""A plan as a picture: an SVG that needs nothing else, for documents and notebooks.

Devices are rows, time runs to the right. A device that hosts several stages has a lane for each.
A Grouped tick has two columns, its backwards and its forwards, and a column in which no device
has work is not there, because the engine skips it: the width of the picture is the time it takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from tailrace.errors import PlanError
from tailrace.pipeline import grid
from tailrace.pipeline.canvas import Canvas
from tailrace.pipeline.grid import Drawing, visible
from tailrace.pipeline.timing import PipelineSchedule
from tailrace.pipeline.units import Tick, Unit

if TYPE_CHECKING:
    from tailrace.pipeline.planning import Plan

_CELL, _GAP, _MARGIN = 26, 2, 16
_HEAD, _LABEL, _STASH = 74, 108, 104
_BREAK = 18  # the width or height of a place where rows or columns are left out
_FORWARD, _BACKWARD, _UPDATE = "#2f6fb0", "#dd7a2b", "#7b62a8"
_IDLE, _LINE, _TEXT, _FAINT = "#eef1f4", "#c3cad1", "#1f2933", "#66727f"
_COLOUR = {"F": _FORWARD, "B": _BACKWARD}
_WORD = {"F": "forward", "B": "backward"}


class _Column(NamedTuple):
    tick: int | None
    kinds: str
    x: float
    width: float


class _Lane(NamedTuple):
    device: int | None
    stage: int
    label: str
    y: float
    opens_device: bool


@dataclass(frozen=True)
class _Panel:
    """One plan, laid out."""

    plan: "Plan"
    title: str
    columns: list[_Column]
    ticks: dict[int, Tick]
    lanes: list[_Lane]

    @property
    def right(self) -> float:
        last = self.columns[-1]
        return last.x + last.width

    @property
    def bottom(self) -> float:
        return self.lanes[-1].y + (_CELL if self.lanes[-1].device is not None else _BREAK)

    @property
    def width(self) -> float:
        # The heading and the legend below need their room however short the schedule is.
        return max(self.right + (_STASH + 30 if self.plan.training else 8) + _MARGIN, 430)

    @property
    def height(self) -> float:
        return self.bottom + 66


def draw(
    plan: "Plan", title: str | None = None, max_ticks: int = 40, max_devices: int = 16
) -> Drawing:
    """One plan as an SVG.

    Args:
        plan: what to draw.
        title: the heading; the schedule and its sizes if not given.
        max_ticks: how many ticks to show; the middle of a longer plan is left out.
        max_devices: how many devices to show, likewise.
    """
    panel = _lay_out(plan, title or _title(plan), max_ticks, max_devices)
    canvas = Canvas()
    _paint(canvas, panel)
    return Drawing(canvas.svg(panel.width, panel.height, grid.summary(plan)))


def compare_plans(
    *plans: "Plan",
    titles: Sequence[str] = (),
    layout: Literal["columns", "rows"] = "columns",
    max_ticks: int = 40,
    max_devices: int = 16,
) -> Drawing:
    """Several plans in one SVG, side by side or one above the other, with their stash totals.

    >>> from tailrace.pipeline import plan
    >>> concurrent = plan(stages=[1, 2, 1], microbatches=12, schedule="interleaved")
    >>> picture = compare_plans(concurrent, concurrent.serialised())
    >>> "7 microbatches in all" in picture, "10 microbatches in all" in picture
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
    panels = [
        _lay_out(plan, head, max_ticks, max_devices)
        for plan, head in zip(plans, heads, strict=True)
    ]
    canvas = Canvas()
    x = y = 0.0
    for panel in panels:
        with canvas.moved(x, y):
            _paint(canvas, panel)
        x, y = (x + panel.width, y) if layout == "columns" else (x, y + panel.height)
    width = x or max(panel.width for panel in panels)
    height = y or max(panel.height for panel in panels)
    return Drawing(canvas.svg(width, height, "; ".join(grid.summary(plan) for plan in plans)))


def _title(plan: "Plan") -> str:
    work = "training" if plan.training else "inference"
    return f"{plan.schedule.value.capitalize()}, {plan.stages} stages, {work}"


def _lay_out(plan: "Plan", title: str, max_ticks: int, max_devices: int) -> _Panel:
    """Places for all ticks and lanes that are shown."""
    two_phases = plan.schedule is PipelineSchedule.GROUPED and plan.training
    shown = visible(plan.num_ticks, max_ticks)
    ticks = {t: plan.tick(t) for t in shown if t is not None}
    columns: list[_Column] = []
    x = float(_LABEL + _MARGIN)
    for t in shown:
        if t is None:
            columns.append(_Column(None, "", x, _BREAK))
        elif two_phases:
            for kind in "BF":
                if any(unit.kind == kind for unit in ticks[t]):
                    columns.append(_Column(t, kind, x, _CELL))
                    x += _CELL + _GAP
            continue
        else:
            columns.append(_Column(t, "BF", x, _CELL))
        x += columns[-1].width + _GAP
    return _Panel(plan, title, columns, ticks, _lanes(plan, max_devices))


def _lanes(plan: "Plan", max_devices: int) -> list[_Lane]:
    hosted: dict[int, list[int]] = {device: [] for device in plan.devices}
    for stage, devices in enumerate(plan.placement):
        for device in dict.fromkeys(devices):
            hosted[device].append(stage)
    lanes: list[_Lane] = []
    y = float(_HEAD)
    for index in visible(len(plan.devices), max_devices):
        if index is None:
            lanes.append(_Lane(None, 0, "", y, True))
            y += _BREAK + 6
            continue
        device = plan.devices[index]
        for place, stage in enumerate(hosted[device]):
            lanes.append(_Lane(device, stage, _lane_label(plan, stage, device), y, place == 0))
            y += _CELL + _GAP
        y += 4
    return lanes


def _lane_label(plan: "Plan", stage: int, device: int) -> str:
    """The name of a stage; of a group, the names or letters of the members on this device."""
    members = [i for i, place in enumerate(plan.placement[stage]) if place == device]
    name = plan.names[stage] if plan.names else None
    if isinstance(name, str):
        return name
    if name is not None:
        return "+".join(name[i] for i in members)
    group = len(plan.placement[stage]) > 1
    return f"stage {stage}" + ("".join(chr(ord("a") + i % 26) for i in members) if group else "")


def _paint(canvas: Canvas, panel: _Panel) -> None:
    _paint_head(canvas, panel)
    _paint_phases(canvas, panel)
    _paint_lanes(canvas, panel)
    for column in panel.columns:
        if column.tick is not None:
            _paint_column(canvas, panel, column)
    _paint_axis(canvas, panel)
    if panel.plan.training:
        _paint_update(canvas, panel)
        _paint_stash(canvas, panel)
    _paint_legend(canvas, panel)


def _paint_head(canvas: Canvas, panel: _Panel) -> None:
    plan = panel.plan
    canvas.text(_MARGIN, 26, panel.title, size=15, fill=_TEXT, weight="600")
    facts = f"{plan.microbatches} microbatches, {plan.num_ticks} ticks"
    if plan.own_ticks is None:
        facts += f", bubble {plan.bubble * 100:.1f} %"
    canvas.text(_MARGIN, 43, facts, size=11.5, fill=_FAINT)


def _paint_phases(canvas: Canvas, panel: _Panel) -> None:
    """Brackets over the columns of each phase."""
    y = _HEAD - 10
    phases = zip(("ramp-up", "steady", "ramp-down"), panel.plan.phases, strict=True)
    for name, phase in phases:
        held = [c for c in panel.columns if c.tick is not None and c.tick in phase]
        if not held:
            continue
        left, right = held[0].x + 1, held[-1].x + held[-1].width - 1
        canvas.path(f"M{left:g} {y + 5} V{y} H{right:g} V{y + 5}", stroke=_LINE)
        if right - left >= 6.2 * len(name):
            canvas.text((left + right) / 2, y - 4, name, size=11, fill=_FAINT, anchor="middle")
        elif name == "ramp-up":
            canvas.text(left, y - 4, name, size=11, fill=_FAINT)
        elif name == "ramp-down":
            canvas.text(right, y - 4, name, size=11, fill=_FAINT, anchor="end")


def _paint_lanes(canvas: Canvas, panel: _Panel) -> None:
    left = panel.columns[0].x
    for lane in panel.lanes:
        if lane.device is None:
            canvas.text(_MARGIN, lane.y + 12, "⋮", size=14, fill=_FAINT)
            canvas.text((left + panel.right) / 2, lane.y + 12, "⋮", size=14, fill=_FAINT)
            continue
        canvas.rect(left, lane.y, panel.right - left, _CELL, _IDLE, radius=3)
        base = lane.y + _CELL / 2 + 4
        if lane.opens_device:
            canvas.text(_MARGIN, base, f"device {lane.device}", size=12, fill=_TEXT, weight="600")
        canvas.text(left - 8, base, lane.label, size=10.5, fill=_FAINT, anchor="end", room=46)


def _paint_column(canvas: Canvas, panel: _Panel, column: _Column) -> None:
    assert column.tick is not None
    place = {(lane.device, lane.stage): lane.y for lane in panel.lanes}
    for unit in panel.ticks[column.tick]:
        y = place.get((unit.device, unit.stage))
        if y is None or unit.kind not in column.kinds:
            continue
        canvas.rect(
            column.x, y, column.width, _CELL, _COLOUR[unit.kind], 3, _hint(panel, column, unit)
        )
        text = str(unit.microbatch)
        canvas.text(
            column.x + column.width / 2,
            y + _CELL / 2 + 4,
            text,
            size=11.5 if len(text) < 4 else 9,
            fill="#ffffff",
            anchor="middle",
        )


def _hint(panel: _Panel, column: _Column, unit: Unit) -> str:
    return (
        f"tick {column.tick}: {_WORD[unit.kind]} of microbatch {unit.microbatch} "
        f"at {panel.plan.stage_name(unit.stage)} on device {unit.device}"
    )


def _paint_axis(canvas: Canvas, panel: _Panel) -> None:
    """Tick numbers, and lines between ticks."""
    y = panel.bottom + 15
    canvas.text(panel.columns[0].x - 8, y, "tick", size=10.5, fill=_FAINT, anchor="end")
    spans: dict[int, list[_Column]] = {}
    for column in panel.columns:
        if column.tick is None:
            canvas.text(column.x + column.width / 2, y, "⋯", size=12, fill=_FAINT, anchor="middle")
        else:
            spans.setdefault(column.tick, []).append(column)
    for t, columns in spans.items():
        right = columns[-1].x + columns[-1].width
        middle = (columns[0].x + right) / 2
        canvas.text(middle, y, str(t), size=10, fill=_FAINT, anchor="middle")
        if right < panel.right:
            line = f"M{right + _GAP / 2:g} {_HEAD - 2} V{panel.bottom + 4:g}"
            canvas.path(line, stroke=_LINE, dashes="1 3")


def _paint_update(canvas: Canvas, panel: _Panel) -> None:
    x, height = panel.right + 6, panel.bottom - _HEAD
    hint = "the weights are updated once, from the accumulated gradients"
    canvas.rect(x, _HEAD, 16, height, _UPDATE, 3, hint)
    if height > 44:
        middle = _HEAD + height / 2
        canvas.text(x + 12, middle, "update", 10.5, "#ffffff", anchor="middle", turn=-90)


def _paint_stash(canvas: Canvas, panel: _Panel) -> None:
    """How many microbatches each stage holds at once, to the right of its lane."""
    x = panel.right + 32
    canvas.text(x, _HEAD - 14, "stash slots", size=11, fill=_FAINT)
    for lane in panel.lanes:
        if lane.device is None:
            continue
        slots = panel.plan.slots(lane.stage)
        canvas.text(x + 16, lane.y + 17, str(slots), size=11.5, fill=_TEXT, anchor="end")
        for i in range(min(slots, 22)):
            row, place = divmod(i, 11)
            canvas.rect(x + 21 + 7 * place, lane.y + 6 + 8 * row, 5, 6, _LINE, 1)
    y = panel.bottom + 15
    canvas.text(x, y, f"{panel.plan.stash_total} microbatches in all", size=11, fill=_TEXT)


def _paint_legend(canvas: Canvas, panel: _Panel) -> None:
    entries = [("forward", _FORWARD), ("backward", _BACKWARD), ("update", _UPDATE)]
    x, y = panel.columns[0].x, panel.bottom + 32
    for name, colour in [*entries[: 3 if panel.plan.training else 1], ("idle", _IDLE)]:
        canvas.rect(x, y, 12, 12, colour, 2)
        canvas.text(x + 17, y + 10, name, size=11, fill=_FAINT)
        x += 26 + 6.4 * len(name)
    canvas.text(x, y + 10, "the number is the microbatch", size=11, fill=_FAINT)
