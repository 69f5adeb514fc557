"""Sums of values by step, in a bounded number of columns, however long a run is."""

from __future__ import annotations

import numpy as np

MOST_COLUMNS = 512
"""The most columns; of a longer run, several steps share a column."""


def column_width(steps: int, most: int = MOST_COLUMNS) -> int:
    """The number of steps per column: a power of two, so that columns can be joined later.

    >>> column_width(100), column_width(513), column_width(100_000)
    (1, 2, 256)
    """
    width = 1
    while -(-steps // width) > most:
        width *= 2
    return width


class StepColumns:
    """Sums and counts of values by step; rows are added as they arrive.

    Args:
        first: the index of the first step.
        shape: the shape of a value.

    Attributes:
        width: the number of steps per column.

    >>> columns = StepColumns(0, ())
    >>> columns.add(np.arange(1000), np.ones(1000))
    >>> columns.width, columns.total[:2], columns.mean()[:2]
    (2, array([2., 2.]), array([1., 1.]))
    """

    def __init__(self, first: int, shape: tuple[int, ...]) -> None:
        self.first, self.width = first, 1
        self.total = np.zeros((0, *shape))
        self.count = np.zeros((0, *shape), np.int64)
        self._last, self._gaps = -1, np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.total)

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Add a value for each step; values that are not finite are ignored."""
        inside = steps >= self.first
        if not inside.all():
            steps, values = steps[inside], values[inside]
        if not len(steps):
            return
        self._reach(int(steps.max()))
        where = (steps - self.first) // self.width
        # Rows of one column are neighbours and summed first, since `np.add.at` is slow. It is needed
        # because a resumed run may come back to an earlier column.
        starts = np.flatnonzero(np.diff(where, prepend=-1))
        there = np.isfinite(values)
        filled = np.where(there, values, 0.0)
        np.add.at(self.total, where[starts], np.add.reduceat(filled, starts, axis=0))
        np.add.at(
            self.count, where[starts], np.add.reduceat(there.astype(np.int64), starts, axis=0)
        )

    def close_gaps(self, steps: np.ndarray) -> None:
        """Widen columns so that records of every n-th step leave none empty; before `add`.

        >>> columns = StepColumns(0, ())
        >>> columns.close_gaps(np.arange(9, 100, 10))
        >>> columns.width
        16
        """
        known = np.unique(steps[steps > self._last])
        if not len(known):
            return
        before = known[:1] if self._last < 0 else np.array([self._last])
        gaps = np.diff(np.concatenate([before, known]))
        # The smallest of several: a resumed run may have a longer gap.
        self._gaps = np.sort(np.concatenate([self._gaps, gaps[gaps > 0]]))[:3]
        self._last = int(known[-1])
        if len(self._gaps) == 3:
            self.widen(1 << (int(self._gaps[0]) - 1).bit_length())

    def _reach(self, last: int) -> None:
        needed = last - self.first + 1
        self.widen(column_width(needed))
        missing = -(-needed // self.width) - len(self)
        if missing > 0:
            pad = [(0, missing), *[(0, 0)] * (self.total.ndim - 1)]
            self.total, self.count = np.pad(self.total, pad), np.pad(self.count, pad)

    def widen(self, width: int) -> None:
        """Join columns until `width` steps share one."""
        while self.width < width:
            self.total, self.count = _pairs(self.total), _pairs(self.count)
            self.width *= 2

    def mean(self) -> np.ndarray:
        """The mean of each column; NaN if there is no value."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.total / np.where(self.count, self.count, np.nan)

    def sums(self) -> np.ndarray:
        """The sum of each column; NaN if there is no value."""
        return np.where(self.count, self.total, np.nan)


def _pairs(array: np.ndarray) -> np.ndarray:
    """Add neighbours along the first dim; an odd one at the end is unchanged."""
    return np.add.reduceat(array, np.arange(0, len(array), 2), axis=0) if len(array) else array
