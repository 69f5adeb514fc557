"""Layers over steps: a row per tensor, a column for some steps, one number in each cell."""

from __future__ import annotations

import dataclasses

import numpy as np

from tailrace.errors import RunError
from tailrace.page.followed import FollowedRun
from tailrace.page.measures import SOURCES, TITLES, Rows, TableDigest, sizes_of
from tailrace.runs.tables.stored import StoredTable
from tailrace.taps.catalogue import Entry, matches

Row = tuple[int, np.ndarray]
"""The number of steps per column, and the values."""


@dataclasses.dataclass(frozen=True, eq=False)
class LayerMap:
    """A measure of many tensors over the steps.

    Attributes:
        measure: "rms", "zero" or "nonfinite".
        names: the tensors, from the input of the model to its output.
        steps: the first step of each column.
        width: the number of steps per column.
        values: [tensors, columns]; NaN where there is no record.
        problems: the parts that could not be read, a sentence each.
        ordered: whether the order of names is known from the program, not only from names.
    """

    measure: str
    names: list[str]
    steps: np.ndarray
    width: int
    values: np.ndarray
    problems: list[str] = dataclasses.field(default_factory=list)
    ordered: bool = False

    @property
    def title(self) -> str:
        """The title of the measure."""
        return TITLES[self.measure]

    def only(self, rows: np.ndarray) -> LayerMap:
        """The rows for which a flag is set."""
        names = [name for name, flag in zip(self.names, rows, strict=True) if flag]
        return dataclasses.replace(self, names=names, values=self.values[rows])

    def late(self, share: float = 0.25) -> np.ndarray:
        """The median of each tensor over the last part of the run; NaN if nothing was recorded."""
        part = self.values[:, -max(1, int(share * len(self.steps))) :]
        out = np.full(len(part), np.nan)
        there = np.isfinite(part).any(axis=1)  # nanmedian warns about rows without values
        out[there] = np.nanmedian(part[there], axis=1)
        return out


def without_gaps(values: np.ndarray) -> np.ndarray:
    """Rows to draw: the record of every n-th column also fills the n - 1 columns before it.

    A tap with `mode=tr.every(n)` records the last of n steps.

    Args:
        values: [rows, columns]; NaN where there is no record.

    >>> without_gaps(np.array([[np.nan, 1, np.nan, 2, np.nan, 3, np.nan, 4]]))
    array([[1., 1., 2., 2., 3., 3., 4., 4.]])
    """
    drawn, there = values.copy(), np.isfinite(values)
    rows: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(~there.all(axis=1)):  # the tensors of a table have the same columns
        rows.setdefault(there[row].tobytes(), []).append(int(row))
    for same in rows.values():
        filled = np.flatnonzero(there[same[0]])
        if len(filled) < 4:
            continue
        # The smallest gap: longer ones are missing records.
        for back in range(1, int(np.diff(filled).min())):
            at = filled[filled >= back]
            mine = np.array(same)[:, None]
            drawn[mine, at - back] = values[mine, at]
    return drawn


def layer_map(followed: FollowedRun, measure: str = "rms", select: str = "*") -> LayerMap:
    """A measure of all selected tensors over the steps of a run."""
    problems: list[str] = []
    catalogue = followed.catalogue
    rows: dict[str, list[Row]] = {}
    sources: dict[str, str] = {}
    kinds = SOURCES[measure]
    tables = [table for table in followed.readable().tables if table.kind in kinds]
    # Most exact kind first. A tensor is read from one kind only (`sources`): otherwise its curve would
    # jump where another tap began.
    for table in sorted(tables, key=lambda table: kinds.index(table.kind)):
        wanted = {name for name in table.names if _chosen(select, name)}
        if not any(sources.get(name, table.kind) == table.kind for name in wanted):
            continue  # a better kind of record has them all
        try:
            found = _digest(followed, table, measure, sizes_of(catalogue))
        except RunError as error:
            problems.append(str(error))
            continue
        for name, values in zip(found.names, found.values, strict=True):
            tensor = plain_name(name)
            if tensor in wanted and sources.setdefault(tensor, table.kind) == table.kind:
                rows.setdefault(name, []).append((found.width, values))
    order = catalogue.model_order()
    names = sorted(rows, key=lambda name: order.get(plain_name(name), len(order)))
    found = _joined(measure, [(name, rows[name]) for name in names], followed.first_step, problems)
    return dataclasses.replace(found, ordered=any(entry.use >= 0 for entry in catalogue))


def plain_name(name: str) -> str:
    """The tensor of a row, without the number of a scan's layer.

    >>> plain_name("grad/stack/w [3]")
    'grad/stack/w'
    """
    return name.partition(" [")[0]


def _joined(
    measure: str, rows: list[tuple[str, list[Row]]], first: int, problems: list[str]
) -> LayerMap:
    """Rows of tables with different first and last steps, on one axis."""
    parts = [part for _, row in rows for part in row]
    width = max((each for each, _ in parts), default=1)
    count = -(-max((each * len(found) for each, found in parts), default=0) // width)
    values = np.full((len(rows), count), np.nan)
    for place, (_, row) in enumerate(rows):
        if len(row) == 1 and row[0][0] == width:
            values[place, : len(row[0][1])] = row[0][1]
            continue
        total, weight = np.zeros(count), np.zeros(count, np.int64)
        # Widths are powers of two, so each narrow column is inside one wide column.
        for each, found in row:
            there = np.isfinite(found)
            columns = (np.arange(len(found)) * each // width)[there]
            np.add.at(total, columns, found[there])
            np.add.at(weight, columns, 1)
        # Counts add up; other measures are averaged.
        share = np.minimum(weight, 1) if measure == "nonfinite" else weight
        with np.errstate(invalid="ignore", divide="ignore"):
            values[place] = np.where(weight > 0, total / share, np.nan)
    names = [name for name, _ in rows]
    return LayerMap(measure, names, first + width * np.arange(count), width, values, problems)


def _digest(followed: FollowedRun, table: StoredTable, measure: str, sizes: dict[str, int]) -> Rows:
    digest = followed.kept((table.path, measure), lambda: TableDigest(measure))
    return digest.follow(table, sizes, followed.first_step)


def _chosen(select: str, name: str) -> bool:
    return matches(select, Entry(name, name.split("/")[0], (), np.dtype("float32")))
