"""Statistics of a tensor from those of its rows, on the host."""

from __future__ import annotations

import numpy as np

from tailrace.taps.reductions import LIMITS, STATS, row_lengths


def merge_statistics(partial: np.ndarray, size: int) -> np.ndarray:
    """Statistics of a tensor of `size` values, from its rows: [..., rows, 8] to [...]."""
    # Make each quantity contiguous: the sums below would otherwise stride over every eighth number.
    parts = np.ascontiguousarray(np.moveaxis(partial, -1, 0)).astype(np.float64)
    _, _, low, high, nan, inf, zero, _ = parts
    # All of this in float64: sums over many rows would lose digits in float32.
    count = row_lengths(size).astype(np.float64) - nan - inf
    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        total, squares, shift, unit = _in_units(parts, partial.dtype.itemsize)
        mean = shift + np.where(count > 0, total / count, 0)
        spread = np.maximum(squares - np.where(count > 0, total**2 / count, 0), 0)
        whole = count.sum(-1)
        overall = (mean * count).sum(-1) / whole
        between = (count * (mean - overall[..., None]) ** 2).sum(-1)
        variance = (spread.sum(-1) + between) / whole
        out = np.empty(overall.shape, STATS)
        out["mean"], out["std"] = overall / unit, np.sqrt(variance) / unit
        out["min"] = np.where(whole > 0, low.min(-1, initial=np.inf), np.nan)
        out["max"] = np.where(whole > 0, high.max(-1, initial=-np.inf), np.nan)
        out["nan"], out["inf"] = nan.sum(-1), inf.sum(-1)
        out["zero"] = zero.sum(-1) / max(size, 1)
    return out


def _in_units(
    parts: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | float]:
    """Sums, sums of squares and shifts of rows in a unit of their tensor, and that unit.

    Rows at the ends of the range were scaled on the device. In float64 every sum of float32 has its
    place; those of float64 do not, so each tensor is measured by its largest value.
    """
    total, squares, low, high, *_, shift = parts
    limits, ratio, unit = LIMITS[width], 1.0, 1.0
    size = np.where(low <= high, np.maximum(np.abs(low), np.abs(high)), 0)
    if width == 8:
        exponent = np.frexp(size.max(-1, initial=0))[1]
        unit = np.ldexp(1.0, np.clip(-exponent, -1000, 1000))
        shift, ratio = shift * unit[..., None], unit[..., None]
    if (squares < 0).any():
        ratio = ratio / np.where(squares < 0, np.where(size < 1, limits.up, limits.down), 1.0)
    elif width == 4:
        return total, squares, shift, unit
    return total * ratio, np.abs(squares) * ratio * ratio, shift, unit
