"""A curve in braille characters, each with two columns and four rows of dots."""

from __future__ import annotations

import numpy as np

from tailrace.page.summary import number

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a braille character, by column, from the top."""
_BLANK = 0x2800


def chart(steps: np.ndarray, values: np.ndarray, width: int = 72, height: int = 10) -> list[str]:
    """Lines of a chart with its axes; values that are not finite leave a gap.

    Args:
        steps: the step of each value, in order.
        values: the values.
        width: the characters per line, including labels.
        height: the lines, without those of the horizontal axis.

    >>> lines = chart(np.arange(50), np.arange(50.0), width=24, height=3)
    >>> len(lines), lines[0].split()[0], lines[-1].split()
    (5, '49', ['0', '49'])
    """
    good = np.isfinite(values)
    if not good.any():
        return ["(no finite values)"]
    low, high = float(values[good].min()), float(values[good].max())
    labels = [number(high, 3), *[""] * (height - 2), number(low, 3)]
    margin = max(map(len, labels)) + 2
    columns = max(4, width - margin - 3)  # the axis and its spaces take three
    rows = _drawn(_resampled(values, 2 * columns), low, high, columns, height)
    lines = [
        f"{label:>{margin}} {'┤' if label else '│'}{row}"
        for label, row in zip(labels, rows, strict=True)
    ]
    first, last = str(int(steps[0])), str(int(steps[-1]))
    lines.append(f"{'':{margin}} └{'─' * columns}")
    lines.append(f"{'':{margin}}  {first}{last:>{max(1, columns - len(first))}}")
    return lines


def _resampled(values: np.ndarray, count: int) -> np.ndarray:
    """The mean of the finite values in each of `count` parts; the nearest value if there are few."""
    if len(values) <= count:
        # Repeated, not interpolated: a picture must not show values that were never there.
        return values[np.linspace(0, len(values) - 1, count).round().astype(int)]
    out = np.full(count, np.nan)
    for place, part in enumerate(np.array_split(values, count)):
        part = part[np.isfinite(part)]
        if len(part):
            out[place] = part.mean()
    return out


def _drawn(values: np.ndarray, low: float, high: float, columns: int, height: int) -> list[str]:
    top = 4 * height - 1
    scale = top / (high - low) if high > low else 0.0
    cells = np.full((height, columns), _BLANK)
    before: int | None = None
    for x, value in enumerate(values):
        if not np.isfinite(value):
            before = None
            continue
        y = top - round((value - low) * scale) if scale else top // 2
        # All dots from the previous one on: a steep part would otherwise have gaps.
        start = y if before is None else before + (y > before) - (y < before)
        for dot in range(min(start, y), max(start, y) + 1):
            cells[dot // 4, x // 2] |= _DOTS[x % 2][dot % 4]
        before = y
    return ["".join(map(chr, row)) for row in cells]
