"""Robust scores: distances from the median, in units that outliers do not inflate."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from tailrace.base.trees import Tree

TO_DEVIATIONS = 1.4826
"""The median of absolute deviations of normal values, times this, is their standard deviation."""

LEAST = 1e-3
"""The smallest spread that counts, as a fraction of the median: equal values have no outliers."""

SPIKE_SCORE, SPIKE_WINDOW, SPIKE_LEAST = 8.0, 100, 20
"""A spike: the smallest score, the number of values before it to compare with, and the fewest of them.
The defaults of `tr.on_spike`."""

_AT_ONCE = 4096
"""The number of windows to compare at a time, which limits memory."""


def robust_scores(
    values: Tree, among: npt.ArrayLike | None = None, least: float = 0.0
) -> np.ndarray:
    """The distance of each value above the median, in deviations; infinite if it is not finite.

    Args:
        values: numbers.
        among: the values to compare them with; None for each other.
        least: the smallest spread that counts. Logarithms need one: the median of those of ones is 0.

    >>> scores = robust_scores([1.0, 1.1, 0.9, 1.05, 9.0])
    >>> int(scores.argmax()), bool(scores[4] > 10), bool(scores[:4].max() < 3)
    (4, True, True)
    """
    values = np.asarray(values, np.float64)
    others = values if among is None else np.asarray(among, np.float64)
    others = others[np.isfinite(others)]
    if not others.size:
        return np.where(np.isfinite(values), 0.0, np.inf)
    return np.where(np.isfinite(values), _deviations(values, others, least), np.inf)


def moving_scores(values: Tree, before: npt.ArrayLike, window: int, least: int) -> np.ndarray:
    """The score of each value among the values before it.

    Args:
        values: numbers.
        before: the values before the first of them.
        window: the number of previous values to compare with.
        least: with fewer previous values, a value scores 0.

    >>> moving_scores([1.0, 9.0, 1.1], [1.0, 1.1, 0.9, 1.05], window=4, least=4).round(1).tolist()
    [-0.3, 107.6, 0.7]
    """
    row = np.asarray(values, np.float64)
    line = np.concatenate([np.asarray(before, np.float64), row])
    first, scores = len(line) - len(row), np.zeros(len(row))
    whole = min(len(row), max(0, window - first))  # from here on windows are full
    if not np.isfinite(line).all():
        # A window with a NaN is compared without it, so windows differ in length: one by one.
        whole = len(row)
    for n in range(whole):
        others = line[max(0, first + n - window) : first + n]
        if len(others) >= least:
            (scores[n],) = robust_scores([row[n]], among=others)
    for start in range(whole, len(row), _AT_ONCE):  # all at once: a tenth of the time
        end = min(len(row), start + _AT_ONCE)
        near = sliding_window_view(line[first + start - window : first + end - 1], window)
        scores[start:end] = _deviations(row[start:end], near)
    return scores if window >= least else np.zeros(len(row))


def _deviations(values: np.ndarray, others: np.ndarray, least: float = 0.0) -> np.ndarray:
    """Distances above the median of others, in deviations; a row of others each, or one."""
    middle = np.median(others, axis=-1)
    spread = TO_DEVIATIONS * np.median(np.abs(others - middle[..., None]), axis=-1)
    least = max(least, float(np.finfo(np.float32).tiny))
    # Never zero: a loss that was constant for a hundred steps would make any change infinitely far.
    spread = np.maximum(np.maximum(spread, LEAST * np.abs(middle)), least)
    return (values - middle) / spread
