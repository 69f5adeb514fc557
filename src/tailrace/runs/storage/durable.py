"""Files that are complete or absent, even after a power failure.

The standard library renames atomically and no more; packages for atomic writing sync one file after the
other, and open by path. Here many files are synced together, relative to a directory that is held open.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tailrace.runs.storage.held import HeldDirectory

PARTIAL = ".partial"
"""The suffix of an unfinished file; a leftover one is replaced."""
THREADS, MOST_AT_ONCE = "tailrace-run-disk", 8
"""The threads that wait for the disk: their name and their number."""

NOT_FOR_FOLDERS = (errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOTSUP)
"""The errors of Windows, which cannot open folders, and of file systems that cannot sync them."""


def put_files(root: HeldDirectory, contents: Mapping[str, bytes]) -> None:
    """Write files and sync them to disk; each atomically replaces the file of its name.

    All are written, then all are synced, so that the disk handles them together; only then are they
    renamed, so that no name ever belongs to a file that is partly on disk.

    Args:
        root: the directory that the names are relative to.
        contents: the content of each file, by name.
    """
    root.check()
    changed: set[str] = set()
    try:
        for name, content in contents.items():
            # Folders that were made, or got a new name in them, are synced too: a file whose folder
            # entry is lost is lost.
            changed |= root.make_folder(name.rpartition("/")[0])
            write_file(root, name + PARTIAL, content)
        # Rename before sync would be atomic for readers, but not for a power failure: the new name
        # could lead to empty data.
        _at_once(lambda name: sync_file(root, name + PARTIAL), contents)
        root.check()  # a file in a directory that lost its name would be unreachable
        for name in contents:
            rename_file(root, name + PARTIAL, name)
    # Also for Ctrl-C. Leftovers are harmless, but a full disk needs the room.
    except BaseException:
        for name in contents:
            with contextlib.suppress(Exception):
                root.unlink(name + PARTIAL)
        raise
    _at_once(lambda name: sync_folder(root, name), changed)


# The four calls that reach the disk. They are separate and public because a disk fails in each of them
# in its own way, and tests put such failures in their place.


def write_file(root: HeldDirectory, name: str, content: bytes) -> None:
    """Write a new file; a leftover of its name is removed first."""
    with contextlib.suppress(FileNotFoundError):
        root.unlink(name)  # a symbolic or hard link may be in its place
    # O_EXCL: if anything appears under the name after the unlink, fail rather than write through
    # it.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(root.open(name, flags), "wb") as file:
        file.write(content)


def _at_once(call: Callable[[str], None], names: Collection[str]) -> None:
    """Call for each name, in parallel: the disk then handles many of them at once."""
    if len(names) < 2:
        for name in names:
            call(name)
        return
    # `fsync` waits without the interpreter's lock.
    with ThreadPoolExecutor(min(len(names), MOST_AT_ONCE), thread_name_prefix=THREADS) as pool:
        # `list` raises the first error; without it the results, and errors, would be dropped.
        list(pool.map(call, names))


def rename_file(root: HeldDirectory, name: str, new: str) -> None:
    """Rename a file in its folder."""
    root.rename(name, new)


def sync_file(root: HeldDirectory, name: str) -> None:
    """Sync the content of a file to disk."""
    _force_handle(root.open(name, os.O_RDWR))


def sync_folder(root: HeldDirectory, name: str) -> None:
    """Sync the names in a folder to disk."""
    with _where_folders_can_be_forced():
        _force_handle(root.open_folder(name))


def force_tree(folder: Path) -> None:
    """Sync all files below a folder that another library wrote, and their names, to disk."""
    for place, _, names in os.walk(folder, onerror=_raised):
        for name in names:
            _force_handle(os.open(os.path.join(place, name), os.O_RDONLY))
        force_folder(Path(place))


def _raised(error: OSError) -> None:
    # Without it `os.walk` passes over folders that cannot be listed: their files would not be synced.
    raise error


def force_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    with _where_folders_can_be_forced():
        _force_handle(os.open(folder, os.O_RDONLY))


@contextlib.contextmanager
def _where_folders_can_be_forced() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_FOR_FOLDERS:
            raise


def _force_handle(handle: int) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
