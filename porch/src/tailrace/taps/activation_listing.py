"""The activations of a step, listed while it is traced.

Tracing a step finds its activations and their gradients. Whoever traces it opens a listing and has
their entries afterwards; the step itself stays plain, immutable data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tailrace.taps.catalogue import Entry

_open: ContextVar[list[Entry] | None] = ContextVar("tailrace_activations", default=None)


@contextmanager
def listing_activations() -> Iterator[list[Entry]]:
    """The list that activations of steps traced inside go to."""
    found: list[Entry] = []
    token = _open.set(found)
    try:
        yield found
    finally:
        _open.reset(token)


def new_listing() -> list[Entry]:
    """An empty list for the activations of a step: the open one, emptied, or one of its own.

    A step may be traced several times; the last trace is the one that runs.
    """
    found = _open.get()
    if found is None:
        return []
    found.clear()
    return found
