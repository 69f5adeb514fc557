"""`profile.json`: what `trainer.profile` measured, beside the run it belongs to."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import RunError
from tailrace.profiling.profile.profile import Profile

PROFILE = "profile.json"
MOST_BYTES = 1 << 24
"""What is read of the file: a reader does not trust it."""


def read_profile(directory: Path) -> Profile | None:
    """The profile of a run; None if it has none, or none that can be read.

    >>> read_profile(Path("/nowhere"))
    """
    path = directory / PROFILE
    try:
        return Profile.load(path) if path.stat().st_size <= MOST_BYTES else None
    except (OSError, RunError):
        return None
