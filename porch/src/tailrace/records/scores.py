"""Robust scores: how far values are from the others, in units that outliers do not stretch."""

from __future__ import annotations

from typing import Any

import numpy as np

TO_DEVIATIONS = 1.4826
"""The median of absolute deviations of normal values, times this, is their standard deviation."""

LEAST = 1e-3
"""The smallest spread that counts, as a part of the median: equal values have no outliers."""


def robust_scores(values: Any, among: Any = None) -> np.ndarray:
    """How many standard deviations each value is above the median; infinite where it is not finite.

    Args:
        values: numbers.
        among: what they are compared with; None: with each other.

    >>> scores = robust_scores([1.0, 1.1, 0.9, 1.05, 9.0])
    >>> int(scores.argmax()), bool(scores[4] > 10), bool(scores[:4].max() < 3)
    (4, True, True)
    """
    values = np.asarray(values, np.float64)
    others = values if among is None else np.asarray(among, np.float64)
    others = others[np.isfinite(others)]
    if not others.size:
        return np.where(np.isfinite(values), 0.0, np.inf)
    middle = np.median(others)
    spread = TO_DEVIATIONS * np.median(np.abs(others - middle))
    spread = max(spread, LEAST * abs(middle), np.finfo(np.float32).tiny)
    return np.where(np.isfinite(values), (values - middle) / spread, np.inf)
