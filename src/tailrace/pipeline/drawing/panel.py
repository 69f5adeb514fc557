"""The position of everything in a picture of a plan: columns of time, lanes of stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.pipeline.drawing.grid import visible
from tailrace.pipeline.schedule.planned_ticks import PlannedTicks
from tailrace.pipeline.schedule.schedules import PipelineSchedule
from tailrace.pipeline.schedule.units import Tick

CELL, GAP, MARGIN = 26, 2, 16
HEAD, STASH = 74, 160
BREAK = 18  # the width or height of a gap: rows or columns that are left out


class Column(NamedTuple):
    """A stretch of time: a tick, one phase of it, or (tick None) ticks left out."""

    tick: int | None
    kinds: str
    x: float
    width: float


class Lane(NamedTuple):
    """A stage on a device, or (device None) devices left out."""

    device: int | None
    stage: int
    label: str
    y: float
    opens_device: bool


@dataclass(frozen=True)
class Panel:
    """One plan, laid out."""

    plan: PlannedTicks
    title: str
    columns: list[Column]
    ticks: dict[int, Tick]
    lanes: list[Lane]
    stage_room: float
    """The width available for the names of stages."""

    @property
    def right(self) -> float:
        """Where the last column ends."""
        last = self.columns[-1]
        return last.x + last.width

    @property
    def bottom(self) -> float:
        """Where the last lane ends."""
        return self.lanes[-1].y + (CELL if self.lanes[-1].device is not None else BREAK)

    @property
    def width(self) -> float:
        """The width with everything beside the columns."""
        # The heading and the legend need their width even if the schedule is short.
        return max(self.right + (STASH if self.plan.training else 8) + MARGIN, 480)

    @property
    def height(self) -> float:
        """The height with axis and legend."""
        return self.bottom + 56


def label_room(lanes: Sequence[Lane]) -> tuple[float, float]:
    """Where the columns begin, and the width available for the names of stages."""
    device = max(len(f"device {lane.device}") for lane in lanes) * 7.6 + 8
    stage = min(max(len(lane.label) for lane in lanes) * 6.2, 110)
    return MARGIN + device + stage + 8, stage


def lay_out(
    plan: PlannedTicks,
    title: str,
    max_ticks: int,
    lanes: list[Lane],
    x: float,
    stage_room: float,
) -> Panel:
    """Places for all ticks and lanes that are shown."""
    two_phases = plan.schedule is PipelineSchedule.GROUPED and plan.training
    shown = visible(plan.num_ticks, max_ticks)
    ticks = {t: plan.tick(t) for t in shown if t is not None}
    columns: list[Column] = []
    for t in shown:
        if t is None:
            columns.append(Column(None, "", x, BREAK))
        elif two_phases and ticks[t]:
            # A phase without work takes no time in the engine, so it takes no width here.
            for kind in "BF":
                if any(unit.kind == kind for unit in ticks[t]):
                    columns.append(Column(t, kind, x, CELL))
                    x += CELL + GAP
            continue
        else:
            columns.append(Column(t, "BF", x, CELL))
        x += columns[-1].width + GAP
    return Panel(plan, title, columns, ticks, lanes, stage_room)


def lanes(plan: PlannedTicks, max_devices: int) -> list[Lane]:
    """A lane for every stage of every device that is shown, from top to bottom."""
    hosted: dict[int, list[int]] = {device: [] for device in plan.devices}
    for stage, devices in enumerate(plan.placement):
        for device in dict.fromkeys(devices):
            hosted[device].append(stage)
    lanes: list[Lane] = []
    y = float(HEAD)
    for index in visible(len(plan.devices), max_devices):
        if index is None:
            lanes.append(Lane(None, 0, "", y, True))
            y += BREAK + 6
            continue
        device = plan.devices[index]
        for place, stage in enumerate(hosted[device]):
            lanes.append(Lane(device, stage, _lane_label(plan, stage, device), y, place == 0))
            y += CELL + GAP
        y += 4
    return lanes


def _lane_label(plan: PlannedTicks, stage: int, device: int) -> str:
    """The name of a stage; of a group, the names or letters of the members on this device."""
    members = [i for i, place in enumerate(plan.placement[stage]) if place == device]
    name = plan.names[stage] if plan.names else None
    if isinstance(name, str):
        return name
    if name is not None:
        return "+".join(name[i] for i in members)
    group = len(plan.placement[stage]) > 1
    # Members of a group have no numbers of their own in a plan: letters tell them apart.
    return f"stage {stage}" + ("".join(chr(ord("a") + i % 26) for i in members) if group else "")
