"""`interventions.json`: where the user changed the course of a run, and why."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from tailrace.runs.storage.durable import put_files
from tailrace.runs.storage.held import HeldDirectory

FILE = "interventions.json"
MOST_BYTES, MOST = 1 << 20, 1000
"""The limit of what is read of the file, which is untrusted."""


def add_intervention(directory: HeldDirectory, said: dict[str, Any], number: int) -> None:
    """Append the intervention with some number of a script; the directory must be held.

    A script that was killed and started again intervenes again: that is one intervention, not two.
    """
    there = read_interventions(directory.path)
    if len(there) > number and _without_proof(there[number]) == _without_proof(said):
        return
    listed = [*there, said]
    put_files(directory, {FILE: json.dumps(listed, indent=1).encode()})


def _without_proof(said: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name != "proved"}


def read_interventions(directory: Path) -> list[dict[str, Any]]:
    """All of them, oldest first; each has `kind`, `step` and `reason`.

    >>> read_interventions(Path("/nowhere"))
    []
    """
    with contextlib.suppress(OSError, ValueError):
        path = directory / FILE
        if path.stat().st_size <= MOST_BYTES:
            found = json.loads(path.read_text(encoding="utf-8"))
            listed = found[:MOST] if isinstance(found, list) else []
            return [one for one in listed if isinstance(one, dict) and "kind" in one]
    return []
