"""The description of a run in rows of label and text, for the terminal, the report and the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tailrace.base.messages import shown
from tailrace.page.curves import trained
from tailrace.page.followed import FollowedRun
from tailrace.page.time_spent import DEVICE, time_spent

MOST_CHARACTERS = 300
"""The most characters of a text from a file."""

OWN = (
    *("devices", "options", "taps", "versions", "catalogue", "use_order"),
    *("plan", "format", "run", "created"),
)
"""Entries of run.json that have a row of their own, or none; others are shown as they are."""

TIME = "Where the time went"
"""The heading of `time_rows`."""

WAITS = {
    "device": "the device computes",
    "data": "it waits for data",
    "compilation": "it waits for the compiler",
    "validation": "it waits for validation",
    "callbacks": "it waits for callbacks",
    "checkpoints": "it waits for checkpoints",
    "host": "it waits for the rest of the host",
}
"""The label of each activity of a fit."""

Rows = list[tuple[str, str]]


def number(value: float | None, digits: int = 4) -> str:
    """A number as readable text.

    >>> number(0.000123456), number(1234567.0), number(float("nan")), number(None)
    ('0.0001235', '1.235e+06', 'nan', '')
    """
    return "" if value is None else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """A duration as readable text.

    >>> duration(0.25), duration(75), duration(3700)
    ('0.2 s', '1 min 15 s', '1 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def state(followed: FollowedRun) -> str:
    """The state of a run, in a few words."""
    run = followed.run
    if run is None:
        return "unreadable"
    if run.nonfinite_reports:  # tr.stop_on_nonfinite ended it
        return "stopped"
    return run.state


def numbers(followed: FollowedRun) -> Rows:
    """The progress and speed of a run, and the last value of each metric."""
    run = followed.readable()
    history = run.history
    rows = [("state", state(followed)), ("steps", f"{len(history):,}")]
    steps, seconds = trained(followed)
    if seconds > 0:
        rows.append(("speed", f"{number(steps / seconds)} steps/s"))
        rows.append(("time", f"{duration(seconds)} after the first execution of each fit"))
    if bound := _bound_by(followed):
        rows.append(("bound by", bound))
    for name, last in history.last().items():
        # With the first value: a loss says something only by how far it has come.
        first = float(history[name][0])
        when = "first step" if name in history.step_names else "first validation"
        rows.append((_text(name), f"{number(last)} ({when}: {number(first)})"))
    return rows


def time_rows(followed: FollowedRun) -> Rows:
    """The time of each activity after the start of a fit, and what would be won without it."""
    spent = time_spent(followed)
    if spent is None:
        return []
    rows: Rows = []
    for name, seconds in sorted(spent.later.items(), key=lambda item: -item[1]):
        if (share := spent.share(name)) < 0.0005:
            continue
        text = f"{duration(seconds)}, {100 * share:.1f} %"
        if name != DEVICE and (won := spent.speedup(name)) >= 1.02:
            text += f"; without it {won:.2f} times as fast"
        rows.append((WAITS[name], text))
    if (start := sum(spent.start.values())) > 0:
        compiling = duration(spent.start["compilation"])
        rows.append(
            (
                "before: the first execution of each fit",
                f"{duration(start)}, of which the compiler {compiling}",
            )
        )
    return rows


def _bound_by(followed: FollowedRun) -> str:
    """What a run is bound by, in a few words; empty if that is not known."""
    spent = time_spent(followed)
    if spent is None or not spent.seconds:
        return ""
    share = f"{100 * spent.share(spent.limit):.0f} % of the time"
    if spent.limit == DEVICE:
        return f"the device: it computes {share}"
    return f"{spent.limit}: the device waits for it {share}"


def what_ran(followed: FollowedRun) -> dict[str, Rows]:
    """Program, devices, options, taps and versions of a run, by heading."""
    info = followed.readable().info
    program: Rows = [("directory", _text(str(followed.directory)))]
    program.append(("began", _text(info.get("created", "unknown"))))
    program.append(("devices", _devices(info.get("devices"))))
    program.append(("tensors", f"{len(followed.catalogue):,} in a step"))
    if (plan := followed.readable().plan) is not None:
        program.append(
            (
                "pipeline",
                f"{plan.stages} stages, {plan.microbatches} microbatches, {plan.schedule}, bubble "
                f"{100 * plan.bubble:.1f} %",
            )
        )
    found = {"Program": program, "Options": _mapping(info.get("options"))}
    found["Taps"] = [
        (_text(tap.get("select")), f"{_text(tap.get('reduce'))}, {_text(tap.get('mode'))}")
        for tap in info.get("taps") or []
        if isinstance(tap, Mapping)
    ]
    for name, value in info.items():
        if name not in OWN and value not in (None, {}, []):
            rows = _mapping(value) if isinstance(value, Mapping) else [(_text(name), _text(value))]
            found[_text(name).capitalize()] = rows
    found["Compilations"] = [
        (_text(row["purpose"]), f"{_text(row['cause'])}, {_compile_time(row)}")
        for row in followed.readable().compilations
    ]
    found["Versions"] = _mapping(info.get("versions"))
    return {title: rows for title, rows in found.items() if rows}


def _compile_time(row: Mapping[str, Any]) -> str:
    return "shared" if row["shared"] else duration(row["seconds"])


def _devices(devices: object) -> str:
    if not isinstance(devices, list) or not devices:
        return "unknown"
    kinds: dict[str, int] = {}
    for device in devices:
        kind = _text(device.get("kind", "unknown")) if isinstance(device, Mapping) else "unknown"
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _mapping(value: object) -> Rows:
    items = value.items() if isinstance(value, Mapping) else ()
    return [(_text(name), _text(inner)) for name, inner in items]


def _text(value: object) -> str:
    """A text from a file, safe to print and of limited length."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    # A run may come from someone else: control characters could rewrite the terminal.
    return shown(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…")
