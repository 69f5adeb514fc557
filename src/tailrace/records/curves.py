"""A small curve for a notebook: a number over steps."""

from __future__ import annotations

import numpy as np

MOST_POINTS = 200
"""The most points; further steps share a point, their mean."""


def small_curve(values: np.ndarray, width: int = 240, height: int = 48) -> str:
    """Values as an SVG line; steps whose value is not finite leave a gap, with a red mark below.

    >>> small_curve(np.array([2.0, 1.0, 3.0])).count("polyline")
    1
    """
    # A mean, not a sample: one bad step among thousands still leaves a mark, because its mean is
    # not finite.
    points = [part for part in np.array_split(values, min(MOST_POINTS, len(values))) if len(part)]
    ys = np.array([part.mean() for part in points], np.float64)
    good = np.isfinite(ys)
    low, high = (ys[good].min(), ys[good].max()) if good.any() else (0.0, 0.0)
    xs = np.linspace(2, width - 2, len(ys)) if len(ys) > 1 else np.array([width / 2])
    with np.errstate(invalid="ignore"):
        # A constant has no range: it is drawn in the middle.
        tall = (ys - low) / (high - low) if high > low else np.where(good, 0.5, np.nan)
    lines, line = [], []
    for x, y in zip(xs, tall, strict=False):
        if np.isfinite(y):
            line.append(f"{x:.1f},{2 + (height - 4) * (1 - y):.1f}")
        elif line:
            lines.append(line)
            line = []
    drawn = "".join(
        # A line needs two points: a single value between gaps is drawn twice, as a dot.
        f'<polyline points="{" ".join(line if len(line) > 1 else line * 2)}" fill="none" '
        f'stroke="#1b6ca8" stroke-width="1.5" stroke-linecap="round"/>'
        for line in [*lines, line]
        if line
    )
    marks = "".join(
        f'<rect x="{x - 1:.1f}" y="{height - 4}" width="2" height="4" fill="#d62728"/>'
        for x in xs[: len(ys)][~good]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'role="img">{drawn}{marks}</svg>'
    )
