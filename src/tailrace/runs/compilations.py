"""`compilations.json`: the compilations of a run, their times and causes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailrace.runs.storage.durable import put_files
from tailrace.runs.storage.held import HeldDirectory

FILE = "compilations.json"
MOST_BYTES, MOST_ROWS = 1 << 20, 1000
"""The limit of what is read of the file, which is untrusted."""


def add_compilations(directory: HeldDirectory, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append compilations to those of a run."""
    whole = [*read_compilations(directory.path), *rows]
    put_files(directory, {FILE: json.dumps(whole, indent=1).encode()})


def read_compilations(directory: Path) -> list[dict[str, Any]]:
    """The compilations of a run, oldest first: `purpose`, `cause`, `seconds`, `shared` and `ended`.

    >>> read_compilations(Path("/nowhere"))
    []
    """
    with contextlib.suppress(OSError, ValueError):
        path = directory / FILE
        if path.stat().st_size <= MOST_BYTES:
            found = json.loads(path.read_text(encoding="utf-8"))
            listed = found[:MOST_ROWS] if isinstance(found, list) else []
            return [_checked(row) for row in listed if isinstance(row, dict)]
    return []


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    def number(name: str) -> float:
        value = row.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    return {
        "purpose": str(row.get("purpose", "")),
        "cause": str(row.get("cause", "")),
        "seconds": number("seconds"),
        "shared": bool(row.get("shared", False)),
        "ended": number("ended"),
    }
