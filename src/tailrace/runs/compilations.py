"""`compilations.json`: the compilations of a run, their times and causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailrace.runs.storage.held import HeldDirectory
from tailrace.runs.storage.json_lists import read_list, write_list

FILE = "compilations.json"
MOST_ROWS = 1000
"""The most compilations that are read."""


def add_compilations(directory: HeldDirectory, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append compilations to those of a run."""
    write_list(directory, FILE, [*read_compilations(directory.path), *rows])


def read_compilations(directory: Path) -> list[dict[str, Any]]:
    """The compilations of a run, oldest first: `purpose`, `cause`, `seconds`, `shared` and `ended`.

    >>> read_compilations(Path("/nowhere"))
    []
    """
    return [_checked(row) for row in read_list(directory / FILE, MOST_ROWS)]


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    def number(name: str) -> float:
        value = row.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    # Of other types, the values would raise far from here, in a view of the run.
    return {
        "purpose": str(row.get("purpose", "")),
        "cause": str(row.get("cause", "")),
        "seconds": number("seconds"),
        "shared": bool(row.get("shared", False)),
        "ended": number("ended"),
    }
