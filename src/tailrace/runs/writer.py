"""The writer of a run directory: the sink of a training loop.

A fit queues its executions (`write_queue`), whose thread appends them to the tables of the run
(`tables.run_tables`) and commits them. This file has the rest: whose directory it is, how a run is
begun, taken up again, rewound and ended, and errors in words. Everything is synced to disk in order, so
that what is committed is complete however the writer, or the machine, stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tailrace.base.paths import remedy
from tailrace.errors import NonFiniteError, OptionError, RunError, TailraceError
from tailrace.records.record import Source
from tailrace.records.sinks import Finished, Validated
from tailrace.runs.compilations import add_compilations
from tailrace.runs.info import RUN_FILE, read_info, write_info
from tailrace.runs.interventions import add_intervention
from tailrace.runs.nonfinite_reports import add_report
from tailrace.runs.storage.durable import put_files
from tailrace.runs.storage.files import import_zarr
from tailrace.runs.storage.held import HeldDirectory
from tailrace.runs.storage.lock import DirectoryLock
from tailrace.runs.tables.run_tables import COUNTS, GROUPS, RunTables
from tailrace.runs.write_queue import Mark, WriteQueue, retried_while_full

CREATING = "creating"
"""The file that exists while a run is created: other files next to it belong to no run yet."""

NO_ROWS = {"history": 0, "executions": 0, "validations": 0, "records": [], "starts": []}
"""The position of a mark in a run that is not begun."""


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

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        import_zarr()
        self.directory = _as_directory(directory)
        self.writes = self._interventions = 0
        self._place = HeldDirectory(self.directory)
        self._lock = DirectoryLock(self._place)
        # Written into the run. A path, and even an inode, may be used again by another run.
        self._identity = uuid.uuid4().hex
        self._tables: RunTables | None = None
        self._queue: WriteQueue | None = None
        self._taken_up: Mapping[str, Any] | None = None
        self._back: dict[str, Any] | None = None
        self._beside: dict[str, bytes] = {}
        self._compiled: list[Mapping[str, Any]] = []
        self._compiling = threading.Lock()
        with self._sentence("cannot be looked at"):
            if os.path.lexists(self.directory):
                self._refuse_what_is_no_directory()

    # -- during a fit -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def fitting(self, info: Mapping[str, Any], goes_on: bool = False) -> Iterator[None]:
        """Write executions until the context ends; then all of them are on disk."""
        queue = self._begin(info, goes_on)
        try:
            yield
        except BaseException as error:
            # Before `_end`, which releases the directory.
            if isinstance(error, NonFiniteError):
                # The error itself is more important than its copy.
                with contextlib.suppress(OSError):
                    add_report(self._place, error)
            self._end(queue)
            raise
        self._end(queue)
        # Only here: after an error in the fit, that one is raised, not the disk's.
        queue.raise_failure()

    def execution(self, done: Finished) -> None:
        """Queue one execution; waits only if too much is queued."""
        assert self._queue is not None
        self._queue.put(done)

    def validation(self, validated: Validated) -> None:
        """Queue one validation."""
        assert self._queue is not None
        self._queue.put(validated)

    def compilation(self, row: Mapping[str, Any]) -> None:
        """Store a compilation; if the directory cannot be written, `execution` reports it."""
        # A program that is compiled in a thread may be ready after its fit has ended. The directory is
        # then released, and perhaps another process's: the row waits for the next fit.
        with self._compiling:
            self._compiled.append(row)
            if self._queue is not None and self._queue.running:
                self._put_compilations()

    def _put_compilations(self) -> None:
        rows, self._compiled = self._compiled, []
        if rows:
            with contextlib.suppress(OSError, RunError):
                add_compilations(self._place, rows)

    def mark(self) -> Callable[[], dict[str, Any] | None]:
        """Mark the current end of the queue.

        Returns:
            A function that waits until everything before it is on disk, and returns the number of rows
            of each table and whose they are, for `take_up`.
        """
        mark = Mark()
        # No thread writes, so the tables can be asked directly.
        if self._queue is None or not self._queue.put_mark(mark):
            mark.rows = NO_ROWS if self._tables is None else self._tables.rows(between_fits=True)

        def rows() -> dict[str, Any] | None:
            self.flush()
            if mark.rows is None:  # its error was raised before, and is raised once
                raise RunError(
                    f"The run directory {str(self.directory)!r} could not be written up to here, and "
                    f"a checkpoint is never ahead of it: none is written."
                )
            return {**mark.rows, "run": self._identity}

        return rows

    def flush(self) -> None:
        """Wait until everything queued so far is on disk."""
        if self._queue is not None:
            self._queue.flush()
            self._queue.raise_failure()

    def stored(self) -> dict[tuple[str, str], list[Source]]:
        """The records of this fit, or of the last one, on disk."""
        if self._tables is None:
            return {}
        if self._queue is not None:
            self._queue.flush()
        return self._tables.stored(self.directory)

    def unnamed_file(self) -> int:
        """Open a file without a name in the directory, during a fit; `OSError` where there is none."""
        return self._place.open_unnamed()

    # -- between fits -----------------------------------------------------------------------------

    def take_up(self, end: Mapping[str, Any] | None) -> None:
        """Continue the run in the directory, if there is one.

        Args:
            end: the position of a mark; rows after it are cut off, because they come again. None: the
                fit had no run.

        Raises:
            RunError: the run in the directory is not that of the mark.
        """
        self.check_belongs(end)
        if self._back is not None:  # that was recorded when this fit began
            self._interventions, self._back = self._interventions + 1, None
        # Later fits of this writer continue its own tables.
        if self._tables is None and end is not None:
            self._taken_up = end

    def check_belongs(self, end: Mapping[str, Any] | None) -> None:
        """Refuse to continue another run than that of a mark: its rows would be cut off."""
        if end is None:
            return
        run = end.get("run")
        if not self.holds_a_run:
            if run is not None and self._tables is None:
                # Begun again, it still belongs to these checkpoints, should the process be killed
                # before the next one of them.
                self._identity = str(run)
            return
        with self._sentence("cannot be read"):
            info = read_info(self.directory)
        theirs, ours = info.get("checkpoint"), end.get("checkpoint")
        if run is None:
            # Of earlier versions the mark does not say whose it is. The run says where its checkpoints
            # are; if they are no longer there, both may have been moved.
            same = theirs in (None, ours) or not os.path.isdir(str(theirs))
        else:
            same = info.get("run") == run
        if not same:
            raise RunError(
                f"A run directory belongs to one training, and {str(self.directory)!r} has the run of "
                f"another one than the checkpoints in {ours!r} (its own: {theirs!r}). To resume would "
                f"cut off its rows. Give run_dir= the directory of this training, which may have been "
                f"moved, or a new one."
            )

    def go_back(self, step: int, end: int) -> None:
        """The next fit begins at a step before the end of the last one: it cuts off rows after it."""
        if self._queue is not None and self._queue.running:
            return  # a model that is called step by step has its run open
        # After `rewind` it does so anyway.
        if (self._taken_up or {}).get("step", step + 1) > step:
            reason = "the state was restored"
            self._back = {"kind": "restore", "step": step, "from": end, "reason": reason}

    def rewind(self, step: int, said: Mapping[str, Any]) -> None:
        """Record that training went back to a step; the next fit cuts off later rows. Between fits.

        Args:
            step: rows of this step and later ones are cut off.
            said: the entry for `interventions.json`.
        """
        if not self.holds_a_run:
            return
        with self._sentence("cannot be written"):
            self._place.hold()
            try:
                self._lock.acquire()
                add_intervention(self._place, dict(said), self._interventions)
                self._interventions += 1
            finally:
                self._let_go()
        # Rows are cut off by the next fit, not now: until it begins, the run is as it was, and can be
        # read.
        self._tables, self._taken_up = None, {"step": step}

    def keep(self, name: str, text: str) -> None:
        """Store a file in the run directory; before the first fit, it is stored when that begins."""
        self._beside[name] = text.encode()
        if self._tables is not None:
            with self._sentence("cannot be written"):
                # A fit holds the directory already; releasing it here would close the handle it
                # writes through.
                held = self._queue is not None and self._queue.running
                if not held:
                    self._place.hold()
                try:
                    put_files(self._place, {name: self._beside[name]})
                finally:
                    if not held:
                        self._place.release()

    # -- the beginning and the end of a fit -------------------------------------------------------

    def _begin(self, info: Mapping[str, Any], goes_on: bool) -> WriteQueue:
        with self._sentence("cannot be written"):
            if self._tables is None:  # created only once: a second one would be another directory
                self.directory.mkdir(parents=True, exist_ok=True)
            try:
                self._place.hold()
                self._lock.acquire()
                if self._tables is not None:
                    self._check_same_run()
                    if self._back is not None:
                        self._tables = self._cut_off(self._back, {})
                elif self._taken_up and self.holds_a_run:
                    self._identity = str(read_info(self.directory).get("run"))
                    self._tables = self._cut_off(self._back, self._taken_up)
                else:
                    self._remove_unfinished(info)
                    self._refuse_what_is_there()
                    self._tables = self._created(info)
            except BaseException:
                self._let_go()
                raise
        if not goes_on and (self._taken_up is None or self._back is not None):
            # A resumed fit continues: its records so far belong to it.
            self._tables.begin_fit()
        self._taken_up = self._back = None
        with self._compiling:
            self._put_compilations()
            opened = _OpenRun(self._place, self._lock, self._tables, self._count_write)
            self._queue = WriteQueue(opened)
        return self._queue

    def _cut_off(self, back: dict[str, Any] | None, end: Mapping[str, Any]) -> RunTables:
        """The tables up to the position of a mark, without rows of steps that were undone since."""
        if back is None:
            return RunTables.reopened(self._place, end)
        add_intervention(self._place, back, self._interventions)
        self._interventions += 1
        return RunTables.reopened(self._place, end, back["step"])

    def _created(self, info: Mapping[str, Any]) -> RunTables:
        # First: whatever a killed process leaves next to this file belongs to no run, and the next
        # one may remove it.
        put_files(self._place, {CREATING: b""})
        tables = RunTables.create(self._place)
        # Last: a directory without this file is not a run.
        write_info(self._place, {**info, "run": self._identity})
        self._place.remove(CREATING)
        if self._beside:
            put_files(self._place, self._beside)
        return tables

    def _remove_unfinished(self, info: Mapping[str, Any]) -> None:
        """Remove what a process left that was killed before its training had begun."""
        if self.holds_a_run:
            if not self._never_began(info):
                return
            put_files(self._place, {CREATING: b""})
        elif not (self.directory / CREATING).is_file():
            return
        # The description first: without it the rest is no run, should this process be killed here.
        for name in (RUN_FILE, COUNTS, *GROUPS):
            self._place.remove(name)

    def _never_began(self, info: Mapping[str, Any]) -> bool:
        """Whether the run there has no rows, and waits for the first checkpoint of this training."""
        from tailrace.runs.tables.stored import open_root

        where = info.get("checkpoint")
        # Only a fit with checkpoints starts again by itself, and only its own directory may be
        # removed.
        if where is None or str(read_info(self.directory).get("checkpoint")) != str(where):
            return False
        counts: Any = open_root(self.directory).attrs["committed"]
        return not counts["history"]

    def _end(self, queue: WriteQueue) -> None:
        with self._compiling:
            queue.end()
            self._let_go()

    def _let_go(self) -> None:
        self._lock.release()
        self._place.release()

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

    def _check_same_run(self) -> None:
        """Between fits the directory is not held, and another one may have taken its name."""
        there = self.holds_a_run and read_info(self.directory).get("run")
        if there != self._identity:
            raise self._place.not_the_same("was replaced by another one")

    @property
    def holds_a_run(self) -> bool:
        """Whether there is a run in the directory, of this writer or of another one."""
        return (self.directory / RUN_FILE).exists()

    def _count_write(self) -> None:
        self.writes += 1

    def _sentence(self, what: str) -> contextlib.AbstractContextManager[None]:
        return _in_words(self.directory, what, self._tables)


@dataclasses.dataclass(frozen=True)
class _OpenRun:
    """A run during a fit: where its queue writes to, in the thread of the queue.

    Attributes:
        place: the directory.
        lock: the right to write there.
        tables: the tables.
        count: called after each write.
    """

    place: HeldDirectory
    lock: DirectoryLock
    tables: RunTables
    count: Callable[[], None]

    def write(
        self, queued: list[Finished | Validated | Mark], *, writing: bool
    ) -> tuple[float, float]:
        """Append executions and validations, then commit them in one file."""
        with _in_words(self.place.path, "could not be written any further", self.tables):
            waiting: list[Finished | Validated] = []
            marked: list[tuple[Mark, dict[str, Any]]] = []
            # The mark at the end takes in what comes after the last mark of the queue.
            for done in [*queued, Mark()]:
                if not isinstance(done, Mark):
                    waiting.append(done)
                    continue
                self.tables.append(waiting)
                waiting = []
                marked.append((done, self.tables.rows()))
            took = retried_while_full(lambda: self._commit(writing=writing), self.place.path)
            # Not before: a checkpoint of rows that are not on disk could not be resumed.
            for mark, rows in marked:
                mark.rows = rows
            self.count()
            return took

    def failed(self) -> None:
        """Drop what could not be written."""
        self.tables.forget()

    def ended_silently(self) -> RunError:
        """The error for a thread that has died without one."""
        return RunError(
            f"The thread that writes the run directory {str(self.place.path)!r} has ended: what "
            f"came after {self.tables.steps} steps is not written."
        )

    def _commit(self, *, writing: bool) -> tuple[float, float]:
        # Each time: between two writes, another program may have removed the directory or the lock.
        self.place.check()
        self.lock.check()
        return self.tables.commit(writing=writing)


@contextlib.contextmanager
def _in_words(directory: Path, what: str, tables: RunTables | None) -> Iterator[None]:
    """Turn whatever goes wrong into a sentence about the directory."""
    try:
        yield
    except TailraceError:
        raise
    except Exception as error:
        steps = 0 if tables is None else tables.steps
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        kept = f" The {steps} steps before are there: tr.open_run reads them." if steps else ""
        raise RunError(
            f"The run directory {str(directory)!r} {what}: {type(error).__name__}: "
            f"{text.rstrip('.')}.{kept} {remedy(error)}".rstrip()
        ) from error


def _as_directory(given: object) -> Path:
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
