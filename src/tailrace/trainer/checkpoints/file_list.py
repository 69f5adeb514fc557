"""`files.json`: the files of a checkpoint, with sizes and checksums, to look at before Orbax does.

Orbax reads arrays at the same time, in threads of its own. If one fails, the others report to a loop
that is closed: pages of tracebacks beside the one sentence. So missing, cut and changed files are found
here. Large files are compared by size only: the values in them have checksums, array by array.
"""

from __future__ import annotations

import json
import stat
import zlib
from pathlib import Path
from typing import Any

from tailrace.data.files import check_description, json_checksum, read_json
from tailrace.errors import CheckpointError

FILE = "files.json"

OWN = "_CHECKPOINT_METADATA"
"""Orbax's file with our note, which has a checksum of its own."""

_JSON = (FILE, OWN, "_METADATA")
"""Descriptions, which are read whole; they have the limit of other descriptions."""

SMALL = 1 << 20
"""The most bytes of a file that is compared byte for byte: descriptions, and trees of addresses."""


def write_list(directory: Path) -> None:
    """List the files of a directory, which is complete."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != OWN)
    found = {path.relative_to(directory).as_posix(): _described(path) for path in files}
    said = {"files": found, "checksum": json_checksum(found)}
    (directory / FILE).write_text(json.dumps(said), encoding="utf-8")


def damage_in(directory: Path) -> str:
    """What is wrong with the files of a directory; empty if nothing is, or if there is no list."""
    if foreign := _foreign(directory):
        return foreign
    if not (directory / FILE).exists():  # of an earlier version
        return ""
    try:
        said = read_json(directory / FILE, CheckpointError)
        files, whole = dict(said["files"]), said["checksum"] == json_checksum(said["files"])
    except (OSError, ValueError, LookupError, TypeError):
        return f"{FILE} cannot be read"
    if not whole:
        return f"{FILE} is not what was written"
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            return f"the file {name!r} is missing"
        if _described(path) != expected:
            return f"the file {name!r} is not what was written"
    return ""


def _foreign(directory: Path) -> str:
    """What Orbax must not open: it would wait for a pipe forever, and read a device without end."""
    for path in sorted(directory.rglob("*")):
        name, about = path.relative_to(directory).as_posix(), path.lstat()
        if not stat.S_ISDIR(about.st_mode) and not stat.S_ISREG(about.st_mode):
            return f"{name!r} is a link, a pipe or a device"
        if path.name in _JSON:
            check_description(path, CheckpointError)
    return ""


def _described(path: Path) -> list[Any]:
    size = path.stat().st_size
    return [size, zlib.crc32(path.read_bytes()) if size <= SMALL else None]
