"""One tensor over the steps: its statistics, and its values by exponent."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, NamedTuple

import numpy as np

from tailrace.page.curves import Curve, curve
from tailrace.page.followed import FollowedRun
from tailrace.page.measures import is_histogram, slabs
from tailrace.page.steps import StepColumns
from tailrace.records.exponents import count_exponents
from tailrace.records.float_formats import FORMATS
from tailrace.runs.tables.stored import StoredTable, describing
from tailrace.taps.reductions import NUM_BINS, STATS

NAMES = STATS.names or ()


@dataclasses.dataclass
class GrowingColumn:
    """A cached column of one tensor; only new rows are read."""

    values: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def follow(self, table: StoredTable, name: str, tensor: int | None) -> np.ndarray:
        """All rows so far; arrays are averaged."""
        with self.lock:
            rows = len(self.values)
            if rows < table.stop:
                new = dataclasses.replace(table, start=rows).column(name, tensor)
                # A curve has one number per row: of a tensor's several values, the mean.
                flat = new.astype(np.float64).reshape(len(new), -1)
                self.values = np.concatenate([self.values, flat.mean(axis=1)])
            return self.values[: table.stop]


class Exponents(NamedTuple):
    """Values of a tensor, counted by binary exponent and step.

    Attributes:
        steps: the first step of each column.
        width: the number of steps per column.
        counts: [columns, 258], as a tap with `reduce="histogram"` records them.
    """

    steps: np.ndarray
    width: int
    counts: np.ndarray


@dataclasses.dataclass
class HistogramDigest:
    """The histograms of one tensor, summed by step."""

    rows: int = 0
    columns: StepColumns | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def follow(self, table: StoredTable, tensor: int, first: int) -> Exponents:
        """Add the rows written since."""
        with self.lock:
            if self.columns is None:
                self.columns = StepColumns(first, (NUM_BINS,))
            for slab in slabs(table, self.rows, tensors=1):
                values = slab.column("values", tensor)
                if is_histogram(table):
                    counts = values.reshape(len(values), -1, NUM_BINS).sum(axis=1)
                else:
                    counts = np.stack([count_exponents(value) for value in values])
                steps = slab.column("step")
                self.columns.close_gaps(steps)
                self.columns.add(steps, counts)
                self.rows = slab.stop
            steps = first + self.columns.width * np.arange(len(self.columns))
            return Exponents(steps, self.columns.width, self.columns.total.copy())


def places(followed: FollowedRun, name: str) -> list[tuple[StoredTable, int]]:
    """The tables with records of a tensor, and its index there."""
    tables = followed.readable().tables
    return [(table, table.names.index(name)) for table in tables if name in table.names]


def statistics(
    followed: FollowedRun, name: str, first: int | None = None, last: int | None = None
) -> dict[str, Curve]:
    """The kept values of a tensor over the steps: statistics, norm, or a function's scalar."""
    # A tensor may be in several tables: one for each kind of record and period of its taps.
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for table, number in places(followed, name):
        with describing(table.directory, table.path):
            for title, array in _columns(table).items():
                steps = _growing(followed, table, "step", None).astype(np.int64)
                values = _growing(followed, table, array, number)
                parts.setdefault(title, []).append((steps, values))
    return {title: curve(*_in_order(each), first=first, last=last) for title, each in parts.items()}


def _in_order(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of several tables, sorted by step."""
    if len(parts) == 1:
        return parts[0]
    steps, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(steps, kind="stable")
    return steps[order], values[order]


def _columns(table: StoredTable) -> dict[str, str]:
    """The columns of a table to draw as curves, by title."""
    if table.kind == "stats":
        return {name: name for name in NAMES}
    if table.kind in ("histogram", "tensor") or "values" not in table.group:
        return {}
    scalar = table.kind == "norm" or table.group["values"].ndim == 2
    return {table.kind: "values"} if scalar else {}


def _growing(
    followed: FollowedRun, table: StoredTable, name: str, tensor: int | None
) -> np.ndarray:
    column = followed.kept((table.path, name, tensor), GrowingColumn)
    return column.follow(table, name, tensor)


def exponents(followed: FollowedRun, name: str) -> Exponents | None:
    """The values of a tensor by exponent over the steps; None if the run has no such records."""
    found = []
    for table, number in places(followed, name):
        with describing(table.directory, table.path):
            if is_histogram(table) or table.kind == "tensor":
                digest = followed.kept((table.path, "exponents", number), HistogramDigest)
                found.append((table.kind, digest.follow(table, number, followed.first_step)))
    # Not both histograms and whole tensors: the same steps would count twice.
    of_one_kind = [one for kind, one in found if kind == found[0][0]]
    return _together(of_one_kind) if of_one_kind else None


def _together(parts: list[Exponents]) -> Exponents:
    """The counts of several tables on one axis."""
    width = max(part.width for part in parts)
    count = -(-max(part.width * len(part.steps) for part in parts) // width)
    counts = np.zeros((count, NUM_BINS))
    for part in parts:
        # `add.at`, not `+=`: several columns of a finer part fall into one, and each must count.
        np.add.at(counts, np.arange(len(part.steps)) * part.width // width, part.counts)
    return Exponents(parts[0].steps[0] + width * np.arange(count), width, counts)


def format_limits() -> list[dict[str, Any]]:
    """For each narrow float format, its range of normal exponents."""
    return [
        {
            "name": form.name,
            "smallest": form.least_exponent - form.mantissa_bits,
            "least": form.least_exponent,
            "most": int(np.frexp(form.largest)[1]),
        }
        for form in FORMATS
    ]
