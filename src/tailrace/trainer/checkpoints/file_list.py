"""`files.json`: the files of a checkpoint, with sizes and checksums, to look at before Orbax does.

Orbax reads arrays at the same time, in threads of its own. If one fails, the others report to a loop
that is closed: pages of tracebacks beside the one sentence. So missing, cut and changed files are found
here. The bytes of large files are compared only where something is wrong, and by `tailrace fsck`: the
values in them have checksums, array by array.

What is found here is proved: a file was read to its end, and is not what was written. A disk that does
not answer proves nothing: it raises `OSError`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tailrace.base.files import check_description, json_checksum, open_regular, parse_json
from tailrace.errors import CheckpointError

FILE = "files.json"

OWN = "_CHECKPOINT_METADATA"
"""Orbax's file with our note, which has a checksum of its own."""

LISTED = "listed"
"""What our note says of a checkpoint with a list: earlier versions wrote none."""

_JSON = (FILE, OWN, "_METADATA")
"""Descriptions, which are read whole; they have the limit of other descriptions."""

SMALL = 1 << 20
"""The most bytes of a file that is compared each time: descriptions, and trees of addresses."""

_PIECE = 4 << 20
"""The bytes of a file that are in memory at a time."""


def write_list(directory: Path) -> None:
    """List the files of a directory, which is complete."""
    sizes = {name: about.st_size for name, about in _below(directory).items()}
    files = {
        name: [size, file_checksum(directory / name, size) if size <= SMALL else None]
        for name, size in sizes.items()
        if name != OWN
    }
    # Apart from `files`, which earlier versions compare as it is.
    more = {
        name: [size, file_checksum(directory / name, size)]
        for name, size in sizes.items()
        if name == OWN or size > SMALL
    }
    said = {"files": files, "checksum": json_checksum(files)}
    said |= {"more": more, "more_checksum": json_checksum(more)}
    (directory / FILE).write_text(json.dumps(said), encoding="utf-8")


def damage_in(directory: Path, *, every_byte: bool = False) -> str:
    """What is proved wrong with the files of a directory; empty if nothing is, or if there is no list.

    Args:
        directory: the checkpoint.
        every_byte: whether large files are read too.

    Raises:
        OSError: a file cannot be looked at, which proves nothing.
        CheckpointError: a description is too large to be read.
    """
    found = _below(directory)
    if strange := [name for name, about in found.items() if not stat.S_ISREG(about.st_mode)]:
        # What Orbax must not open: it would wait for a pipe forever, and read a device without end.
        return f"{strange[0]!r} is a link, a pipe or a device"
    for name in found:
        if name.rpartition("/")[2] in _JSON:
            check_description(directory / name, CheckpointError)
    if FILE not in found:
        return f"the file {FILE!r} is missing" if every_byte and _had_list(directory) else ""
    said = listed(directory)
    if said is None:
        return f"{FILE} is not what was written"
    files, more = said
    for name, (size, checksum) in {**(more if every_byte else {}), **files}.items():
        if name not in found:
            return f"the file {name!r} is missing"
        if every_byte and name in more:
            size, checksum = more[name]
        if found[name].st_size != size:
            return f"the file {name!r} has {found[name].st_size:,} bytes of {size:,}"
        if checksum is not None and file_checksum(directory / name, size) != checksum:
            return f"the file {name!r} is not what was written"
    return ""


def listed(directory: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The listed files and those with further checksums; None if the list is not what was written."""
    content = read_whole(directory / FILE)
    try:
        said = parse_json(content)
        files, more = dict(said["files"]), dict(said.get("more", {}))
        right = said["checksum"] == json_checksum(said["files"])
        right = right and ("more" not in said or said["more_checksum"] == json_checksum(more))
        forms = all(len(form) == 2 for form in [*files.values(), *more.values()])
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return (files, more) if right and forms else None


def foreign_files(directory: Path) -> list[str]:
    """Files that were not written with a checkpoint; none is known of one without a list."""
    found = _below(directory)
    said = listed(directory) if FILE in found else None
    return [] if said is None else sorted(set(found) - {FILE, OWN, *said[0]})


def proves_each_byte(directory: Path) -> bool:
    """Whether the list has a checksum of every file: those of earlier versions have not."""
    said = listed(directory) if os.path.lexists(directory / FILE) else None
    return said is not None and all(
        checksum is not None or name in said[1] for name, (_, checksum) in said[0].items()
    )


def _had_list(directory: Path) -> bool:
    """Whether a checkpoint without a list was written with one."""
    try:
        return parse_json(read_whole(directory / OWN))["custom_metadata"][LISTED] is True
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return False


def _below(directory: Path) -> Mapping[str, os.stat_result]:
    """All that is below a directory and is no folder, by name; links are not followed."""
    found: dict[str, os.stat_result] = {}
    folders = [directory]
    while folders:
        # Not `rglob`, which passes over folders that cannot be read.
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(about.st_mode):
                    folders.append(Path(entry.path))
                else:
                    found[Path(entry.path).relative_to(directory).as_posix()] = about
    return dict(sorted(found.items()))


def file_checksum(path: Path, size: int) -> int:
    """The checksum of a file of this size."""
    found = 0
    for piece in _pieces(path, size):
        found = zlib.crc32(piece, found)
    return found


def read_whole(path: Path) -> bytes:
    """The content of a file; raises `OSError` if less can be read than it has."""
    return b"".join(_pieces(path, path.stat().st_size))


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    """The content of a file of this size, in pieces."""
    with open_regular(path, CheckpointError) as file:
        left = size
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                # Its size says otherwise, so this is the disk's answer, not the file.
                raise OSError(
                    errno.EIO, f"{size - left:,} of {size:,} bytes could be read", str(path)
                )
            left -= len(piece)
            yield piece
