"""Records and history as columns: the grouping of tensors into tables, and their columns."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from tailrace.base.spans.device_times import ACTIVITIES
from tailrace.records.fingerprints import CHAIN, GROUPS
from tailrace.records.parts import PER_MICROBATCH, Part
from tailrace.records.record import Record
from tailrace.records.sinks import Finished
from tailrace.runs.storage.attributes import sealed, unsealed
from tailrace.runs.storage.files import ZarrGroup, describe_tree
from tailrace.runs.tables.columns import Columns
from tailrace.taps.reductions import NUM_BINS, STATS

COORDINATES = "step microbatch replica stage"
"""The coordinate arrays, declared for xarray."""

EXECUTION = {"first_step": "int64", "steps": "int64", "ended": "float64"}
"""The columns of an execution; `ended` in seconds since 1970."""

READING = ("fit", "epoch", "first_element", "element_count", "resumed")
"""The elements it consumed: the first step of its fit, the pass over the dataset, the index of its
first element in that pass, their number; and whether it is the first execution after a resume."""

OPTIONAL = {**dict.fromkeys(READING, "int64"), **dict.fromkeys((*GROUPS, CHAIN), "uint64")}
"""Optional columns: consumed elements and fingerprints."""

TIMES = "times"
"""An optional column: the seconds of each of `ACTIVITIES` since the execution before."""

TAGS = ("steps", "microbatches", "replicas")
"""The columns that say when a value was computed; tensors of an execution mostly share these arrays."""


def put_in_tables(parts: Sequence[Part]) -> dict[Hashable, list[Record]]:
    """The records of one execution, grouped by table, by the key of the table.

    Tensors share a table if their kept values have the same shape and they are observed at the same
    steps, so that steps, microbatches and replicas are stored once for all of them.
    """
    found: dict[Hashable, list[Record]] = {}
    for part in parts:
        record = part.record()
        # JSON as a key: the structure is nested lists, which cannot be hashed.
        form = json.dumps(_forms(record))
        one = part.one
        moments = (str(one.tap.mode), one.loops, one.differs, one.microbatches)
        per_microbatch = one.entry.kind in PER_MICROBATCH
        # A value in a branch is not computed in every step, so its rows differ from the others'.
        own = record.name if part.valid is not None else ""
        key: Hashable = (record.kind, form, moments, per_microbatch, own)
        first = found.get(key, [record])[0]
        # The key follows from the taps. The rows are compared too: a table has one set of steps for all
        # its tensors, whatever the reason that they differ.
        if not _same_moments(first, record):
            key = (key, record.name)
        found.setdefault(key, []).append(record)
    return {(key, tuple(r.name for r in records)): records for key, records in found.items()}


def _same_moments(one: Record, other: Record) -> bool:
    tags = [(getattr(one, tag), getattr(other, tag)) for tag in TAGS]
    # Mostly one array for all tensors of an execution: identity saves the comparison.
    return all(mine is theirs or np.array_equal(mine, theirs) for mine, theirs in tags)


def _forms(record: Record) -> list[Any]:
    """The structure of values, then dtype and shape of each leaf."""
    leaves: list[Any] = []

    def leaf(array: np.ndarray) -> int:
        leaves.append([array.dtype.name, list(array.shape[1:])])
        return len(leaves) - 1

    tree = describe_tree(record.values, leaf)
    ran = None if record.ran is None else list(record.ran.shape[1:])
    return [tree, leaves, ran]


class RecordTable:
    """A table of tensors: created for their first records, then appended to."""

    def __init__(self, group: ZarrGroup, records: Sequence[Record]) -> None:
        first = records[0]
        tree, _, _ = _forms(first)
        said = {"kind": first.kind, "names": [record.name for record in records], "tree": tree}
        group.attrs.put(sealed({**said, "coordinates": COORDINATES}))
        self.columns = Columns(group, "record")
        for tag in ("step", "microbatch", "replica"):
            self.columns.add_column(tag, np.dtype(np.int64), (), ())
        names = np.array([record.name for record in records], dtype=object)
        self.columns.add_fixed("tensor", names, ["tensor"])
        # A tensor has one stage for all its rows.
        stages = np.array([r.stages[0] if len(r) else -1 for r in records], np.int64)
        self.columns.add_fixed("stage", stages, ["tensor"])
        for name, array in value_columns(first).items():
            shape = array.shape[1:]
            self.columns.add_column(
                name, array.dtype, shape, _dims(first, name, shape), tensors=len(records)
            )

    @classmethod
    def reopened(cls, columns: Columns) -> RecordTable:
        """An existing table."""
        table = cls.__new__(cls)
        table.columns = columns
        return table

    @property
    def tensors(self) -> tuple[str, tuple[str, ...]]:
        """What is kept, and the tensors: the key of the table."""
        attributes = unsealed(self.columns.group.attrs)
        return attributes["kind"], tuple(attributes["names"])

    def append(self, records: Sequence[Record]) -> None:
        """Buffer the records of one execution."""
        first = records[0]
        rows: dict[str, np.ndarray] = {
            "step": first.steps,
            "microbatch": first.microbatches,
            "replica": first.replicas,
        }
        each = [value_columns(record) for record in records]
        for name in each[0]:
            rows[name] = np.stack([columns[name] for columns in each], axis=1)
        self.columns.append(len(first), rows)


def value_columns(record: Record) -> dict[str, np.ndarray]:
    """The values of a record as columns, by the names of the arrays."""
    found: dict[str, np.ndarray] = {}
    if isinstance(record.values, np.ndarray):
        if record.values.dtype == STATS:
            found = {name: record.values[name] for name in STATS.names or ()}
        else:
            found = {"values": record.values}
    else:

        def leaf(array: np.ndarray) -> int:
            # Numbered, not named by their path: names in a run are data, never names of files.
            found[f"values{len(found)}"] = array
            return len(found)

        describe_tree(record.values, leaf)
    if record.ran is not None:
        found["ran"] = record.ran
    return found


def _dims(record: Record, column: str, shape: tuple[int, ...]) -> list[str]:
    # xarray requires that a dim name has one length per group.
    prefix = "" if column == "values" or column in (STATS.names or ()) else f"{column}_"
    dims = [f"{prefix}dim{number}" for number in range(len(shape))]
    if record.kind == "histogram" and shape[-1:] == (NUM_BINS,):
        dims[-1] = "bin"
    return ["tensor", *dims]


class HistoryTable:
    """Loss and metrics, one row per step."""

    def __init__(self, group: ZarrGroup) -> None:
        group.attrs.put(sealed({"names": []}))
        self.columns = Columns(group, "step")
        # Names of metrics are the user's, and may not be names of files: columns are numbered.
        self._numbers: dict[str, int] = {}

    @classmethod
    def reopened(cls, columns: Columns) -> HistoryTable:
        """An existing table."""
        table = cls.__new__(cls)
        table.columns = columns
        table._numbers = {name: i for i, name in enumerate(unsealed(columns.group.attrs)["names"])}
        return table

    def append(
        self,
        first_step: int,
        scalars: Mapping[str, np.ndarray],
        weights: np.ndarray | None,
        elements: np.ndarray | None = None,
    ) -> None:
        """Buffer the steps of one execution."""
        columns, (count, *given) = self.columns, next(iter(scalars.values())).shape
        dims = ("microbatch", "replica")
        if "step" not in columns:
            columns.add_column("step", np.dtype(np.int64), (), ())
            for dim, length in zip(dims, given, strict=True):
                columns.add_fixed(dim, np.arange(length), [dim])
        # A resumed fit may split a step otherwise into microbatches and replicas. Its elements are
        # numbered as before, so rows keep the split that the run began with; without this, they would
        # be broadcast to it.
        split = columns.form("metric0") if "metric0" in columns else tuple(given)
        if weights is not None and "weight" not in columns:
            # Steps without weights, of the script as it was before, or is now: all counted alike.
            columns.add_column("weight", weights.dtype, split, dims, missing=1)
        rows = {"step": first_step + np.arange(count)}
        if elements is not None:
            if "elements" not in columns:
                columns.add_column("elements", elements.dtype, split, dims)
            rows["elements"] = elements.reshape(count, *split)
        for name, values in scalars.items():
            # A metric may appear in a later fit; earlier rows then have the fill value.
            if name not in self._numbers:
                number = self._numbers[name] = len(self._numbers)
                about = {"long_name": name}
                columns.add_column(f"metric{number}", values.dtype, split, dims, attributes=about)
                # Buffered like everything else, and written before the counts: a reader never sees
                # a column that it has no name for.
                columns.group.attrs.put(sealed({"names": list(self._numbers)}))
            rows[f"metric{self._numbers[name]}"] = values.reshape(count, *split)
        if weights is not None:
            rows["weight"] = weights.reshape(count, *split)
        columns.append(count, rows)


class ExecutionTable:
    """One row per execution: its steps, and when it ended."""

    def __init__(self, group: ZarrGroup) -> None:
        self.columns = Columns(group, "execution")
        for name, dtype in EXECUTION.items():
            self.columns.add_column(name, np.dtype(dtype), (), ())

    @classmethod
    def reopened(cls, columns: Columns) -> ExecutionTable:
        """An existing table."""
        table = cls.__new__(cls)
        table.columns = columns
        return table

    def append(self, executions: Sequence[Finished]) -> None:
        """Buffer executions."""
        if not executions:
            return
        rows = [(done.first_step, done.steps, done.ended) for done in executions]
        columns = zip(EXECUTION.items(), zip(*rows, strict=True), strict=False)
        found = {name: np.array(v, d) for (name, d), v in columns}
        values = [{**done.reading, **done.fingerprint} for done in executions]
        for name, dtype in OPTIONAL.items():
            if any(name in one for one in values):
                # Added when first needed: a run without fingerprints has no such columns.
                if name not in self.columns:
                    self.columns.add_column(name, np.dtype(dtype), (), ())
                # No element has index -1, and 0 is the fingerprint of a group that was not taken.
                missing = -1 if dtype == "int64" else 0
                found[name] = np.array([one.get(name, missing) for one in values], dtype)
        if any(done.times for done in executions):
            width = len(ACTIVITIES)
            if TIMES not in self.columns:
                self.columns.add_column(TIMES, np.dtype("float64"), (width,), ["activity"])
            unknown = [np.nan] * width
            found[TIMES] = np.array([done.times or unknown for done in executions])
        self.columns.append(len(rows), found)
