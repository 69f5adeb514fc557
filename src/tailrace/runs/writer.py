"""The writer of a run directory: a thread that follows the training loop.

The loop queues the results of an execution and continues. Every few seconds the thread makes rows of
all queued executions and writes them: first the arrays, then, in one file, the number of committed
rows of each. Everything is synced to disk in that order, so that a reader that respects those counts
sees only complete executions, whenever it reads and however the writer, or the machine, stopped. The
queue is
bounded: a loop that is faster than the disk waits for it, and if the disk is full, training continues
while the thread retries.

The file is long because it is one thing: queue, thread and files share one lock and one order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.errors import NonFiniteError, OptionError, RunError, TailraceError
from tailrace.messages import logger
from tailrace.records.records import Source
from tailrace.records.sinks import Finished
from tailrace.runs.compilations import add_compilations
from tailrace.runs.info import RUN_FILE, read_info, write_info
from tailrace.runs.interventions import add_intervention
from tailrace.runs.nonfinite_reports import add_report
from tailrace.runs.storage.durable import put_files
from tailrace.runs.storage.files import FORMAT, import_zarr
from tailrace.runs.storage.held import HeldDirectory
from tailrace.runs.storage.lock import DirectoryLock
from tailrace.runs.tables.executions import join_executions
from tailrace.runs.tables.reopened import reopen, rows_before
from tailrace.runs.tables.tables import (
    ExecutionTable,
    HistoryTable,
    RecordTable,
    put_in_tables,
)

if TYPE_CHECKING:
    from tailrace.runs.storage.stores import BufferedStore

THREAD = "tailrace-run-writer"
WRITE_EVERY_S = 2.0
"""The shortest time between writes, in seconds."""
PAUSE_S = 10.0
"""The longest time between writes: a killed process loses at most this much."""
SHARE, DISK_SHARE = 0.005, 0.1
"""The fraction of time that writing may use the processor, and that it may wait for the disk, which
costs training nothing. If either takes longer, writes become rarer, down to one per `PAUSE_S`."""
MOST_WAITING = 1 << 26
"""The bytes of queued executions from which they are written at once."""
MOST_QUEUED = 1 << 28
"""The most bytes of queued executions; beyond that the training loop waits."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk, which may have room later."""
FULL_S, RETRY_S = 60.0, 1.0
"""How long to wait for room on a full disk before the fit ends, and how often to retry."""
LOOK_S = 1.0
"""How often a waiting thread checks that the other one is still alive, in seconds."""
COUNTS = "zarr.json"
"""The file with the number of committed rows: the description of the root."""


