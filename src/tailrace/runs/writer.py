"""The writer of a run directory: a thread that follows the training loop and stays behind it.

The loop hands over what an execution left behind and goes on. The thread makes rows of it, lets them
wait, and writes them every few seconds: first the arrays, last, in one file, how many rows of each
count. A reader that goes by those counts sees whole executions only, whenever it looks and however
the writer ended. What waits is bounded: a loop that is faster than the disk waits for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tailrace.errors import RunError, TailraceError
from tailrace.observe.records import Source
from tailrace.observe.sinks import Finished
from tailrace.runs.info import RUN_FILE, write_info
from tailrace.runs.layout import FORMAT, import_zarr
from tailrace.runs.lock import DirectoryLock
from tailrace.runs.tables import HistoryTable, RecordTable, put_in_tables

THREAD = "tailrace-run-writer"
WRITE_EVERY_S = 2.0
"""How long rows wait at least before they are written."""
SHARE = 0.01
"""The part of the time that writing may take; it is done less often where it takes long."""
SETTLE_S = 0.1
"""Zarr writes several files at a time; those beside one that failed are let come to their end."""
MOST_WAITING = 1 << 26
"""Bytes of rows that wait in memory; more are written at once."""
MOST_QUEUED = 1 << 28
"""Bytes of executions that may be queued; the training loop waits beyond that."""


class RunWriter:
    """Writes a run directory; a `Sink` for a trainer.

    Args:
        directory: where to; it must not hold a run yet.

    Raises:
        RunError: there is a run, or something that is no directory.
    """

    def __init__(self, directory: Any) -> None:
        import_zarr()
        self.directory = Path(directory)
        self._lock = DirectoryLock(self.directory)
        self._identity = uuid.uuid4().hex
        self._root: Any = None
        self._history: HistoryTable | None = None
        self._tables: dict[Hashable, RecordTable] = {}
        self._starts: dict[Hashable, int] = {}
        self._changed = threading.Condition()
        self._queue: deque[Finished] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._asked = self._answered = 0  # requests to write at once
        self._thread: threading.Thread | None = None
        self._failure: RunError | None = None
        self._told = False
        if self.directory.exists():
            self._refuse_what_is_there()

    # -- the side of the training loop ------------------------------------------------------------

    @contextlib.contextmanager
    def fitting(self, info: Mapping[str, Any]) -> Iterator[None]:
        """Write what `execution` is given until the context ends; then all of it is on disk."""
        self._begin(info)
        try:
            yield
        except BaseException:
            self._end()
            raise
        self._end()
        self._tell()

    def execution(self, done: Finished) -> None:
        """Hand over one execution; waits only if too much is queued."""
        self._tell()
        size = done.nbytes
        with self._changed:
            while self._queue and self._queued_bytes + size > MOST_QUEUED and not self._failure:
                self._changed.wait()
            if self._failure is None:
                self._queue.append(done)
                self._queued_bytes += size
                self._changed.notify_all()
        self._tell()

    def stored(self) -> dict[tuple[str, str], list[Source]]:
        """The records of this fit, or of the last one, as they lie on disk."""
        from tailrace.runs.stored import stored_records

        if self._root is None:
            return {}
        self._flush()
        return stored_records(self.directory, self._root, list(self._starts.values()))

    # -- a fit ------------------------------------------------------------------------------------

    def _begin(self, info: Mapping[str, Any]) -> None:
        with self._sentence("cannot be written"):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            try:
                if self._root is None:
                    self._refuse_what_is_there()
                    self._create(info)
            except BaseException:
                self._lock.release()
                raise
        self._failure, self._told, self._closing = None, False, False
        self._starts = {key: table.columns.committed for key, table in self._tables.items()}
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def _create(self, info: Mapping[str, Any]) -> None:
        root = import_zarr().open_group(self.directory, mode="a", zarr_format=3)
        history = HistoryTable(root.create_group("history"))
        root.create_group("records")
        root.attrs.put(_state({"history": 0, "records": []}, writing=True))
        # Last: a directory without this file holds no run.
        write_info(self.directory, {**info, "run": self._identity})
        self._root, self._history = root, history

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        self._lock.release()

    def _flush(self) -> None:
        """Wait until everything that was handed over so far is on disk."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            while self._thread is not None and self._failure is None and self._answered < mine:
                self._changed.wait(timeout=0.1)

    def _tell(self) -> None:
        """Raise what went wrong in the thread, once."""
        if self._failure is not None and not self._told:
            self._told = True
            raise self._failure

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._sentence("could not be written any further"):
                self._follow()
        except TailraceError as error:
            time.sleep(SETTLE_S)
            with self._changed:
                self._failure = error if isinstance(error, RunError) else RunError(str(error))
                self._queue.clear()
                self._queued_bytes = 0
                for table in [self._history, *self._tables.values()]:
                    if table is not None:
                        table.columns.forget()
                self._changed.notify_all()

    def _follow(self) -> None:
        following = time.monotonic() + WRITE_EVERY_S
        while True:
            with self._changed:
                if not (self._queue or self._closing or self._asked > self._answered):
                    self._changed.wait(timeout=max(0.01, following - time.monotonic()))
                taken = list(self._queue)
                ending, asked = self._closing, self._asked
            for done in taken:
                self._take(done)
                with self._changed:
                    self._queue.popleft()
                    self._queued_bytes -= done.nbytes
                    self._changed.notify_all()
            now = time.monotonic()
            waiting = self._waiting()
            hurry = asked > self._answered or waiting > MOST_WAITING
            if ending or hurry or (waiting and now >= following):
                self._commit(writing=not ending)
                took = time.monotonic() - now
                following = now + max(WRITE_EVERY_S, took / SHARE)
                with self._changed:
                    self._answered = asked
                    self._changed.notify_all()
            if ending:
                return

    def _take(self, done: Finished) -> None:
        assert self._history is not None
        if done.steps:
            self._history.append(done.first_step, done.scalars, done.weights)
        for key, records in put_in_tables(done.parts).items():
            if key not in self._tables:
                group = self._root["records"].create_group(str(len(self._tables)), overwrite=True)
                self._tables[key] = RecordTable(group, records)
                self._starts[key] = 0
            self._tables[key].append(records)

    def _waiting(self) -> int:
        assert self._history is not None
        tables = [self._history, *self._tables.values()]
        return sum(table.columns.waiting_bytes for table in tables)

    def _commit(self, *, writing: bool) -> None:
        """Write what waits, then, in one file, that it counts."""
        assert self._history is not None
        history, tables = self._history.columns, [t.columns for t in self._tables.values()]
        counts = {"history": history.write(), "records": [table.write() for table in tables]}
        self._root.attrs.put(_state(counts, writing=writing))
        for columns in (history, *tables):
            columns.counted()

    # -- what goes wrong --------------------------------------------------------------------------

    def _refuse_what_is_there(self) -> None:
        if not self.directory.is_dir():
            raise RunError(
                f"run_dir is a directory. {str(self.directory)!r} is something else: give another."
            )
        there = ""
        if (self.directory / RUN_FILE).exists():
            there = "holds one already"
        elif (self.directory / "zarr.json").exists():
            there = "holds arrays that belong to none, or to one that was never begun"
        if there:
            raise RunError(
                f"A run directory holds one run, and {str(self.directory)!r} {there}. "
                f"Give run_dir a new directory, or remove that one."
            )

    @contextlib.contextmanager
    def _sentence(self, what: str) -> Iterator[None]:
        try:
            yield
        except TailraceError:
            raise
        except Exception as error:
            steps = self._history.columns.committed if self._history is not None else 0
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            kept = f" The {steps} steps before are there: tr.open_run reads them." if steps else ""
            raise RunError(
                f"The run directory {str(self.directory)!r} {what}: {type(error).__name__}: "
                f"{text.rstrip('.')}.{kept}"
            ) from error


def _state(counts: dict[str, Any], *, writing: bool) -> dict[str, Any]:
    """The attributes of the root: what readers go by."""
    return {"format": FORMAT, "writing": writing, "committed": counts}
