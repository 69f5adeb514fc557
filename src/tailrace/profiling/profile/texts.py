"""A profile as text: a table by cost, a tree, HTML."""

from __future__ import annotations

from html import escape

from tailrace.base.messages import shown
from tailrace.profiling.profile.measurement import Measurement, Row
from tailrace.profiling.profile.quantities import count_text, time_text

_HEAD = ("phase", "scope", "time a step", "share", "FLOP a step", "bytes a step", "of roofline")
_SHOWN = 30
"""The most rows of a table; the rest is summarized in one line."""


def as_text(profile: Measurement) -> str:
    """The table, most expensive first, and the owners of peak memory."""
    rows = [_HEAD, *(_cells(row, profile) for row in profile.rows[:_SHOWN])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = [_first_line(profile)]
    for row in rows:
        left = [cell.ljust(w) for cell, w in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(w) for cell, w in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join([*left, *right]).rstrip())
    if len(profile.rows) > _SHOWN:
        rest = sum(row.seconds for row in profile.rows[_SHOWN:])
        share = rest / max(profile.seconds, 1e-30)
        lines.append(f"... and {len(profile.rows) - _SHOWN} more with {share:.1%} of the time")
    if profile.pipeline is not None:
        lines += ["", str(profile.pipeline)]
    if profile.memory:
        lines += ["", "memory at its peak: " + _memory(profile)]
    return "\n".join(lines)


def as_html(profile: Measurement) -> str:
    """The same as an HTML table with bars."""
    longest = max((row.seconds for row in profile.rows), default=0.0) or 1.0
    head = "".join(f"<th>{cell}</th>" for cell in _HEAD)
    body = []
    for row in profile.rows[:_SHOWN]:
        cells = [escape(cell) for cell in _cells(row, profile)]
        # A translucent bar: notebooks have light and dark backgrounds.
        bar = f"background:linear-gradient(90deg,#8884 {row.seconds / longest:.1%},transparent 0)"
        texts = "".join(f'<td style="text-align:right">{cell}</td>' for cell in cells[2:])
        body.append(f'<tr><td>{cells[0]}</td><td style="{bar}">{cells[1]}</td>{texts}</tr>')
    memory = f"<p>memory at its peak: {escape(_memory(profile))}</p>" if profile.memory else ""
    if profile.pipeline is not None:
        sentence, _, table = str(profile.pipeline).partition("\n")
        said = "The units of the grid, each with its time relative to the mean of such units:"
        grid = escape(profile.pipeline.grid())
        memory += (
            f"<p>{escape(sentence)}</p><pre>{escape(table)}</pre><p>{said}</p><pre>{grid}</pre>"
        )
    return (
        f"<p>{escape(_first_line(profile))}</p><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>{memory}"
    )


def as_tree(profile: Measurement) -> str:
    """Phases and the scopes in them, each with its total time."""
    totals: dict[tuple[str, ...], float] = {}
    for row in profile.rows:
        path = (row.phase, *filter(None, row.scope.split("/")))
        for depth in range(1, len(path) + 1):
            totals[path[:depth]] = totals.get(path[:depth], 0.0) + row.seconds

    def key(path: tuple[str, ...]) -> list[tuple[float, str]]:
        # By the totals of all parents first, so that scopes follow their parent.
        return [(-totals[path[:depth]], path[depth - 1]) for depth in range(1, len(path) + 1)]

    whole = max(profile.seconds, 1e-30)
    return "\n".join(
        f"{totals[path] / whole:6.1%}  {'  ' * (len(path) - 1)}{shown(path[-1])}"
        for path in sorted(totals, key=key)
    )


def _first_line(profile: Measurement) -> str:
    wall = profile.wall_s / max(profile.steps, 1)
    return (
        f"{profile.steps} steps in {profile.executions} executions on {profile.device}: "
        f"{time_text(wall)} a step; {profile.named:.1%} of the operations' time has a scope or phase"
    )


def _cells(row: Row, profile: Measurement) -> tuple[str, ...]:
    steps = max(profile.steps, 1)
    return (
        row.phase,
        shown(row.scope) or "-",
        time_text(row.seconds / steps),
        f"{row.seconds / max(profile.seconds, 1e-30):.1%}",
        f"{count_text(row.flops / steps)}FLOP",
        f"{count_text(row.bytes / steps)}B",
        "" if row.roofline is None else f"{row.roofline:.1%}",
    )


def _memory(profile: Measurement) -> str:
    parts = [f"{shown(name)} {count_text(size)}B" for name, size in profile.memory.items()]
    most = 8
    rest = sum(list(profile.memory.values())[most:])
    return ", ".join(parts[:most] + ([f"others {count_text(rest)}B"] if rest else []))