class RunWriter:
    """Writes a run directory; a `Sink` for a trainer.

    Args:
        directory: the directory, which must not contain a run yet. It belongs to the run until the fit
            ends: if it is removed or replaced, writing stops.

    Attributes:
        writes: the number of writes so far; each writes many executions.

    Raises:
        RunError: the directory contains a run, or is not a directory.
    """

    def __init__(self, directory: Any) -> None:
        import_zarr()
        self.directory = _as_directory(directory)
        self.writes = 0
        self._place = HeldDirectory(self.directory)
        self._lock = DirectoryLock(self._place)
        self._identity = uuid.uuid4().hex
        self._store: BufferedStore | None = None
        self._root: Any = None
        self._history: HistoryTable | None = None
        self._executions: ExecutionTable | None = None
        self._tables: dict[Hashable, RecordTable] = {}
        self._starts: dict[Hashable, int] = {}
        self._changed = threading.Condition()
        self._queue: deque[tuple[Finished | _Mark, int]] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._blocked = False  # the training waits for room
        self._asked = self._answered = 0  # requests to write at once
        self._thread: threading.Thread | None = None
        self._failure: RunError | None = None
        self._told = False
        self._taken_up: Mapping[str, Any] | None = None
        self._reopened: dict[Any, Hashable] = {}
        self._beside: dict[str, bytes] = {}
        with self._sentence("cannot be looked at"):
            if os.path.lexists(self.directory):
                self._refuse_what_is_no_directory()

    # -- the side of the training loop ------------------------------------------------------------

    @contextlib.contextmanager
    def fitting(self, info: Mapping[str, Any]) -> Iterator[None]:
        """Write executions until the context ends; then all of them are on disk."""
        self._begin(info)
        try:
            yield
        except BaseException as error:
            if isinstance(error, NonFiniteError):
                with contextlib.suppress(
                    OSError
                ):  # the error itself is more important than its copy
                    add_report(self._place, error)
            self._end()
            raise
        self._end()
        self._tell()

    def execution(self, done: Finished) -> None:
        """Queue one execution; waits only if too much is queued."""
        self._tell()
        size = done.nbytes
        with self._changed:
            while self._queue and self._queued_bytes + size > MOST_QUEUED and not self._failure:
                self._blocked = True
                self._changed.notify_all()
                self._changed.wait(timeout=LOOK_S)
                self._check_thread()
            self._blocked = False
            if self._failure is None:
                self._queue.append((done, size))
                self._queued_bytes += size
                if self._queued_bytes > MOST_WAITING:
                    self._changed.notify_all()  # otherwise the thread sleeps until its next write
        self._tell()

    def compilation(self, row: Mapping[str, Any]) -> None:
        """Store a compilation; if the directory cannot be written, `execution` reports it."""
        with contextlib.suppress(OSError, RunError):
            add_compilations(self._place, [row])

    def mark(self) -> Callable[[], dict[str, Any] | None]:
        """Mark the current end of the queue.

        Returns:
            A function that waits until everything before it is on disk, and returns the number of rows
            of each table, for `take_up`.
        """
        mark = _Mark()
        with self._changed:
            if self._thread is None:
                mark.rows = self._rows(between_fits=True)
            else:
                self._queue.append((mark, 0))

        def rows() -> dict[str, Any] | None:
            self.flush()
            return mark.rows

        return rows

    def take_up(self, end: Mapping[str, Any] | None) -> None:
        """Continue the run in the directory, if there is one.

        Args:
            end: the position of a mark; rows after it are cut off, because they come again. None: the
                fit had no run.
        """
        if self._root is None and end is not None:
            self._taken_up = end

    def rewind(self, step: int, said: Mapping[str, Any]) -> None:
        """Record that training went back to a step; the next fit cuts off later rows. Between fits.

        Args:
            step: rows of this step and later ones are cut off.
            said: the entry for `interventions.json`.
        """
        if not self._holds_a_run():
            return
        with self._sentence("cannot be written"):
            self._place.hold()
            try:
                self._lock.acquire()
                add_intervention(self._place, dict(said))
            finally:
                self._let_go()
        self._root, self._taken_up = None, {"step": step}

    def flush(self) -> None:
        """Wait until everything queued so far is on disk."""
        self._flush()
        self._tell()

    def keep(self, name: str, text: str) -> None:
        """Store a file in the run directory; before the first fit, it is stored when that begins."""
        self._beside[name] = text.encode()
        if self._root is not None:
            with self._sentence("cannot be written"):
                held = self._thread is not None
                if not held:
                    self._place.hold()
                try:
                    put_files(self._place, {name: self._beside[name]})
                finally:
                    if not held:
                        self._place.release()

    def stored(self) -> dict[tuple[str, str], list[Source]]:
        """The records of this fit, or of the last one, on disk."""
        from tailrace.runs.tables.stored import open_root, stored_records

        if self._root is None:
            return {}
        self._flush()
        root = open_root(self.directory)
        return stored_records(self.directory, root, list(self._starts.values()))

    # -- a fit ------------------------------------------------------------------------------------

    def _begin(self, info: Mapping[str, Any]) -> None:
        with self._sentence("cannot be written"):
            if self._root is None:  # created only once: a second one would be another directory
                self.directory.mkdir(parents=True, exist_ok=True)
            try:
                self._place.hold()
                self._lock.acquire()
                if self._root is None and self._taken_up and self._holds_a_run():
                    self._reopen(self._taken_up)
                elif self._root is None:
                    self._refuse_what_is_there()
                    self._create(info)
                else:
                    self._check_same_run()
            except BaseException:
                self._let_go()
                raise
        self._failure, self._told, self._closing = None, False, False
        if self._taken_up is None:
            self._starts = {key: table.columns.committed for key, table in self._tables.items()}
        self._taken_up = None
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def _check_same_run(self) -> None:
        """Between fits the directory is not held, and another one may have taken its name."""
        there = (self.directory / RUN_FILE).exists() and read_info(self.directory).get("run")
        if there != self._identity:
            raise self._place.not_the_same("was replaced by another one")

    def _create(self, info: Mapping[str, Any]) -> None:
        from tailrace.runs.storage.stores import BufferedStore

        store = BufferedStore(self._place)
        root = import_zarr().open_group(store, mode="a", zarr_format=3)
        history = HistoryTable(root.create_group("history"))
        root.create_group("records")
        executions = ExecutionTable(root.create_group("executions"))
        root.attrs.put(_state({"history": 0, "records": [], "executions": 0}, writing=True))
        store.flush(last=COUNTS)
        # Last: a directory without this file is not a run.
        write_info(self._place, {**info, "run": self._identity})
        if self._beside:
            put_files(self._place, self._beside)
        self._store, self._root = store, root
        self._history, self._executions = history, executions

    def _holds_a_run(self) -> bool:
        return (self.directory / RUN_FILE).exists()

    def _reopen(self, end: Mapping[str, Any]) -> None:
        """Open the existing run, and truncate it before anything is appended."""
        from tailrace.runs.storage.stores import BufferedStore

        self._identity = str(read_info(self.directory).get("run"))
        store = BufferedStore(self._place)
        root = import_zarr().open_group(store, mode="r+", zarr_format=3)
        found = reopen(root, rows_before(root, end["step"]) if "step" in end else end)
        root.attrs.put(_state(found.counts, writing=True))
        store.flush(last=COUNTS)
        self._store, self._root = store, root
        self._history, self._executions = found.history, found.executions
        keys: list[Hashable] = [("reopened", number) for number in range(len(found.records))]
        self._tables = dict(zip(keys, found.records, strict=True))
        self._starts = dict(zip(keys, found.starts, strict=True))
        self._reopened = {t.tensors: key for key, t in self._tables.items()}

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        assert self._thread is not None
        # The thread does end: each of its waits has a limit.
        while self._thread.is_alive():
            self._thread.join(timeout=LOOK_S)
        self._thread = None
        self._let_go()

    def _let_go(self) -> None:
        self._lock.release()
        self._place.release()

    def _flush(self) -> None:
        """Wait until everything queued so far is on disk."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            while self._thread is not None and self._failure is None and self._answered < mine:
                self._changed.wait(timeout=0.1)
                thread = self._thread
                if self._closing and (thread is None or not thread.is_alive()):
                    return  # it wrote everything before it ended
                self._check_thread()

    def _check_thread(self) -> None:
        """Raise an error if the thread ended silently, instead of waiting for it forever."""
        thread = self._thread
        dead = thread is not None and not thread.is_alive() and not self._closing
        if dead and self._failure is None:
            self._failure = RunError(
                f"The thread that writes the run directory {str(self.directory)!r} has ended: what "
                f"came after {self._steps_written()} steps is not written."
            )

    def _steps_written(self) -> int:
        return self._history.columns.committed if self._history is not None else 0

    def _tell(self) -> None:
        """Raise the thread's error, once."""
        if self._failure is not None and not self._told:
            self._told = True
            raise self._failure

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._sentence("could not be written any further"):
                self._follow()
        except TailraceError as error:
            with self._changed:
                self._failure = error if isinstance(error, RunError) else RunError(str(error))
                self._queue.clear()
                self._queued_bytes = 0
                for table in [self._history, self._executions, *self._tables.values()]:
                    if table is not None:
                        table.columns.forget()
                self._changed.notify_all()

    def _follow(self) -> None:
        following = time.monotonic() + WRITE_EVERY_S
        ending = False
        while not ending:
            with self._changed:
                while not self._is_hurried() and (wait := following - time.monotonic()) > 0:
                    self._changed.wait(timeout=wait)
                taken = [done for done, _ in self._queue]
                ending, asked = self._closing, self._asked
            started = time.monotonic()
            pause = self._write(taken, writing=not ending) if taken or ending else 0.0
            following = started + max(WRITE_EVERY_S, min(pause, PAUSE_S))
            with self._changed:
                for _ in taken:
                    self._queued_bytes -= self._queue.popleft()[1]
                taken.clear()  # or the sleeping thread would keep them alive
                self._answered = asked
                self._changed.notify_all()

    def _is_hurried(self) -> bool:
        waiting = self._blocked or self._queued_bytes > MOST_WAITING
        return self._closing or self._asked > self._answered or waiting

    def _write(self, taken: list[Finished | _Mark], *, writing: bool) -> float:
        """Write executions, then commit them in one file; returns the seconds until the next write.

        Args:
            taken: the executions, and marks between them.
            writing: whether there may be more.
        """
        assert self._executions is not None
        waiting: list[Finished] = []
        for done in [*taken, _Mark()]:
            if isinstance(done, Finished):
                waiting.append(done)
                continue
            self._executions.append(waiting)
            for joined in join_executions(waiting):
                self._take(joined)
            waiting, done.rows = [], self._rows()
        return self._persist(lambda: self._commit(writing=writing))

    def _rows(self, between_fits: bool = False) -> dict[str, Any]:
        """The number of rows of the tables, and of records of earlier fits."""
        history, executions = self._history, self._executions
        records = [table.columns.rows for table in self._tables.values()]
        return {
            "history": 0 if history is None else history.columns.rows,
            "executions": 0 if executions is None else executions.columns.rows,
            "records": records,
            "starts": records if between_fits else list(self._starts.values()),
        }

    def _persist(self, commit: Callable[[], float]) -> float:
        """Commit, and retry while the disk is full; training continues meanwhile."""
        give_up = None
        while True:
            try:
                return commit()
            except OSError as error:
                full = not isinstance(error, TailraceError) and error.errno in FULL
                if not full or (give_up is not None and time.monotonic() > give_up):
                    raise
            if give_up is None:
                give_up = time.monotonic() + FULL_S
                logger.warning(
                    f"The disk of the run directory {str(self.directory)!r} is full. What is not "
                    f"written waits in memory; if there is no room in {FULL_S:g} s, the fit ends."
                )
            time.sleep(RETRY_S)

    def _commit(self, *, writing: bool) -> float:
        assert self._history is not None
        assert self._executions is not None
        assert self._store is not None
        self._place.check()
        self._lock.check()
        started = time.monotonic()
        history, tables = self._history.columns, [t.columns for t in self._tables.values()]
        executions = self._executions.columns
        counts = {
            "history": history.write(),
            "records": [table.write() for table in tables],
            "executions": executions.write(),
        }
        self._root.attrs.put(_state(counts, writing=writing))
        encoded, busy = time.monotonic(), time.thread_time()
        self._store.flush(last=COUNTS)
        for columns in (history, executions, *tables):
            columns.counted()
        self.writes += 1
        busy = encoded - started + time.thread_time() - busy
        return max(busy / SHARE, (time.monotonic() - encoded) / DISK_SHARE)

    def _take(self, done: Finished) -> None:
        assert self._history is not None
        if done.steps:
            self._history.append(done.first_step, done.scalars, done.weights, done.elements)
        for form, records in put_in_tables(done.parts).items():
            tensors = (records[0].kind, tuple(record.name for record in records))
            key = self._reopened.get(tensors, form)
            if key not in self._tables:
                group = self._root["records"].create_group(str(len(self._tables)), overwrite=True)
                self._tables[key] = RecordTable(group, records)
                self._starts[key] = 0
            self._tables[key].append(records)

    # -- what goes wrong --------------------------------------------------------------------------

    def _refuse_what_is_no_directory(self) -> None:
        if not self.directory.is_dir():
            raise RunError(
                f"run_dir is a directory. {str(self.directory)!r} is something else: give another."
            )

    def _refuse_what_is_there(self) -> None:
        self._refuse_what_is_no_directory()
        there = ""
        if (self.directory / RUN_FILE).exists():
            there = "holds one already"
        elif (self.directory / COUNTS).exists():
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
            steps = self._steps_written()
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            kept = f" The {steps} steps before are there: tr.open_run reads them." if steps else ""
            raise RunError(
                f"The run directory {str(self.directory)!r} {what}: {type(error).__name__}: "
                f"{text.rstrip('.')}.{kept}"
            ) from error


@dataclasses.dataclass
class _Mark:
    """A position in the queue, and the rows of the tables there."""

    rows: dict[str, Any] | None = None


def _state(counts: dict[str, Any], *, writing: bool) -> dict[str, Any]:
    """The attributes of the root, which readers rely on."""
    return {"format": FORMAT, "writing": writing, "committed": counts}


def _as_directory(given: Any) -> Path:
    """An absolute path, independent of later changes of the working directory."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise OptionError(
            f"run_dir is the path of a directory, made if it is not there. Received: {given!r}. For "
            f"the working directory itself, write '.'."
        )
    path = os.fspath(given)
    if isinstance(path, bytes) or "\0" in path:
        raise OptionError(f"run_dir is a text without null bytes. Received: {given!r}.")
    return Path(path).absolute()
