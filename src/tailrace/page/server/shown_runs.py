"""The runs that a page shows: those that were named, and all runs of folders, also later ones."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

from tailrace.page.followed import FollowedRun
from tailrace.runs.info import RUN_FILE


class ShownRuns(Sequence[FollowedRun]):
    """Runs by number; a number stays that of its run, and later runs get further numbers.

    Args:
        directories: run directories, or folders of them.

    Raises:
        RunError: a directory does not exist.
    """

    def __init__(self, directories: Iterable[str | os.PathLike[str]]) -> None:
        self._runs: list[FollowedRun] = []
        self._folders: list[Path] = []
        self._known: set[Path] = set()
        self._lock = threading.Lock()
        for directory in map(Path, directories):
            if not os.path.isdir(directory):  # pathlib raises for a name that is too long
                FollowedRun(directory).readable()  # raises an error that describes what is there
            inside = _inside(directory)
            # One without runs may become a run, or get some, while it is viewed.
            for path in inside or [directory]:
                self._add(path)
            if not (directory / RUN_FILE).exists():
                self._folders.append(directory)

    @overload
    def __getitem__(self, number: int) -> FollowedRun: ...
    @overload
    def __getitem__(self, number: slice) -> list[FollowedRun]: ...
    def __getitem__(self, number: int | slice) -> FollowedRun | list[FollowedRun]:
        return self._runs[number]

    def __len__(self) -> int:
        return len(self._runs)

    def find(self) -> None:
        """Add the runs that are new in the folders."""
        with self._lock:  # each page looks in a thread of its own
            for folder in self._folders:
                for path in _inside(folder):
                    if path not in self._known:
                        self._add(path, in_place_of=folder)

    def _add(self, path: Path, in_place_of: Path | None = None) -> None:
        if path in self._known:  # named twice, or in a folder that is named too
            return
        self._known.add(path)
        made = FollowedRun(path)
        for number, run in enumerate(self._runs):
            # A folder that had no runs, and was shown itself until now.
            if run.directory == in_place_of:
                made.version = run.version + 1  # a page has seen that one
                self._runs[number] = made
                return
        self._runs.append(made)


def _inside(folder: Path) -> list[Path]:
    """The runs in a folder; none if it is a run itself, or cannot be read."""
    try:
        if (folder / RUN_FILE).exists():
            return []
        return sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
    except OSError:
        return []
