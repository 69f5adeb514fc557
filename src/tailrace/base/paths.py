"""Checks of arguments that are paths, and what to change where one cannot be used."""

import errno
import os
from pathlib import Path
from typing import TypeGuard

from tailrace.errors import OptionError, TailraceError


def is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a value can be the path of a file: a text, or an object that has one (`pathlib.Path`).

    >>> is_path("runs/first"), is_path(Path("runs")), is_path(b"runs"), is_path(""), is_path(3)
    (True, True, False, False, False)
    """
    if not isinstance(value, str | os.PathLike):
        return False
    text = os.fspath(value)
    # The operating system ends a path at a null byte: it would be another path.
    return isinstance(text, str) and bool(text) and "\0" not in text


def file_in_the_way(directory: Path) -> Path | None:
    """The file that a path of a directory is, or goes through; None if there is none.

    >>> file_in_the_way(Path("/", "no such folder", "runs")) is None
    True
    """
    there = next((one for one in (directory, *directory.parents) if os.path.exists(one)), None)
    return None if there is None or os.path.isdir(there) else there


def check_path(
    name: str, value: object, *, what: str = "directory", error: type[TailraceError] = OptionError
) -> Path:
    """An absolute path, independent of later changes of the working directory; or an error.

    Args:
        name: the name of the argument.
        value: its value.
        what: what the path leads to.
        error: the error class to raise.

    >>> check_path("path", "runs/first").name
    'first'
    """
    if is_path(value):
        # Not resolved: a link stays the name that the user gave, and need not exist yet.
        return Path(value).absolute()
    raise error(
        f"{name} is the path of a {what}: a text, or a pathlib.Path. Received: {name}={value!r:.80}."
    )


_WRITING = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        "Give this user the right to write in that folder, or give a path in another one.",
    ),
    errno.EROFS: "Its file system is read-only: give a path on another one.",
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT), "Make room there, or give a path on another disk."
    ),
    errno.ENOENT: "Make the folder first, or give a path in one that exists.",
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST), "A part of the path is a file: give another path."
    ),
    errno.EISDIR: "It is a folder: give the path of a file.",
    errno.ENAMETOOLONG: "Give a shorter name.",
}
_READING = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        "Give this user the right to read it, or a copy that it may read.",
    ),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "Give the path of one that exists."),
    errno.EISDIR: "It is a folder: give the path of a file.",
}


def remedy(error: BaseException, *, reading: bool = False) -> str:
    """What to change so that a file can be written or read: a sentence, or nothing.

    Args:
        error: what the operating system raised; other exceptions have no remedy.
        reading: whether it was to be read.

    >>> remedy(PermissionError(errno.EACCES, "Permission denied"))
    'Give this user the right to write in that folder, or give a path in another one.'
    >>> remedy(ValueError("no JSON"))
    ''
    """
    if not isinstance(error, OSError):
        return ""
    found = (_READING if reading else _WRITING).get(error.errno or 0)
    return found or "Look at the disk, or give another path."


def in_words(error: OSError, *, reading: bool = False) -> str:
    """Why a file cannot be written or read, and what to change.

    Args:
        error: what the operating system raised.
        reading: whether it was to be read.

    >>> in_words(OSError(errno.ENOSPC, "No space left on device"))
    'No space left on device. Make room there, or give a path on another disk.'
    """
    return f"{(error.strerror or str(error)).rstrip('.')}. {remedy(error, reading=reading)}"
