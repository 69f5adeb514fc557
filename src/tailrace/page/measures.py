"""Measures of a tensor in a step, from any kind of record: rms, fraction of zeros, NaN and Inf.

A measure is one number per record of a tensor. Statistics, norms, histograms and whole tensors each
provide some of them; the first kind in `SOURCES` that a tensor has is used.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from tailrace.errors import RunError
from tailrace.page.steps import StepColumns
from tailrace.runs.tables.stored import StoredTable, describing
from tailrace.taps.catalogue import Catalogue
from tailrace.taps.reductions import INF_BIN, NAN_BIN, NUM_BINS, ZERO_BIN

SOURCES = {
    "rms": ("stats", "norm", "tensor", "histogram"),
    "zero": ("stats", "tensor", "histogram"),
    "nonfinite": ("stats", "tensor", "histogram"),
}
"""The measures, and the kinds of records that provide each, most exact first."""

TITLES = {
    "rms": "root mean square",
    "zero": "share of zeros",
    "nonfinite": "NaN and Inf values",
}

SLAB_BYTES = 1 << 26
"""The approximate bytes of a table to read at a time."""

MOST_BYTES = 1 << 32
"""The most bytes of a table to summarize: reading more would take minutes."""

# Bin n has the values of [2^e, 2^(e+1)) with e = n - 127; the mean of x^2 there is 7/3 * 4^e.
_SQUARES = 7 / 3 * 4.0 ** (np.arange(INF_BIN) - 127.0)
"""The mean square of values that fill a bin of a histogram evenly."""


class Rows(NamedTuple):
    """A measure of some tensors over the steps.

    Attributes:
        names: a name for each row; layers of a scan are numbered.
        width: the number of steps per column.
        values: [tensors and their layers, columns].
    """

    names: list[str]
    width: int
    values: np.ndarray


@dataclasses.dataclass
class TableDigest:
    """One measure of all tensors of a table, by step.

    Attributes:
        measure: the measure.
        rows: the number of rows of the table that it includes.
        columns: the values; None before the first row.
        parts: for each tensor, the shape of the layers of scans around it.
    """

    measure: str
    rows: int = 0
    columns: StepColumns | None = None
    parts: tuple[int, ...] = ()
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def follow(self, table: StoredTable, sizes: Mapping[str, int], first: int) -> Rows:
        """Add the rows written since; returns all values."""
        with self.lock, describing(table.directory, table.path):
            for slab in slabs(table, self.rows):
                values = measured(self.measure, slab, sizes)
                if self.columns is None:
                    self.parts = values.shape[2:]
                    self.columns = StepColumns(first, (math.prod(values.shape[1:]),))
                self.columns.add(slab.column("step"), values.reshape(len(values), -1))
                self.rows = slab.stop
            return self._rows(table)

    def _rows(self, table: StoredTable) -> Rows:
        columns = self.columns
        if columns is None:
            return Rows([], 1, np.zeros((0, 0)))
        found = columns.sums() if self.measure == "nonfinite" else columns.mean()
        # The root of the mean square, taken last: a mean of roots would depend on how many steps
        # share a column.
        values = np.sqrt(found) if self.measure == "rms" else found
        return Rows(self._names(table), columns.width, values.T)

    def _names(self, table: StoredTable) -> list[str]:
        if not self.parts:
            return table.names
        numbers = [",".join(map(str, index)) for index in np.ndindex(*self.parts)]
        return [f"{name} [{number}]" for name in table.names for number in numbers]


def slabs(table: StoredTable, start: int, tensors: int | None = None) -> Iterator[StoredTable]:
    """The rows of a table from `start` on, in pieces that fit into memory.

    Args:
        table: the table.
        start: the first row.
        tensors: the number of tensors to read at a time; None for all.
    """
    array = table.group["mean" if table.kind == "stats" else "values"]
    count = array.shape[1] if tensors is None else tensors
    row_bytes = max(1, count * math.prod(array.shape[2:]) * array.dtype.itemsize)
    if (size := row_bytes * (table.stop - start)) > MOST_BYTES:
        raise RunError(
            f"{table.path} holds {size / 2**30:.0f} GiB of records of the kind {table.kind!r}, too "
            f"much to sum up. Taps with reduce='stats' make a picture of many steps."
        )
    # Whole chunks, from their first row: a chunk is decompressed as a whole, so a slab that ends
    # inside one would read it twice.
    chunk = array.chunks[0]
    length = max(1, SLAB_BYTES // (row_bytes * chunk)) * chunk
    while start < table.stop:
        stop = min(table.stop, (start // length + 1) * length)
        yield dataclasses.replace(table, start=start, stop=stop)
        start = stop


def measured(measure: str, table: StoredTable, sizes: Mapping[str, int]) -> np.ndarray:
    """A measure of the rows of a table: [rows, tensors, layers of scans]; squared if it is the rms."""
    if table.kind == "stats":
        return _of_statistics(measure, table)
    values = table.column("values")
    if table.kind == "norm":
        # A squared norm is a sum of squares; divided by the size it is their mean.
        each = np.array([max(1, sizes.get(name, 1)) for name in table.names], np.float64)
        wide = values.astype(np.float64) ** 2
        return wide / each.reshape(-1, *[1] * (wide.ndim - 2))
    if table.kind == "histogram":
        return _of_histograms(measure, values)
    return _of_tensors(measure, values)


def _of_statistics(measure: str, table: StoredTable) -> np.ndarray:
    if measure == "rms":  # the mean of squares is the squared mean plus the variance
        return table.column("mean") ** 2 + table.column("std") ** 2
    if measure == "zero":
        return table.column("zero")
    return (table.column("nan") + table.column("inf")).astype(np.float64)


def _of_histograms(measure: str, counts: np.ndarray) -> np.ndarray:
    counts = counts.astype(np.float64)
    if measure == "nonfinite":
        return counts[..., INF_BIN] + counts[..., NAN_BIN]
    with np.errstate(invalid="ignore", divide="ignore"):
        if measure == "zero":
            return counts[..., ZERO_BIN] / counts.sum(axis=-1)
        finite = counts[..., :INF_BIN]
        return finite @ _SQUARES / (finite.sum(axis=-1) + counts[..., ZERO_BIN])


def _of_tensors(measure: str, values: np.ndarray) -> np.ndarray:
    flat = values.reshape(*values.shape[:2], -1).astype(np.float64)
    good = np.isfinite(flat)
    if measure == "nonfinite":
        return np.logical_not(good).sum(axis=-1).astype(np.float64)
    if measure == "zero":
        return (flat == 0).mean(axis=-1)
    squares = np.where(good, flat, 0.0) ** 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return squares.sum(axis=-1) / good.sum(axis=-1)


def is_histogram(table: StoredTable) -> bool:
    """Whether a table holds histograms by exponent."""
    return table.kind == "histogram" and table.group["values"].shape[-1:] == (NUM_BINS,)


def sizes_of(catalogue: Catalogue) -> dict[str, int]:
    """The number of values of each tensor."""
    return {entry.name: math.prod(entry.shape) for entry in catalogue}
