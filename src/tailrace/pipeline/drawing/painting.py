"""The colours and shapes of a picture of a plan."""

from tailrace.pipeline.drawing.canvas import Canvas
from tailrace.pipeline.drawing.panel import CELL, GAP, HEAD, MARGIN, Column, Panel
from tailrace.pipeline.schedule import simulator, stash
from tailrace.pipeline.schedule.units import Unit

TEXT = "#1f2933"
_FORWARD, _BACKWARD, _UPDATE = "#2f6fb0", "#dd7a2b", "#7b62a8"
_IDLE, _LINE, _FAINT = "#eef1f4", "#c3cad1", "#66727f"
_COLOUR = {"F": _FORWARD, "B": _BACKWARD}
_WORD = {"F": "forward", "B": "backward"}


def paint(canvas: Canvas, panel: Panel) -> None:
    """Paint one plan."""
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


def _paint_head(canvas: Canvas, panel: Panel) -> None:
    plan = panel.plan
    canvas.text(MARGIN, 26, panel.title, size=15, fill=TEXT, weight="600")
    facts = f"{plan.microbatches} microbatches, {plan.num_ticks} ticks"
    if plan.own_ticks is None:
        facts += f", bubble {simulator.bubble(plan) * 100:.1f} %"
    canvas.text(MARGIN, 43, facts, size=11.5, fill=_FAINT)


def _paint_phases(canvas: Canvas, panel: Panel) -> None:
    """Brackets over the columns of each phase."""
    y = HEAD - 10
    phases = zip(("ramp-up", "steady", "ramp-down"), panel.plan.phases, strict=True)
    for name, phase in phases:
        held = [c for c in panel.columns if c.tick is not None and c.tick in phase]
        if not held:
            continue
        left, right = held[0].x + 1, held[-1].x + held[-1].width - 1
        canvas.path(f"M{left:g} {y + 5} V{y} H{right:g} V{y + 5}", stroke=_LINE)
        # Without room for its name, a phase at an end of the picture has it beyond the bracket; the
        # steady one goes without.
        if right - left >= 6.2 * len(name):
            canvas.text((left + right) / 2, y - 4, name, size=11, fill=_FAINT, anchor="middle")
        elif name == "ramp-up":
            canvas.text(left, y - 4, name, size=11, fill=_FAINT)
        elif name == "ramp-down":
            canvas.text(right, y - 4, name, size=11, fill=_FAINT, anchor="end")


def _paint_lanes(canvas: Canvas, panel: Panel) -> None:
    left = panel.columns[0].x
    for lane in panel.lanes:
        if lane.device is None:
            canvas.text(MARGIN, lane.y + 12, "⋮", size=14, fill=_FAINT)
            canvas.text((left + panel.right) / 2, lane.y + 12, "⋮", size=14, fill=_FAINT)
            continue
        canvas.rect(left, lane.y, panel.right - left, CELL, _IDLE, radius=3)
        base = lane.y + CELL / 2 + 4
        if lane.opens_device:
            canvas.text(MARGIN, base, f"device {lane.device}", size=12, fill=TEXT, weight="600")
        canvas.text(
            left - 8, base, lane.label, size=10.5, fill=_FAINT, anchor="end", room=panel.stage_room
        )


def _paint_column(canvas: Canvas, panel: Panel, column: Column) -> None:
    assert column.tick is not None
    place = {(lane.device, lane.stage): lane.y for lane in panel.lanes}
    for unit in panel.ticks[column.tick]:
        y = place.get((unit.device, unit.stage))
        # A device that is left out has no lane, and a Grouped tick has a column for each kind.
        if y is None or unit.kind not in column.kinds:
            continue
        canvas.rect(
            column.x, y, column.width, CELL, _COLOUR[unit.kind], 3, _hint(panel, column, unit)
        )
        text = str(unit.microbatch)
        canvas.text(
            column.x + column.width / 2,
            y + CELL / 2 + 4,
            text,
            # Four digits do not fit into a cell at the usual size.
            size=11.5 if len(text) < 4 else 9,
            fill="#ffffff",
            anchor="middle",
        )


def _hint(panel: Panel, column: Column, unit: Unit) -> str:
    return (
        f"tick {column.tick}: {_WORD[unit.kind]} of microbatch {unit.microbatch} "
        f"at {panel.plan.stage_name(unit.stage)} on device {unit.device}"
    )


def _paint_axis(canvas: Canvas, panel: Panel) -> None:
    """Tick numbers, and lines between ticks."""
    y = panel.bottom + 15
    canvas.text(panel.columns[0].x - 8, y, "tick", size=10.5, fill=_FAINT, anchor="end")
    spans: dict[int, list[Column]] = {}
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
            line = f"M{right + GAP / 2:g} {HEAD - 2} V{panel.bottom + 4:g}"
            canvas.path(line, stroke=_LINE, dashes="1 3")


def _paint_update(canvas: Canvas, panel: Panel) -> None:
    x, height = panel.right + 6, panel.bottom - HEAD
    hint = "the weights are updated once, from the accumulated gradients"
    canvas.rect(x, HEAD, 16, height, _UPDATE, 3, hint)
    if height > 44:
        middle = HEAD + height / 2
        canvas.text(x + 12, middle, "update", 10.5, "#ffffff", anchor="middle", turn=-90)


def _paint_stash(canvas: Canvas, panel: Panel) -> None:
    """The number of microbatches that each stage holds at once, to the right of its lane."""
    x = panel.right + 32
    canvas.text(x, HEAD - 14, "stash slots", size=11, fill=_FAINT)
    for lane in panel.lanes:
        if lane.device is None:
            continue
        slots = stash.slots(panel.plan, lane.stage)
        canvas.text(x + 19, lane.y + 17, str(slots), size=11.5, fill=TEXT, anchor="end")
        # Two rows of sixteen fit into a lane; the number beside them is exact.
        for i in range(min(slots, 32)):
            row, place = divmod(i, 16)
            top = lane.y + (5 if slots > 16 else 10)
            canvas.rect(x + 24 + 7 * place, top + 9 * row, 5, 7, _LINE, 1)
    y = panel.bottom + 15
    canvas.text(x, y, f"{stash.total(panel.plan)} slots in all", size=11, fill=TEXT)


def _paint_legend(canvas: Canvas, panel: Panel) -> None:
    entries = [("forward", _FORWARD), ("backward", _BACKWARD), ("update", _UPDATE)]
    x, y = panel.columns[0].x, panel.bottom + 32
    for name, colour in [*entries[: 3 if panel.plan.training else 1], ("idle", _IDLE)]:
        canvas.rect(x, y, 12, 12, colour, 2)
        canvas.text(x + 17, y + 10, name, size=11, fill=_FAINT)
        x += 26 + 6.4 * len(name)
    canvas.text(x, y + 10, "the number is the microbatch", size=11, fill=_FAINT)
