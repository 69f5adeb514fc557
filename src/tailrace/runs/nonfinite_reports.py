"""`nonfinite.json`: the reports of `tr.stop_on_nonfinite` that stopped the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from tailrace.errors import NonFiniteError
from tailrace.runs.storage.durable import put_files
from tailrace.runs.storage.held import HeldDirectory

REPORTS = "nonfinite.json"
MOST_BYTES, MOST_REPORTS = 1 << 20, 100
"""The limit of what is read of the file, which is untrusted."""


def add_report(directory: HeldDirectory, error: NonFiniteError) -> None:
    """Append an error to the reports of a run."""
    culprit: Any = error.culprit
    report = {
        "step": error.step,
        "text": str(error),
        "culprit": dataclasses.asdict(culprit) if dataclasses.is_dataclass(culprit) else None,  # pyright: ignore
    }
    put_files(
        directory, {REPORTS: json.dumps([*read_reports(directory.path), report], indent=1).encode()}
    )


def read_reports(directory: Path) -> list[dict[str, Any]]:
    """The reports of a run, oldest first; invalid entries are left out.

    Each has `step`, `text` and `culprit`: the operation with its scope, source and row, or None.

    >>> read_reports(Path("/nowhere"))
    []
    """
    with contextlib.suppress(OSError, ValueError):
        path = directory / REPORTS
        if path.stat().st_size <= MOST_BYTES:
            found = json.loads(path.read_text(encoding="utf-8"))
            listed = found[:MOST_REPORTS] if isinstance(found, list) else []
            return [_checked(report) for report in listed if _is_report(report)]
    return []


def _is_report(report: Any) -> bool:
    return isinstance(report, dict) and isinstance(report.get("text"), str)


def _checked(report: dict[str, Any]) -> dict[str, Any]:
    step, culprit = report.get("step"), report.get("culprit")
    return {
        "step": step if isinstance(step, int) else -1,
        "text": report["text"],
        "culprit": culprit if isinstance(culprit, dict) else None,
    }
