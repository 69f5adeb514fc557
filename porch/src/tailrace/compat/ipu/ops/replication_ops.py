"""Which replica this is."""

from __future__ import annotations

from typing import Any

from tailrace.compat.originals.missing import missing_from
from tailrace.program.in_program import replica


def replication_index(name: str | None = None) -> Any:
    """The number of the replica that computes, from 0, as an int32 scalar."""
    del name
    return replica()


__getattr__, __dir__ = missing_from(__name__)
