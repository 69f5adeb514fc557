"""The sections of a report; those without data are left out."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from tailrace.base.messages import shown
from tailrace.page.curves import SPEED, history_curves
from tailrace.page.findings.findings import findings
from tailrace.page.findings.ratios import ratios
from tailrace.page.followed import FollowedRun
from tailrace.page.layers import LayerMap, layer_map
from tailrace.page.report.charts import curve_svg, map_svg
from tailrace.page.summary import TIME, Rows, number, numbers, time_rows, what_ran
from tailrace.runs.profiles import read_profile

MOST_ROWS = 400
"""The most rows of the table of tensors; the rest is counted."""

MAPS = {
    "Gradients: root mean square": ("rms", "grad/*"),
    "Activations: root mean square": ("rms", "activation/*"),
    "Activations: share of zeros": ("zero", "activation/*"),
    "Updates: root mean square": ("rms", "update/*"),
    "Where NaN and Inf are": ("nonfinite", "*"),
}
"""The heat maps, drawn if the run has such records."""


def sections(followed: FollowedRun) -> Iterator[tuple[str, str]]:
    """The heading and HTML of each section that the run has data for."""
    yield "Numbers", _table(numbers(followed))
    yield "Findings", _findings(followed)
    if rows := time_rows(followed):
        yield TIME, _table(rows)
    curves = history_curves(followed)
    for name, curve in curves.items():
        if len(curve.steps):
            heading = "Speed, steps a second" if name == SPEED else shown(name).capitalize()
            yield heading, f"<figure>{curve_svg(curve, name)}</figure>"
    for heading, (measure, select) in MAPS.items():
        layers = layer_map(followed, measure, select)
        if measure == "nonfinite":  # only rows with a mark: the others would be blank
            layers = layers.only(np.nansum(layers.values, axis=1) > 0)
        if layers.names:
            yield heading, f"<figure>{map_svg(layers)}</figure>"
    if table := _tensors(followed):
        yield "Tensors, in the last quarter of the run", table
    if (profile := read_profile(followed.directory)) is not None:
        whole = f"{profile._repr_html_()}<figure>{profile.treemap()}</figure>"
        yield "Time by scope", f'<div class="profile">{whole}</div>'
    if (plan := followed.readable().plan) is not None:
        yield "Pipeline", f'<figure class="plan">{plan.draw(format="svg")}</figure>'
    for heading, rows in what_ran(followed).items():
        yield heading, _table(rows)


def _findings(followed: FollowedRun) -> str:
    items = "".join(
        f'<li class="{one.severity}"><b>{escape(one.topic)}</b> {escape(shown(one.text))}</li>'
        for one in findings(followed)
    )
    return f'<ul class="findings">{items}</ul>' if items else "<p>None in what was recorded.</p>"


def _table(rows: Rows) -> str:
    cells = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{cells}</table>"


def _tensors(followed: FollowedRun) -> str:
    """Rms, share of zeros, NaN and update to weight ratio of each tensor."""
    maps = {measure: layer_map(followed, measure) for measure in ("rms", "zero", "nonfinite")}
    late = {measure: _late(maps[measure]) for measure in ("rms", "zero")}
    bad = dict(
        zip(maps["nonfinite"].names, np.nansum(maps["nonfinite"].values, axis=1), strict=True)
    )
    moves = ratios(maps["rms"])
    # A row for each tensor that any of the three measures knows.
    names = list(dict.fromkeys(name for one in maps.values() for name in one.names))
    if not names:
        return ""
    columns: dict[str, dict[str, str]] = {
        "rms": {name: number(value) for name, value in late["rms"].items()},
        "zeros": {name: f"{100 * value:.1f} %" for name, value in late["zero"].items()},
        "NaN, Inf (all steps)": {name: f"{count:,.0f}" for name, count in bad.items() if count},
        "update / weight": {f"update/{name}": number(value) for name, value in moves.items()},
    }
    columns = {title: cells for title, cells in columns.items() if cells}
    rows = "".join(
        f"<tr><th>{escape(shown(name))}</th>"
        + "".join(f"<td>{cells.get(name, '')}</td>" for cells in columns.values())
        + "</tr>"
        for name in names[:MOST_ROWS]
    )
    head = "".join(f"<th>{title}</th>" for title in ("tensor", *columns))
    more = len(names) - MOST_ROWS
    rest = f"<p>{more:,} more tensors were recorded.</p>" if more > 0 else ""
    return f'<table class="numbers"><thead><tr>{head}</tr></thead>{rows}</table>{rest}'


def _late(layers: LayerMap) -> dict[str, float]:
    pairs = zip(layers.names, layers.late(), strict=True)
    return {name: float(value) for name, value in pairs if np.isfinite(value)}
