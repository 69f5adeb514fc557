"""One writer per directory: a lock that is released when its process ends, however it ends."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

from tailrace.errors import RunError
from tailrace.runs.storage.held import NOFOLLOW, HeldDirectory

NAME = "lock"
_CONTENT = 64
"""The bytes to read from the file, which holds a process id."""
_READERS_S, _PAUSE_S = 10.0, 0.02
"""How long to wait for readers, and between two tries: `is_locked` takes the lock for an instant, which
may be long on a busy machine."""


class DirectoryTaken(RunError):
    """Another process, or another writer of this one, has the lock."""


def is_locked(directory: Path) -> bool | None:
    """Whether a process writes in a directory; None if that cannot be found out.

    >>> is_locked(Path("/nowhere"))
    """
    try:
        import fcntl
    except ImportError:  # not a Unix: a process that died has left the file
        return None
    try:
        # O_NONBLOCK: opening a pipe of this name would wait for a writer.
        handle = os.open(directory / NAME, os.O_RDONLY | os.O_NONBLOCK | NOFOLLOW)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        # Shared: readers that ask at the same time do not see each other as writers.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(handle)
    return False


class DirectoryLock:
    """The exclusive right to write in a directory; held from `acquire` to `release`.

    With `flock`, a process that dies leaves no lock behind. On other systems the existence of the file
    is the lock.
    """

    def __init__(self, directory: HeldDirectory) -> None:
        self._directory = directory
        self._handle: int | None = None
        self._is_file = False

    def acquire(self) -> None:
        """Take the lock, or raise an error that says who has it."""
        try:
            import fcntl
        except ImportError:  # not a Unix
            try:
                handle = self._directory.open(NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                self._is_file = True
            except FileExistsError:
                raise self._taken(b"") from None
        else:
            handle = self._directory.open(NAME, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
            try:
                self._check_own(os.fstat(handle))
                _take(handle, fcntl)
            except BlockingIOError:
                error = self._taken(os.read(handle, _CONTENT))
                os.close(handle)
                raise error from None
            except BaseException:
                os.close(handle)
                raise
        self._handle = handle
        # For the message of a process that is refused. The lock itself is `flock`, not this text.
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())

    def check(self) -> None:
        """Raise an error if the lock file was removed or replaced: it then locks nothing."""
        if self._handle is None:
            return
        try:
            now = self._directory.open(NAME, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            same = False
        else:
            same = os.path.sameopenfile(now, self._handle)
            os.close(now)
        if not same:
            where = self._directory
            raise where.error(
                f"The file {NAME!r} in {str(where.path)!r} was removed or replaced while the "
                f"{where.kind} was written, so another process may write there too: nothing more is "
                f"written. Leave a {where.kind} alone until its training has ended."
            )

    def release(self) -> None:
        """Release the lock; a no-op if it is not held."""
        if self._handle is not None:
            # The file stays: if it were removed, two processes could each lock a file of that name.
            if self._is_file:
                self._directory.remove(NAME)
            else:
                import fcntl

                # Closing is not enough: processes forked meanwhile, such as the workers of a loader,
                # have the file open too.
                fcntl.flock(self._handle, fcntl.LOCK_UN)
            os.close(self._handle)
            self._handle = None

    def _check_own(self, about: os.stat_result) -> None:
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
            where = self._directory
            raise where.error(
                f"The file {NAME!r} of a {where.kind} is a file of its own. In {str(where.path)!r} it "
                f"is a pipe, a device, or another file's second name. Remove it, or give "
                f"{where.option} another directory."
            )

    def _taken(self, content: bytes) -> DirectoryTaken:
        who = content.decode(errors="replace").strip()
        writer = f" (process {who})" if who.isdigit() else ""
        return DirectoryTaken(
            f"A run directory has one writer at a time, and {str(self._directory.path)!r} is being "
            f"written{writer}. Give run_dir another directory, or wait until that fit has ended."
        )


def _take(handle: int, fcntl: Any) -> None:
    """Lock a file; `BlockingIOError` at once if a writer has it, and after a while if readers have."""
    give_up = time.monotonic() + _READERS_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise
        # As readers lock it: only a writer is in the way.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(handle, fcntl.LOCK_UN)
        time.sleep(_PAUSE_S)
