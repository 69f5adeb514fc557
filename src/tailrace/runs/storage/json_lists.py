"""Small JSON lists in a run directory: what happened to the run, an object for each event.

They are beside the tables because they are rare and of no fixed form. Like everything in a run they are
untrusted, and a run without one, or with a damaged one, can be read all the same.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailrace.base.files import parse_json, read_bytes
from tailrace.errors import RunError
from tailrace.runs.storage.durable import put_files
from tailrace.runs.storage.held import HeldDirectory

MOST_BYTES = 1 << 20
"""The largest file that is read."""


def read_list(path: Path, most: int) -> list[dict[str, Any]]:
    """The first `most` entries that are objects; empty if the file is missing, damaged or too large.

    >>> read_list(Path("/nowhere"), 10)
    []
    """
    # Not `Path.read_text`: that would wait forever on a pipe of this name.
    with contextlib.suppress(OSError, ValueError, RunError):
        found = parse_json(read_bytes(path, RunError, MOST_BYTES))
        listed = found[:most] if isinstance(found, list) else []
        return [one for one in listed if isinstance(one, dict)]
    return []


def write_list(directory: HeldDirectory, name: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """Replace a list; the directory must be held."""
    put_files(directory, {name: json.dumps(list(entries), indent=1).encode()})
