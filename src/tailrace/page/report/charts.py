"""Charts as SVG: curves with their range, and heat maps of layers over steps."""

from __future__ import annotations

from html import escape

import numpy as np

from tailrace.base.messages import shown
from tailrace.page.colours import BAD, NOTHING, SCALE, palette, shades, span
from tailrace.page.curves import Curve
from tailrace.page.layers import LayerMap, without_gaps
from tailrace.page.report.png import data_address
from tailrace.page.summary import number

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 200, 64, 24
MOST_LABELS = 60
"""The most rows of a heat map that all have labels."""
ROW, LABELS = 14, 240
"""The height of a row with a label, and the width of labels."""


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers between two others.

    >>> ticks(0.0, 10.0), ticks(0.13, 0.42)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.2, 0.3, 0.4])
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** np.floor(np.log10(rough))
    # A step slightly below the rough one is better than the next one, which is at least twice as long.
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.75 * rough)
    # The tolerance keeps ticks at the ends in spite of rounding; + 0.0 turns -0.0 into 0.0.
    first = np.ceil(low / step - 1e-9)
    return [
        float(f"{k * step:.12g}") + 0.0 for k in np.arange(first, np.floor(high / step + 1e-9) + 1)
    ]


def curve_svg(drawn: Curve, title: str) -> str:
    """A curve over steps; if several steps share a point, their range is shaded."""
    good = np.isfinite(drawn.mean)
    if not good.any():
        return "<p>There are no finite values.</p>"
    low, high = float(np.nanmin(drawn.low)), float(np.nanmax(drawn.high))
    # A constant curve is a line in the middle.
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    first, last = float(drawn.steps[0]), float(max(drawn.steps[-1], drawn.steps[0] + 1))

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - 12)

    def y(value: float) -> float:
        return 10 + (high - value) / (high - low) * (HEIGHT - BOTTOM - 20)

    parts = [
        f'<path class="grid" d="M{LEFT} {y(t):.1f}H{WIDTH - 12}"/>'
        f'<text x="{LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{number(t)}</text>'
        for t in ticks(low, high)
    ]
    parts += [
        f'<text x="{x(t):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{int(t):,}</text>'
        for t in ticks(first, last, 6)
        if t == int(t)  # there are no half steps
    ]
    for run in _stretches(good):
        xs = [x(s) for s in drawn.steps[run]]
        upper = [f"{a:.1f} {y(v):.1f}" for a, v in zip(xs, drawn.high[run], strict=True)]
        lower = [f"{a:.1f} {y(v):.1f}" for a, v in zip(xs, drawn.low[run], strict=True)]
        middle = [f"{a:.1f} {y(v):.1f}" for a, v in zip(xs, drawn.mean[run], strict=True)]
        if not drawn.is_exact:
            parts.append(f'<path class="band" d="M{"L".join(upper)}L{"L".join(lower[::-1])}Z"/>')
        # A path with a single point draws nothing, so the point is repeated.
        parts.append(
            f'<path class="line" d="M{"L".join(middle if len(middle) > 1 else middle * 2)}"/>'
        )
    return _svg(WIDTH, HEIGHT, title, parts)


def _stretches(good: np.ndarray) -> list[slice]:
    """The ranges without a gap."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], good.astype(np.int8), [0]])))
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def map_svg(layers: LayerMap) -> str:
    """A heat map of layers over steps with its scale."""
    log = layers.measure == "rms"
    low, high = (0.0, 1.0) if layers.measure == "zero" else span(layers.values, log)
    rows, marks = len(layers.names), layers.measure == "nonfinite"
    # Many rows share the height of those that have labels: the picture does not grow further.
    each = ROW if rows <= MOST_LABELS else MOST_LABELS * ROW / rows
    height, wide = rows * each, WIDTH - LABELS
    if marks:
        places = np.where(np.nan_to_num(layers.values) > 0, BAD, NOTHING).astype(np.uint8)
    else:
        places = shades(without_gaps(layers.values), low, high, log)
    # One image with a pixel per cell: a rectangle for each would be megabytes of SVG.
    image = data_address(places, palette())
    parts = [
        f'<rect class="quiet" x="{LABELS}" width="{wide}" height="{height:.1f}"/>' if marks else "",
        f'<image href="{image}" x="{LABELS}" y="0" width="{wide}" height="{height:.1f}" '
        f'preserveAspectRatio="none" style="image-rendering:pixelated"/>',
    ]
    every = max(1, -(-rows // MOST_LABELS))
    parts += [
        f'<text x="{LABELS - 8}" y="{(i + 0.5) * each + 4:.1f}" text-anchor="end">'
        f"{escape(_short(name))}</text>"
        for i, name in enumerate(layers.names)
        if i % every == 0
    ]
    first, last = float(layers.steps[0]), float(layers.steps[-1] + layers.width)
    parts += [
        f'<text x="{LABELS + (t - first) / (last - first) * wide:.1f}" y="{height + 16:.1f}" '
        f'text-anchor="middle">{int(t):,}</text>'
        for t in ticks(first, last, 5)
        if t == int(t) and t < last
    ]
    if not marks:
        parts.append(_scale(low, high, height + 30))
    return _svg(WIDTH, height + (24 if marks else 58), layers.title, parts)


def _scale(low: float, high: float, top: float) -> str:
    each = 20
    boxes = "".join(
        f'<rect x="{LABELS + i * each}" y="{top:.1f}" width="{each}" height="8" fill="{colour}"/>'
        for i, colour in enumerate(SCALE)
    )
    end = LABELS + len(SCALE) * each
    return (
        f'{boxes}<text x="{LABELS}" y="{top + 22:.1f}">{number(low)}</text>'
        f'<text x="{end}" y="{top + 22:.1f}" text-anchor="end">{number(high)}</text>'
    )


def _short(name: str, most: int = 36) -> str:
    name = shown(name)
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-most // 2 :]}"


def _svg(width: float, height: float, title: str, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(shown(title))}">'
        f"{''.join(parts)}</svg>"
    )
