"""A plan as text and as JSON, and back.

    tailrace plan 1
    schedule: grouped
    training: yes
    microbatches: 4
    devices: [0, 1]
    ticks: 7
    F0.0@0
    F1.0@1 F0.1@0
    ...

A line after `ticks:` is one tick; `F1.3@2` is the forward of microbatch 3 at stage 1 on device 2.
"""

import json
import re
from typing import Any, cast

from tailrace.base.files import parse_json
from tailrace.errors import PlanError
from tailrace.pipeline.schedule.device_mapping import is_group
from tailrace.pipeline.schedule.planned_ticks import PlannedTicks
from tailrace.pipeline.schedule.schedules import PipelineSchedule

_VERSION = 1
_UNIT = re.compile(r"([FB])(\d+)\.(\d+)@(\d+)")
_FIELDS = ("schedule", "training", "microbatches", "devices")


def to_json(plan: PlannedTicks, ticks: bool = True, indent: int | None = None) -> str:
    """The plan as a JSON object."""
    value: dict[str, Any] = {
        "tailrace_plan": _VERSION,
        "schedule": plan.schedule.value,
        "training": plan.training,
        "microbatches": plan.microbatches,
        "devices": plan.device_mapping,
    }
    if plan.names:
        value["names"] = plan.names
    # Ticks that follow from the schedule may be left out; hand-written ones are the plan.
    if ticks or plan.own_ticks is not None:
        value["ticks"] = plan.ticks
    return json.dumps(value, indent=indent)


def from_json(text: str) -> dict[str, Any]:
    """The fields of a plan; `ticks` is None if the text has none."""
    try:
        value: Any = parse_json(text)
    except (ValueError, TypeError) as error:
        raise PlanError(f"This is not the JSON of a plan: {error}.") from error
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    if fields.get("tailrace_plan") != _VERSION:
        raise PlanError(
            f'The JSON of a plan is an object with "tailrace_plan": {_VERSION}. '
            f"Received {text[:60]!r}. Write it with `plan.to_json()`."
        )
    return _fields(fields)


def to_text(plan: PlannedTicks) -> str:
    """The plan as lines of text."""
    lines = [
        f"tailrace plan {_VERSION}",
        f"schedule: {plan.schedule}",
        f"training: {'yes' if plan.training else 'no'}",
        f"microbatches: {plan.microbatches}",
        f"devices: {json.dumps(plan.device_mapping)}",
    ]
    if plan.names:
        lines.append(f"names: {json.dumps(plan.names)}")
    # Last, and with their number: everything behind it is ticks, and a truncated file is noticed.
    lines.append(f"ticks: {plan.num_ticks}")
    lines.extend(" ".join(map(str, tick)) or "-" for tick in plan.iter_ticks())
    return "\n".join(lines) + "\n"


def from_text(text: str) -> dict[str, Any]:
    """The fields of a plan."""
    lines = text.strip().splitlines()
    if not lines or lines[0].split() != ["tailrace", "plan", str(_VERSION)]:
        raise PlanError(
            f"The text of a plan begins with 'tailrace plan {_VERSION}'. "
            f"Received {lines[0] if lines else ''!r}. Write it with `plan.to_text()`."
        )
    value: dict[str, Any] = {}
    for number, line in enumerate(lines[1:], start=1):
        key, colon, rest = line.partition(":")
        if not colon:
            raise PlanError(
                f"Line {number + 1} of the plan is 'name: value' or follows 'ticks:'; "
                f"received {line!r}."
            )
        value[key.strip()] = rest.strip()
        if key.strip() == "ticks":
            value["ticks"] = _read_ticks(lines[number + 1 :], rest.strip(), number + 2)
            break
    # The text has JSON after these names: lists of lists need no notation of their own.
    for key in ("microbatches", "devices", "names"):
        if key in value:
            value[key] = _value(value[key], key)
    if "training" in value:
        # Anything else is left for `_fields` to refuse, in the words of the file.
        value["training"] = {"yes": True, "no": False}.get(value["training"], value["training"])
    return _fields(value)


def _value(text: str, key: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise PlanError(f"The plan's {key!r} cannot be read: {text!r} ({error}).") from error


def _read_ticks(lines: list[str], count: str, first: int) -> list[list[tuple[Any, ...]]]:
    # A truncated plan is a valid, shorter plan: only the count shows it.
    if count != str(len(lines)):
        raise PlanError(
            f"The plan says 'ticks: {count}', and {len(lines)} lines follow, one for each tick. "
            "Lines may have been lost; correct the number if they were not."
        )
    return [_read_tick(line, first + i) for i, line in enumerate(lines)]


def _read_tick(line: str, number: int) -> list[tuple[Any, ...]]:
    units: list[tuple[Any, ...]] = []
    for word in line.split() if line.strip() != "-" else ():
        match = _UNIT.fullmatch(word)
        if match is None:
            raise PlanError(
                "A unit is written F1.3@2 (forward of microbatch 3 at stage 1 on device 2; B for "
                f"backward). Line {number} of the plan has {word!r}."
            )
        kind, stage, microbatch, device = match.groups()
        units.append((int(device), kind, int(stage), int(microbatch)))
    return units


def _fields(value: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Plan` from the parsed fields, or an error for missing ones."""
    # Required, without defaults: a plan that says less than it means would be read as another plan.
    missing = [key for key in _FIELDS if key not in value]
    if missing:
        raise PlanError(f"The plan does not say its {', '.join(missing)}; it needs all of these.")
    if not isinstance(value["training"], bool):
        raise PlanError(
            "The plan's 'training' is true or false (yes or no in text); "
            f"received {value['training']!r}."
        )
    names = value.get("names", ())
    for key, held in (("devices", value["devices"]), ("names", names)):
        if not isinstance(held, list | tuple):
            raise PlanError(
                f"The plan's {key!r} is a list, one entry per stage; received {held!r}."
            )
    return {
        "microbatches": value["microbatches"],
        "schedule": PipelineSchedule.parse(value["schedule"]),
        "device_mapping": _tuples(value["devices"]),
        "training": value["training"],
        "names": _tuples(names),
        "ticks": value.get("ticks"),
    }


def _tuples(value: object) -> Any:
    """Lists as tuples, one level down too: JSON has no tuples, and a plan must be hashable."""
    if not is_group(value):
        return value
    return tuple(tuple(each) if is_group(each) else each for each in value)
