"""A run directory that is read repeatedly, while it grows and afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from tailrace.errors import RunError
from tailrace.runs.info import RUN_FILE
from tailrace.runs.nonfinite_reports import REPORTS
from tailrace.runs.reader import Run, open_run
from tailrace.runs.tables.stored import describing
from tailrace.taps.catalogue import Catalogue

WATCHED = (RUN_FILE, "zarr.json", REPORTS)
"""The files with a run's description, its number of committed rows, and why it was stopped."""

MOST_KEPT = 256
"""The most cached digests of arrays; the least recently used is dropped first."""

Kept = TypeVar("Kept")


class FollowedRun:
    """A run directory, readable or not yet.

    Attributes:
        directory: its path.
        run: the run when it was last read; None as long as there is none.
        problem: why it cannot be read, as a sentence; empty if it can.
        version: incremented whenever something new was read.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.run: Run | None = None
        self.problem = ""
        self.version = 0
        self._lock = threading.RLock()
        self._seen: list[Any] = []
        self._interrupted: bool | None = None
        self._kept: dict[Any, Any] = {}
        self.look()

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.directory.resolve().name

    def look(self) -> bool:
        """Check for changes; returns whether there were any."""
        # Taken before the files are read: what is written while they are is new the next time.
        found = [_signature(self.directory / name) for name in WATCHED]
        # The death of a writer changes no file.
        if found == self._seen and self._is_interrupted() == self._interrupted:
            return False
        with self._lock:
            try:
                with self.reading():
                    # Another description may mean another run, for which the cache is wrong.
                    self._read(is_same=self._seen[:1] == found[:1])
                self.problem = ""
            except RunError as error:
                self.problem = str(error)
            self._seen, self._interrupted = found, self._is_interrupted()
            self.version += 1
        return True

    def _read(self, is_same: bool) -> None:
        if self.run is None or not is_same:
            try:
                # Until it is open, requests in other threads are answered from the old one.
                new = open_run(self.directory)
            except BaseException:
                # If the new one cannot be opened, the old one must not be shown in its place.
                self.run = None
                raise
            finally:
                self._kept.clear()
            self.run = new
        else:
            before = len(self.run.history)
            self.run.refresh()
            if len(self.run.history) < before:  # it was truncated: cached sums are wrong
                self._kept.clear()

    def _is_interrupted(self) -> bool | None:
        run = self.run  # once: another thread may be opening it again
        return None if run is None else run.is_interrupted

    def readable(self) -> Run:
        """The run; raises its problem as an error."""
        run = self.run  # once: another thread may be opening it again
        if run is None:
            raise RunError(self.problem or f"There is no run at '{self.directory}' yet.")
        return run

    def reading(self) -> AbstractContextManager[None]:
        """Turn any error in this context into a sentence: files of a run are untrusted."""
        return describing(self.directory, "what its files describe")

    def kept(self, key: object, make: Callable[[], Kept]) -> Kept:
        """The cached value of a key, or a new one from `make`."""
        with self._lock:
            # Taken out and put back: a dict keeps its order, so the first key is the least recently
            # used.
            found = self._kept.pop(key) if key in self._kept else make()
            self._kept[key] = found
            while len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            return found

    @property
    def catalogue(self) -> Catalogue:
        """The tensors of the training step."""
        return self.kept("catalogue", lambda: self.readable().catalogue)

    @property
    def first_step(self) -> int:
        """The index of the first step."""
        return self.readable().history.first_step


def _signature(path: Path) -> tuple[int, ...] | None:
    """A value that changes whenever a file is replaced."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # also a name that no file can have
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
