"""A directory held open, so that writes reach it and no other.

Paths can change while a directory is written: a directory is removed, another takes its name, a link
replaces a folder. A path leads to whatever has the name now. A handle stays with the directory it was
opened for, and names below it are looked up without following links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from tailrace.errors import RunError, TailraceError

BY_HANDLE = os.open in os.supports_dir_fd and hasattr(os, "O_DIRECTORY")
"""Whether names can be looked up from a handle; otherwise paths are checked for links."""

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


class HeldDirectory:
    """A directory with an open handle from `hold` to `release`.

    Attributes:
        path: its path when it was opened.
        kind: what it is, for messages.
        option: the option that gives it.
        error: the class of errors.
    """

    def __init__(
        self,
        path: Path,
        kind: str = "run directory",
        option: str = "run_dir",
        error: type[TailraceError] = RunError,
    ) -> None:
        self.path, self.kind, self.option, self.error = path, kind, option, error
        self._handle: int | None = None
        self._identity: tuple[int, int] | None = None

    def hold(self) -> None:
        """Open it. It must be the directory that was held before, if any."""
        if BY_HANDLE and self._handle is None:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        # Also on a second `hold`: a fit that follows must find the directory of the one before.
        found = _identity(os.stat(self.path))
        self._identity = self._identity or found
        self.check()

    def release(self) -> None:
        """Close it; its identity is remembered."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def check(self) -> None:
        """Raise an error if the path no longer leads to the held directory."""
        try:
            # By path, though a handle is open: the question is where readers will look.
            now = os.stat(self.path)
        except FileNotFoundError:
            now = None
        if now is not None and _identity(now) == self._identity:
            return
        raise self.not_the_same("was removed" if now is None else "was replaced by another one")

    def not_the_same(self, what: str) -> TailraceError:
        """The error for a directory that is no longer the held one."""
        return self.error(
            f"The {self.kind} {str(self.path)!r} {what} while it was written: nothing more is "
            f"written. Leave it in place until the training has ended; a new Trainer may have another "
            f"{self.option}."
        )

    def open(self, name: str, flags: int) -> int:
        """Open a file below; links are not followed."""
        with self._inside(name) as (path, folder), self._explained(name):
            return os.open(path, flags | NOFOLLOW, 0o666, dir_fd=folder)

    def open_unnamed(self) -> int:
        """Open a new file that has no name, if the system and the file system have such files."""
        flag = getattr(os, "O_TMPFILE", 0)
        if not flag or self._handle is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return os.open(".", os.O_RDWR | flag, 0o600, dir_fd=self._handle)

    def open_folder(self, name: str) -> int:
        """Open a folder below, '' for the directory itself."""
        if name:
            return self.open(name, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        return os.open(self.path if self._handle is None else ".", os.O_RDONLY, dir_fd=self._handle)

    def rename(self, name: str, new: str) -> None:
        """Rename a file in its folder; replaces a file or link of that name."""
        with self._inside(name) as (path, folder):
            target = os.path.join(os.path.dirname(path), os.path.basename(new))
            os.replace(path, target, src_dir_fd=folder, dst_dir_fd=folder)

    def unlink(self, name: str) -> None:
        """Remove a file or a link."""
        with self._inside(name) as (path, folder):
            os.unlink(path, dir_fd=folder)

    def make_folder(self, name: str) -> set[str]:
        """Create a folder below; returns the folders whose entries changed, which must be synced."""
        changed = {name}
        parts = name.split("/") if name else []
        for depth in range(1, len(parts) + 1):
            below = "/".join(parts[:depth])
            # Level by level, each from its parent's handle: `makedirs` would follow a link in
            # between.
            with self._inside(below) as (path, folder), contextlib.suppress(FileExistsError):
                os.mkdir(path, dir_fd=folder)
                changed |= {below, "/".join(parts[: depth - 1])}
        with self._explained(name):
            os.close(self.open_folder(name))  # fails if it is a link or a file
        return changed

    def remove(self, name: str) -> None:
        """Remove a folder with its contents, or a file; a no-op if it does not exist."""
        with contextlib.suppress(FileNotFoundError), self._inside(name) as (path, folder):
            about = os.stat(path, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(about.st_mode):
                os.unlink(path, dir_fd=folder)
            elif folder is None:
                shutil.rmtree(path)
            else:
                shutil.rmtree(path, dir_fd=folder)

    @contextlib.contextmanager
    def _inside(self, name: str) -> Iterator[tuple[str, int | None]]:
        """A path and the handle to look it up from, with no links in between."""
        *above, last = name.split("/")
        # Names may come from a file of the run itself, which is not trusted.
        if any(part in ("", ".", "..") for part in (*above, last)):
            raise self.error(f"Names in a {self.kind} are plain. Received: {name!r}.")
        # Windows has no handles of folders. A link made between check and use is not noticed there.
        if self._handle is None:
            for depth in range(len(above)):
                if os.path.islink(os.path.join(self.path, *above[: depth + 1])):
                    raise self._is_a_link("/".join(above[: depth + 1]))
            yield os.path.join(self.path, *above, last), None
            return
        handle = self._handle
        try:
            for depth, part in enumerate(above):
                flags = os.O_RDONLY | os.O_DIRECTORY | NOFOLLOW
                with self._explained("/".join(above[: depth + 1])):
                    inner = os.open(part, flags, dir_fd=handle)
                if handle != self._handle:
                    os.close(handle)
                handle = inner
            yield last, handle
        finally:
            if handle != self._handle:
                os.close(handle)

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What O_NOFOLLOW gives for a link: ELOOP on Linux and macOS, EMLINK on FreeBSD; ENOTDIR
            # if a folder was expected.
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
                raise self._is_a_link(name) from error
            raise

    def _is_a_link(self, name: str) -> TailraceError:
        return self.error(
            f"A {self.kind} is written without following links, and {name!r} in {str(self.path)!r} is "
            f"one, or no folder. Remove it, or give {self.option} another directory."
        )


def _identity(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino
