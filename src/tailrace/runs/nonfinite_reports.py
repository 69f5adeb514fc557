"""`nonfinite.json`: the reports of `tr.stop_on_nonfinite` that stopped the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tailrace.errors import NonFiniteError
from tailrace.runs.storage.held import HeldDirectory
from tailrace.runs.storage.json_lists import read_list, write_list

REPORTS = "nonfinite.json"
MOST_REPORTS = 100
"""The most reports that are read."""


def add_report(directory: HeldDirectory, error: NonFiniteError) -> None:
    """Append an error to the reports of a run."""
    # An `object` to the exception, whose file is below the room that defines culprits.
    culprit: Any = error.culprit
    report = {
        "step": error.step,
        "text": str(error),
        "culprit": dataclasses.asdict(culprit) if dataclasses.is_dataclass(culprit) else None,  # pyright: ignore
    }
    write_list(directory, REPORTS, [*read_reports(directory.path), report])


def read_reports(directory: Path) -> list[dict[str, Any]]:
    """The reports of a run, oldest first; invalid entries are left out.

    Each has `step`, `text` and `culprit`: the operation with its scope, source and row, or None.

    >>> read_reports(Path("/nowhere"))
    []
    """
    listed = read_list(directory / REPORTS, MOST_REPORTS)
    return [_checked(report) for report in listed if isinstance(report.get("text"), str)]


def _checked(report: dict[str, Any]) -> dict[str, Any]:
    step, culprit = report.get("step"), report.get("culprit")
    return {
        "step": step if isinstance(step, int) else -1,
        "text": report["text"],
        "culprit": culprit if isinstance(culprit, dict) else None,
    }
