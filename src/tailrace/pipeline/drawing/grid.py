"""A plan as a grid of characters: devices down, ticks across.

    t     0     1     2     3     4     5     6
    dev0  F0    F1    F2    B0+F3 B1    B2    B3
    dev1  .     F0    B0+F1 B1+F2 B2+F3 B3    .

`F3` is the forward of microbatch 3, `B0+F3` both in one tick, in that order, `.` an idle device.
Where a device hosts several stages the stage comes first: `F1.3` is microbatch 3 at stage 1.
"""

from collections.abc import Sequence

from tailrace.pipeline.schedule import simulator, stash
from tailrace.pipeline.schedule.planned_ticks import PlannedTicks
from tailrace.pipeline.schedule.units import Tick, Unit

_GAP = "..."


class Drawing(str):
    """Text that is shown without quotes and escapes, at a prompt too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def visible(count: int, limit: int) -> list[int | None]:
    """The indices to show out of `count`: all, or start, middle and end, None for each gap."""
    if count <= limit:
        return list(range(count))
    # Three parts: the ramp-up, a piece of the steady state, and the ramp-down.
    part = max(limit // 3, 1)
    head, middle = max(limit - 2 * part, 1), (count - part) // 2
    kept = {*range(head), *range(middle, middle + part), *range(count - part, count)}
    shown: list[int | None] = []
    for index in sorted(kept):
        if shown and index - 1 not in kept:
            shown.append(None)
        shown.append(index)
    return shown


def draw(plan: PlannedTicks, max_ticks: int = 64, max_devices: int = 32) -> Drawing:
    """The whole grid with its phases and stash; the middle of a large plan is left out.

    Args:
        plan: what to draw.
        max_ticks: the most columns to show.
        max_devices: the most rows to show.
    """
    columns = visible(plan.num_ticks, max_ticks)
    rows = [_GAP if i is None else plan.devices[i] for i in visible(len(plan.devices), max_devices)]
    table = _table(plan, columns, rows)
    table.insert(1, _phase_line(plan, columns, table[0]))
    lines = [summary(plan), *table]
    if plan.training:
        lines.append(f"stash {stash_line(plan)}")
    return Drawing("\n".join(line.rstrip() for line in lines))


def draw_around(plan: PlannedTicks, t: int, device: int, reach: int = 5) -> Drawing:
    """The neighbourhood of tick `t`, with an arrow at the row of a device and a mark below."""
    columns: list[int | None] = list(range(max(0, t - reach), min(plan.num_ticks, t + reach + 1)))
    # A broken plan may name a device that the mapping does not have.
    devices = sorted({*plan.devices, device})
    near = devices.index(device)
    rows = devices[max(0, near - reach) : near + reach + 1]
    table = _table(plan, columns, rows)
    starts = _column_starts(table[0], columns)
    arrow = rows.index(device) + 1
    lines = [("--> " if i == arrow else "    ") + line for i, line in enumerate(table)]
    mark = " " * (4 + starts[columns.index(t)]) + "^"
    lines.insert(arrow + 1, mark)
    return Drawing("\n".join(line.rstrip() for line in lines))


def summary(plan: PlannedTicks) -> str:
    """One line about a plan."""
    work = "training" if plan.training else "inference"
    text = f"{plan.schedule}, {plan.stages} stages, {plan.microbatches} microbatches, {work}"
    if plan.own_ticks is not None:
        # A hand-written plan may be broken, and a broken one has no meaningful bubble.
        return f"{text}: {plan.num_ticks} ticks of its own"
    return f"{text}: {plan.num_ticks} ticks, bubble {simulator.bubble(plan) * 100:.1f} %"


def stash_line(plan: PlannedTicks) -> str:
    """The stash in words: the total, then the slots of each stage."""
    shown = visible(plan.stages, 16)
    slots = [_GAP if s is None else _slots_of(plan, s) for s in shown]
    return f"{stash.total(plan)} slots: {', '.join(slots)}"


def _slots_of(plan: PlannedTicks, stage: int) -> str:
    devices = len(set(plan.placement[stage]))
    return (
        f"{stash.slots(plan, stage)}" if devices == 1 else f"{devices} x {stash.slots(plan, stage)}"
    )


def _table(
    plan: PlannedTicks, columns: Sequence[int | None], rows: Sequence[int | str]
) -> list[str]:
    """The header and a line for each row, columns aligned."""
    several = _has_shared_devices(plan)
    cells = [
        ["t", *(_GAP if t is None else str(t) for t in columns)],
        *([f"dev{row}" if row != _GAP else _GAP] for row in rows),
    ]
    for t in columns:
        by_device = _by_device(() if t is None else plan.tick(t))
        for line, row in zip(cells[1:], rows, strict=True):
            if t is None or row == _GAP:
                line.append(_GAP)
            else:
                line.append("+".join(_cell(u, several) for u in by_device.get(row, ())) or ".")
    label = max(len(line[0]) for line in cells) + 2
    widths = _widths(list(zip(*(line[1:] for line in cells), strict=True)), several)
    return [
        line[0].ljust(label)
        + "".join(cell.ljust(width) for cell, width in zip(line[1:], widths, strict=True))
        for line in cells
    ]


def _widths(columns: list[tuple[str, ...]], several: bool) -> list[int]:
    """One width for all columns, so that ticks look alike; if cells get long, one per column."""
    needed = [max(map(len, column)) + 1 for column in columns]
    widths = needed if several else [max(needed)] * len(needed)
    # Narrow cells get one more space, so that digits of neighbours do not run together.
    return [width + 1 if width <= 3 else width for width in widths]


def _has_shared_devices(plan: PlannedTicks) -> bool:
    return sum(len(set(stage)) for stage in plan.placement) > len(plan.devices)


def _by_device(tick: Tick) -> dict[int | str, list[Unit]]:
    units: dict[int | str, list[Unit]] = {}
    for unit in tick:
        units.setdefault(unit.device, []).append(unit)
    return units


def _cell(unit: Unit, several: bool) -> str:
    stage = f"{unit.stage}." if several else ""
    return f"{unit.kind}{stage}{unit.microbatch}"


def _column_starts(header: str, columns: Sequence[int | None]) -> list[int]:
    """Where each column begins, read off the header."""
    # Found in the text, not computed: widths differ between columns. From 1 on, because the header
    # begins with "t".
    starts, place = [], 1
    for t in columns:
        text = _GAP if t is None else str(t)
        place = header.index(text, place)
        starts.append(place)
        place += len(text)
    return starts


def _phase_line(plan: PlannedTicks, columns: Sequence[int | None], header: str) -> str:
    """The names of the phases above the columns where each begins."""
    starts = _column_starts(header, columns)
    line = " " * starts[0]
    ends = [*starts[1:], len(header)]
    for name, phase in zip(("ramp-up", "steady", "ramp-down"), plan.phases, strict=True):
        held = [i for i, t in enumerate(columns) if t is not None and t in phase]
        if held:
            line = line.ljust(starts[held[0]])
            width = ends[held[-1]] - starts[held[0]] - 1
            # Nothing is to the right of the last phase, so its name may run over.
            fits = len(name) <= width or held[-1] == len(columns) - 1
            line += (name if fits else name[: max(width, 0)]).ljust(width, "-") + " "
    return line
