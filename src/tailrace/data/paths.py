"""Checks of arguments that are paths."""

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
