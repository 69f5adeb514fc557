"""The tables of one run directory, appended to and committed together.

Rows are buffered in memory and written in batches: first the arrays, then, in one file, the number of
committed rows of each. A reader that respects those counts sees complete executions only, whenever it
reads and however the writer, or the machine, stopped.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.records.parts import forget_tags
from tailrace.records.record import Source
from tailrace.records.sinks import Finished, Validated
from tailrace.runs.storage.attributes import sealed
from tailrace.runs.storage.files import FORMAT, ZarrGroup, import_zarr
from tailrace.runs.storage.held import HeldDirectory
from tailrace.runs.tables.columns import Columns
from tailrace.runs.tables.executions import join_executions
from tailrace.runs.tables.reopened import fewer, reopen, rows_before
from tailrace.runs.tables.tables import (
    ExecutionTable,
    HistoryTable,
    RecordTable,
    put_in_tables,
)
from tailrace.runs.tables.validations import ValidationTable

if TYPE_CHECKING:
    from tailrace.runs.storage.stores import BufferedStore

COUNTS = "zarr.json"
"""The file with the number of committed rows: the description of the root."""

GROUPS = ("history", "records", "executions", "validations")
"""The folders of the tables."""


class RunTables:
    """History, executions, validations and records of a run; made by `create` or `reopened`.

    Not safe to use from two threads: a fit has one writing thread, and between fits there is none.
    """

    def __init__(
        self,
        store: BufferedStore,
        root: ZarrGroup,
        history: HistoryTable,
        executions: ExecutionTable,
    ) -> None:
        self._store, self._root = store, root
        self._history, self._executions = history, executions
        self._validations: ValidationTable | None = None
        self._records: dict[Hashable, RecordTable] = {}
        self._starts: dict[Hashable, int] = {}
        self._reopened: dict[Any, Hashable] = {}

    @classmethod
    def create(cls, place: HeldDirectory) -> RunTables:
        """Empty tables in a directory without any."""
        store, root = _opened(place, "a")
        history = HistoryTable(root.create_group("history"))
        root.create_group("records")
        executions = ExecutionTable(root.create_group("executions"))
        tables = cls(store, root, history, executions)
        counts = {"history": 0, "records": [], "executions": 0, "validations": 0}
        tables._publish(counts, writing=True)
        return tables

    @classmethod
    def reopened(
        cls, place: HeldDirectory, end: Mapping[str, Any], before: int | None = None
    ) -> RunTables:
        """Existing tables, truncated before anything is appended.

        Args:
            place: the directory.
            end: the number of rows of each, as `rows` returns them; or `step`, before which all rows
                stay. Empty for all there are.
            before: a step; of the rows up to `end`, those before it stay. None for all.
        """
        store, root = _opened(place, "r+")
        if "step" in end:
            end = rows_before(root, end["step"])
        if before is not None:
            end = fewer(end, rows_before(root, before))
        found = reopen(root, end)
        tables = cls(store, root, found.history, found.executions)
        tables._validations = found.validations
        # The keys of tables depend on taps of a trainer that may be gone: tensors find their tables by
        # what is on disk, kind and names.
        keys: list[Hashable] = [("reopened", number) for number in range(len(found.records))]
        tables._records = dict(zip(keys, found.records, strict=True))
        tables._starts = dict(zip(keys, found.starts, strict=True))
        tables._reopened = {table.tensors: key for key, table in tables._records.items()}
        tables._publish(found.counts, writing=True)
        return tables

    @property
    def steps(self) -> int:
        """The number of committed steps."""
        return self._history.columns.committed

    def begin_fit(self) -> None:
        """Records from here on belong to a new fit."""
        self._starts = {key: table.columns.committed for key, table in self._records.items()}

    def stored(self, directory: Path) -> dict[tuple[str, str], list[Source]]:
        """The records of this fit, or of the last one, read back from disk."""
        from tailrace.runs.tables.stored import open_root, stored_records

        return stored_records(directory, open_root(directory), list(self._starts.values()))

    def rows(self, *, between_fits: bool = False) -> dict[str, Any]:
        """The number of rows of each, buffered ones included, and of records of earlier fits."""
        records = [table.columns.rows for table in self._records.values()]
        return {
            "history": self._history.columns.rows,
            "executions": self._executions.columns.rows,
            "validations": 0 if self._validations is None else self._validations.columns.rows,
            "records": records,
            "starts": records if between_fits else list(self._starts.values()),
        }

    def append(self, results: Sequence[Finished | Validated]) -> None:
        """Buffer the rows of executions and validations."""
        executions = [one for one in results if isinstance(one, Finished)]
        for one in results:
            if isinstance(one, Validated):
                self._validations = self._validations or ValidationTable.create(self._root)
                self._validations.append(one)
        self._executions.append(executions)
        # Consecutive executions of equal form become one: a table has a cost per append, and
        # executions can be as short as a step.
        for done in join_executions(executions):
            self._append(done)
        # Those of the next ones are others.
        forget_tags()

    def commit(self, *, writing: bool) -> tuple[float, float]:
        """Write buffered rows, then publish the new counts.

        Args:
            writing: whether there may be more.

        Returns:
            The seconds that it used the processor, and those that it waited for the disk.
        """
        started = time.monotonic()
        every = self._columns()
        counts = {
            # Into the store's buffer; nothing reaches the disk before `flush`.
            "history": self._history.columns.write(),
            "records": [table.columns.write() for table in self._records.values()],
            "executions": self._executions.columns.write(),
            "validations": 0 if self._validations is None else self._validations.columns.write(),
        }
        self._put(counts, writing=writing)
        # Two clocks: encoding is processor time, in `flush` only what this thread computes is.
        encoded, busy = time.monotonic(), time.thread_time()
        self._store.flush(last=COUNTS)
        # Only now: if the disk refuses, the rows stay buffered and the next attempt writes them all.
        for columns in every:
            columns.counted()
        busy = encoded - started + time.thread_time() - busy
        return busy, time.monotonic() - encoded

    def forget(self) -> None:
        """Drop the buffered rows, which could not be written."""
        for columns in self._columns():
            columns.forget()

    def _columns(self) -> list[Columns]:
        records = [table.columns for table in self._records.values()]
        rest = [] if self._validations is None else [self._validations.columns]
        return [self._history.columns, self._executions.columns, *rest, *records]

    def _publish(self, counts: dict[str, Any], *, writing: bool) -> None:
        self._put(counts, writing=writing)
        self._store.flush(last=COUNTS)

    def _put(self, counts: dict[str, Any], *, writing: bool) -> None:
        """Buffer the attributes of the root, which readers rely on."""
        said = {"format": FORMAT, "writing": writing, "committed": sealed(counts)}
        self._root.attrs.put(said)

    def _append(self, done: Finished) -> None:
        if done.steps:
            self._history.append(done.first_step, done.scalars, done.weights, done.elements)
        for form, records in put_in_tables(done.parts).items():
            tensors = (records[0].kind, tuple(record.name for record in records))
            key = self._reopened.get(tensors, form)
            if key not in self._records:
                # Overwrites: a writer that was killed may have left a table that no count mentions.
                group = self._root["records"].create_group(str(len(self._records)), overwrite=True)
                self._records[key] = RecordTable(group, records)
                self._starts[key] = 0
            self._records[key].append(records)


def _opened(place: HeldDirectory, mode: str) -> tuple[BufferedStore, Any]:
    from tailrace.runs.storage.stores import BufferedStore

    store = BufferedStore(place)
    return store, import_zarr().open_group(store, mode=mode, zarr_format=3)
