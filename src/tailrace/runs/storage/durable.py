"""Files that are there whole or not at all, also after a loss of power."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PARTIAL = ".partial"
"""The ending of a file that is not ready yet; it is overwritten by the next one of that name."""
THREADS, MOST_AT_ONCE = "tailrace-run-disk", 8
"""The threads that wait for the disk: their name, and how many there are while files are written."""

NOT_FOR_FOLDERS = (errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOTSUP)
"""What Windows, which opens no folders, and file systems that force none say to it."""


def put_files(root: Path, contents: Mapping[str, bytes]) -> None:
    """Write files and force them to the disk; each replaces the one of its name as a whole.

    All are written, then all are forced, so that the disk gets them together; only then are they
    given their names, so that no name ever belongs to a file of which the disk has a part.

    Args:
        root: the directory that the names are relative to.
        contents: what to write, by name.
    """
    paths = {os.path.join(root, name): content for name, content in contents.items()}
    changed: set[str] = set()
    try:
        for path, content in paths.items():
            changed |= _make_folder(os.path.dirname(path))
            with open(path + PARTIAL, "wb") as file:
                file.write(content)
        _at_once(lambda path: _force(path + PARTIAL, os.O_RDWR), paths)
        for path in paths:
            _rename(path + PARTIAL, path)
    except BaseException:
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path + PARTIAL)
        raise
    _at_once(_force_folder, changed)


def _at_once(call: Callable[[str], None], paths: Collection[str]) -> None:
    """Call for each path, several at a time: the disk then takes one turn for many of them."""
    if len(paths) < 2:
        for path in paths:
            call(path)
        return
    with ThreadPoolExecutor(min(len(paths), MOST_AT_ONCE), thread_name_prefix=THREADS) as pool:
        list(pool.map(call, paths))


def _make_folder(folder: str) -> set[str]:
    """Make a folder; returns it and those that it is new in, as their lists of files change."""
    changed = {folder}
    above = folder
    while not os.path.isdir(above) and os.path.dirname(above) != above:
        above = os.path.dirname(above)
        changed.add(above)
    if len(changed) > 1:
        os.makedirs(folder, exist_ok=True)
    return changed


def _rename(path: str, name: str) -> None:
    os.replace(path, name)


def _force(path: str, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _force_folder(folder: str) -> None:
    try:
        _force(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno not in NOT_FOR_FOLDERS:
            raise
