"""`interventions.json`: where the user changed the course of a run, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tailrace.runs.storage.held import HeldDirectory
from tailrace.runs.storage.json_lists import read_list, write_list

FILE = "interventions.json"
BACK = ("rewind", "restore")
"""The kinds of those after which steps were trained again."""

MOST = 1000
"""The most interventions that are read."""


def add_intervention(directory: HeldDirectory, said: dict[str, Any], number: int) -> None:
    """Append the intervention with some number of a script; the directory must be held.

    A script that was killed and started again intervenes again: that is one intervention, not two.
    """
    # By position: a script that starts again makes its n-th intervention again.
    there = read_interventions(directory.path)
    if len(there) > number and _without_proof(there[number]) == _without_proof(said):
        return
    write_list(directory, FILE, [*there, said])


def _without_proof(said: dict[str, Any]) -> dict[str, Any]:
    # Whether the state was proved may turn out otherwise the second time.
    return {name: value for name, value in said.items() if name != "proved"}


def read_interventions(directory: Path) -> list[dict[str, Any]]:
    """All of them, oldest first; each has `kind`, `step` and `reason`.

    >>> read_interventions(Path("/nowhere"))
    []
    """
    return [one for one in read_list(directory / FILE, MOST) if "kind" in one]
