"""The colours of heat maps: one scale, for the report and for the page."""

from __future__ import annotations

import numpy as np

SCALE = (
    "#0b0405",
    "#28192f",
    "#3b2f5e",
    "#40498e",
    "#366a9f",
    "#348ba6",
    "#38aaac",
    "#54c9ad",
    "#a0dfb9",
    "#def5e5",
)
"""From low to high, in equal steps of lightness: readable in grey and by the colour-blind."""

NONFINITE = "#e5484d"
"""The colour of NaN and Inf, which are outside of the scale."""

BAD, NOTHING = 254, 255
"""The palette indices of NaN and Inf, and of missing values."""


def palette() -> np.ndarray:
    """256 colours, [256, 3]: the scale in 254 shades, then NaN and Inf, then nothing (white)."""
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in SCALE], np.float64)
    at = np.linspace(0, len(stops) - 1, 254)
    shades = np.stack([np.interp(at, np.arange(len(stops)), stops[:, c]) for c in range(3)], axis=1)
    bad = [int(NONFINITE[i : i + 2], 16) for i in (1, 3, 5)]
    return np.vstack([shades, [bad], [[255, 255, 255]]]).round().astype(np.uint8)


def span(values: np.ndarray, log: bool) -> tuple[float, float]:
    """The limits of a scale for some values: whole decades if it is logarithmic.

    >>> span(np.array([0.002, 5.0]), log=True)
    (0.001, 10.0)
    """
    good = values[np.isfinite(values) & ((values > 0) if log else True)]
    if not len(good):
        return (1e-3, 1.0) if log else (0.0, 1.0)
    low, high = float(good.min()), float(good.max())
    if log:
        low, high = 10.0 ** np.floor(np.log10(low)), 10.0 ** np.ceil(np.log10(high))
        return float(low), float(high if high > low else low * 10)
    return low, high if high > low else low + 1.0


def shades(values: np.ndarray, low: float, high: float, log: bool) -> np.ndarray:
    """The palette index of each value; zeros of a logarithmic scale get the darkest."""
    with np.errstate(invalid="ignore", divide="ignore"):
        if log:
            values = np.where(values > 0, values, np.where(values == 0, low, np.nan))
            share = np.log(values / low) / np.log(high / low)
        else:
            share = (values - low) / (high - low)
    # The last two of the 256 indices are `BAD` and `NOTHING`.
    places = np.clip(np.nan_to_num(share) * 253, 0, 253).round().astype(np.uint8)
    return np.where(np.isfinite(share), places, NOTHING).astype(np.uint8)
