"""Reading untrusted files, and writing files atomically.

A path may be a pipe that never delivers, a device that never ends, or a few bytes that claim to be
terabytes. So only regular files are opened, and a size is compared with a limit before memory is
allocated. Users can raise the limit.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tailrace.base.messages import shown
from tailrace.errors import OptionError, TailraceError

LIMIT = "TAILRACE_READ_LIMIT"
"""The environment variable that sets the limit, in bytes, or as `8GiB`."""

DEFAULT_LIMIT = 4 << 30
"""The default limit of the bytes of one array from a file."""

_DESCRIPTION_SHARE, _DESCRIPTION_LEAST = 64, 1 << 20
"""A description (JSON) takes many times more memory than it has bytes; a short one is always read."""

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def read_limit(given: object = None) -> int:
    """The limit in bytes: the argument, the environment variable, or the default.

    >>> read_limit("2GiB"), read_limit(1000)
    (2147483648, 1000)
    """
    where, value = ("limit", given) if given is not None else (LIMIT, os.environ.get(LIMIT))
    return byte_limit(where, value, DEFAULT_LIMIT, "one array of a file")


def byte_limit(where: str, value: object, default: int, what: str) -> int:
    """A limit in bytes.

    Args:
        where: the argument or environment variable that gives it.
        value: its value; None or an empty text for the default.
        default: the default.
        what: what it limits, for the message.
    """
    if value is None or (isinstance(value, str) and not value):
        return default
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        digits = value.strip().rstrip("kKmMgGtTiIbB")
        unit = value.strip()[len(digits) :].upper()
        if digits.strip().isascii() and digits.strip().isdigit() and unit in _UNITS:
            return max(1, int(digits) * _UNITS[unit])
    raise OptionError(
        f"{where} is the most that {what} may take in memory: a number of bytes, or a text such as "
        f"'8GiB'. Received: {where}={value!r}."
    )


def too_large(
    what: str, size: int, limit: int, error: type[TailraceError], share: int = 1
) -> TailraceError:
    """The error for a size beyond the limit, of which `limit` is the given fraction."""
    enough = _round(size * share)
    return error(
        f"{what} takes {size:,} bytes, and at most {limit:,} are read from a file unless you ask for "
        f"more. If you trust its source, raise the limit: set {LIMIT}={enough}, or pass "
        f"limit='{enough}' where the call has it."
    )


def _round(size: int) -> str:
    """A sufficient limit, as text.

    >>> _round(5 << 30), _round(1 << 20)
    ('6GiB', '1GiB')
    """
    return f"{(size >> 30) + 1}GiB"


def json_checksum(value: object) -> int:
    """A checksum of a value of JSON, whatever the order of its keys.

    >>> json_checksum({"a": 1, "b": 2}) == json_checksum({"b": 2, "a": 1})
    True
    """
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def open_regular(path: str | os.PathLike[str], error: type[TailraceError]) -> BinaryIO:
    """Open a regular file for reading; anything else is refused without waiting for it.

    Raises:
        OSError: as `open` does.
    """
    # Non-blocking: opening a pipe without a writer would never return.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    # Of the open file, not of the path: what the path names may be replaced between two looks.
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
        raise error(
            f"Only regular files are read. '{shown(str(path))}' is a pipe, a socket or a device."
        )
    return os.fdopen(handle, "rb")


def read_bytes(
    path: str | os.PathLike[str],
    error: type[TailraceError],
    limit: int | None = None,
    *,
    description: bool = False,
) -> bytes:
    """The content of a regular file within the limit.

    Args:
        path: the file.
        error: the error class for a pipe, a device or a file that is too large.
        limit: the limit in bytes; None for that of `read_limit`.
        description: whether it is JSON, which has a smaller limit.

    Raises:
        OSError: as `open` does.
    """
    with open_regular(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(path, size, error, limit, description)
        return file.read(size)  # not further, if it has grown meanwhile


def check_description(path: str | os.PathLike[str], error: type[TailraceError]) -> None:
    """Refuse a description (JSON) that is too large, where another library reads it.

    Raises:
        OSError: as `os.stat` does.
    """
    _check_size(path, os.stat(path).st_size, error, None, description=True)


def _check_size(
    path: str | os.PathLike[str],
    size: int,
    error: type[TailraceError],
    limit: int | None,
    description: bool,
) -> None:
    most, share = read_limit() if limit is None else limit, 1
    if description:
        share = _DESCRIPTION_SHARE
        most = max(_DESCRIPTION_LEAST, most // share)
    if size > most:
        raise too_large(f"The file '{shown(str(path))}'", size, most, error, share)


def read_head(path: str | os.PathLike[str], count: int, error: type[TailraceError]) -> bytes:
    """The first `count` bytes of a regular file, or as many as there are."""
    with open_regular(path, error) as file:
        return file.read(count)


def parse_json(text: bytes | str) -> Any:
    """Parse JSON; raises a ValueError for any defect.

    >>> parse_json(b'{"a": 1}')
    {'a': 1}
    """
    try:
        return json.loads(text)
    # `json` recurses: a few kilobytes of brackets exceed Python's limit, which is no ValueError.
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(
    path: str | os.PathLike[str], error: type[TailraceError], limit: int | None = None
) -> Any:
    """The JSON in a file, within the limit for descriptions.

    Raises:
        OSError: as `open` does.
        ValueError: it is no JSON.
    """
    return parse_json(read_bytes(path, error, limit, description=True))


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets its name when the context ends without an error.

    Until then it has a temporary name in the same directory. An existing link is replaced, not
    followed.
    """
    # In the same directory, because a rename is atomic only within one file system.
    part = path.with_name(f"{path.name}.part")
    with contextlib.suppress(FileNotFoundError):
        part.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(part, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            # Before the rename: after a loss of power the name must not lead to an empty file.
            os.fsync(handle)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
