"""The activations of a step, collected while it is traced.

Tracing a step finds its activations and their gradients. The caller that traces it opens a listing and
reads the entries afterwards; the step itself stays plain, immutable data.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from tailrace.taps.catalogue import Entry

_open: ContextVar[list[Entry] | None] = ContextVar("tailrace_activations", default=None)


@contextmanager
def listing_activations() -> Generator[list[Entry]]:
    """Collect the activations of steps traced in this context."""
    found: list[Entry] = []
    token = _open.set(found)
    try:
        yield found
    finally:
        _open.reset(token)


def new_listing() -> list[Entry]:
    """An empty list for the activations of a step: the open listing, cleared, or a private one.

    A step may be traced several times; the last trace is the one that runs.
    """
    found = _open.get()
    if found is None:
        return []
    # The same list object: whoever opened the listing holds it.
    found.clear()
    return found
