"""Layers over steps: one row a tensor, one column for some steps, one number in each cell."""

from __future__ import annotations

import dataclasses

import numpy as np

from tailrace.errors import RunError
from tailrace.page.followed import FollowedRun
from tailrace.page.measures import SOURCES, TITLES, Rows, TableDigest, sizes_of
from tailrace.runs.tables.stored import StoredTable
from tailrace.taps.catalogue import Entry, matches


@dataclasses.dataclass(frozen=True, eq=False)
class LayerMap:
    """A measure of many tensors over the steps.

    Attributes:
        measure: "rms", "zero" or "nonfinite".
        names: the tensors, in the order in which a step makes them.
        steps: the first step of each column.
        width: how many steps share a column.
        values: [tensors, columns]; NaN where there is no record.
        problems: what could not be read, a sentence each.
    """

    measure: str
    names: list[str]
    steps: np.ndarray
    width: int
    values: np.ndarray
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def title(self) -> str:
        """What is shown, in words."""
        return TITLES[self.measure]

    def late(self, share: float = 0.25) -> np.ndarray:
        """The median of each tensor over the last part of the run; NaN where nothing was recorded."""
        part = self.values[:, -max(1, int(share * len(self.steps))) :]
        out = np.full(len(part), np.nan)
        there = np.isfinite(part).any(axis=1)
        out[there] = np.nanmedian(part[there], axis=1)
        return out


def layer_map(followed: FollowedRun, measure: str = "rms", select: str = "*") -> LayerMap:
    """A measure of all tensors that a selection matches, over the steps of a run."""
    run, problems = followed.readable(), []
    catalogue = followed.catalogue
    order = {name: place for place, name in enumerate(catalogue.names)}
    rows: dict[str, tuple[int, np.ndarray]] = {}
    sources: dict[str, int] = {}
    for table in run.tables:
        if table.kind not in SOURCES[measure] or not any(_chosen(select, n) for n in table.names):
            continue
        try:
            found = _digest(followed, table, measure, sizes_of(catalogue))
        except RunError as error:
            problems.append(str(error))
            continue
        rank = SOURCES[measure].index(table.kind)
        for name, values in zip(found.names, found.values, strict=True):
            if _chosen(select, name.split(" [")[0]) and rank < sources.get(name, 99):
                rows[name], sources[name] = (found.width, values), rank
    names = sorted(rows, key=lambda name: order.get(name.split(" [")[0], len(order)))
    return _joined(measure, names, rows, followed.first_step, problems)


def _joined(
    measure: str,
    names: list[str],
    rows: dict[str, tuple[int, np.ndarray]],
    first: int,
    problems: list[str],
) -> LayerMap:
    """Rows of tables that began and ended at different steps, on one axis."""
    width = max((each for each, _ in rows.values()), default=1)
    ends = [each * len(found) for each, found in rows.values()]
    count = -(-max(ends, default=0) // width)
    values = np.full((len(names), count), np.nan)
    for row, name in enumerate(names):
        own, found = rows[name]
        each = width // own
        padded = np.full(-(-len(found) // each) * each, np.nan)
        padded[: len(found)] = found
        parts = padded.reshape(-1, each)
        there = np.isfinite(parts)
        total = np.where(there, parts, 0).sum(axis=1)
        share = 1 if measure == "nonfinite" else there.sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            values[row, : len(parts)] = np.where(there.any(axis=1), total / share, np.nan)
    return LayerMap(measure, names, first + width * np.arange(count), width, values, problems)


def _digest(
    followed: FollowedRun, table: StoredTable, measure: str, sizes: dict[str, int]
) -> Rows:
    digest = followed.kept((table.path, measure), lambda: TableDigest(measure))
    return digest.follow(table, sizes, followed.first_step)


def _chosen(select: str, name: str) -> bool:
    return matches(select, Entry(name, name.split("/")[0], (), np.dtype("float32")))
