"""A run directory that is looked at again and again, while it grows and afterwards."""

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
"""The files that say what a run is, how many rows count, and why it was stopped."""

MOST_KEPT = 256
"""Digests of arrays that are kept in memory; the one that was used longest ago goes first."""

Kept = TypeVar("Kept")


class FollowedRun:
    """A run directory, readable or not yet.

    Attributes:
        directory: where it is.
        run: the run as it was last seen; None as long as there is none.
        problem: why it cannot be read, in a sentence; empty if it can.
        version: grows whenever something new was seen.
    """

    def __init__(self, directory: Any) -> None:
        self.directory = Path(directory)
        self.run: Run | None = None
        self.problem = ""
        self.version = 0
        self._lock = threading.RLock()
        self._seen: list[Any] = []
        self._kept: dict[Any, Any] = {}
        self.look()

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.directory.resolve().name

    def look(self) -> bool:
        """Look whether something was written since; returns whether there was."""
        found = [_signature(self.directory / name) for name in WATCHED]
        if found == self._seen:
            return False
        with self._lock:
            try:
                with self.reading():
                    self._read(is_same=self._seen[:1] == found[:1])
                self.problem = ""
            except RunError as error:
                self.problem = str(error)
            self._seen = found
            self.version += 1
        return True

    def _read(self, is_same: bool) -> None:
        if self.run is None or not is_same:
            self.run = None
            self._kept.clear()
            self.run = open_run(self.directory)
        else:
            before = len(self.run.history)
            self.run.refresh()
            if len(self.run.history) < before:  # it was cut back: what was summed up is wrong
                self._kept.clear()

    def readable(self) -> Run:
        """The run, or its problem as an error."""
        if self.run is None:
            raise RunError(self.problem or f"There is no run at '{self.directory}' yet.")
        return self.run

    def reading(self) -> AbstractContextManager[None]:
        """Whatever goes wrong inside is said as a sentence: files of a run may say anything."""
        return describing(self.directory, "what its files describe")

    def kept(self, key: Any, make: Callable[[], Kept]) -> Kept:
        """What was made for a key before, or what `make` makes now."""
        with self._lock:
            found = self._kept.pop(key) if key in self._kept else make()
            self._kept[key] = found
            while len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            return found

    @property
    def catalogue(self) -> Catalogue:
        """The tensors of the step that ran."""
        return self.kept("catalogue", lambda: self.readable().catalogue)

    @property
    def first_step(self) -> int:
        """The number of the first step."""
        return self.readable().history.first_step


def _signature(path: Path) -> tuple[int, ...] | None:
    """What changes whenever a file is replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
