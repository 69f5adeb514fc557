"""One writer to a directory: a lock that a process loses when it ends, however it ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from tailrace.errors import RunError

NAME = "lock"


class DirectoryLock:
    """The right to write in a directory; held from `acquire` to `release`.

    Where the system has `flock`, a process that dies leaves no lock behind. Elsewhere the file
    itself is the lock.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._file: IO[str] | None = None
        self._is_file = False

    def acquire(self) -> None:
        """Take the lock, or say who has it."""
        try:
            import fcntl
        except ImportError:  # not a Unix
            try:
                self._file = self._path.open("x")
                self._is_file = True
            except FileExistsError:
                raise self._taken() from None
        else:
            self._file = self._path.open("a+")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                error = self._taken()
                self._file.close()
                self._file = None
                raise error from None
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        """Give it back; nothing if it is not held."""
        if self._file is not None:
            # A file that is only locked stays: removed, it could be locked twice by two names.
            if self._is_file:
                self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def _taken(self) -> RunError:
        who = self._path.read_text(errors="replace").strip() if self._path.exists() else ""
        writer = f" (process {who})" if who.isdigit() else ""
        return RunError(
            f"A run directory has one writer at a time, and {str(self._path.parent)!r} is being "
            f"written{writer}. Give run_dir another directory, or wait until that fit has ended."
        )
