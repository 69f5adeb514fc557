"""`profile.json`: the result of `trainer.profile`, in the directory of its run."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import RunError
from tailrace.profiling.profile.profile import Profile

PROFILE = "profile.json"
MOST_BYTES = 1 << 24
"""The limit of what is read of the file, which is untrusted."""


def read_profile(directory: Path) -> Profile | None:
    """The profile of a run; None if it has no readable one.

    >>> read_profile(Path("/nowhere"))
    """
    path = directory / PROFILE
    try:
        # By size first: the file is untrusted, and JSON is parsed whole.
        return Profile.load(path) if path.stat().st_size <= MOST_BYTES else None
    except (OSError, RunError):
        return None
