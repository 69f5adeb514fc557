"""Gives freed memory back to the system.

A checkpoint takes memory for a copy of the state and frees it: in threads, in blocks of many sizes. The
C library keeps freed blocks for later, in one pool per thread, and a process that saves often would
grow with each pool that its largest checkpoint has passed through.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable


def give_back() -> None:
    """Give memory that is free in all pools back to the system; a no-op where it cannot be asked for.

    Takes a few milliseconds for a heap of some hundred megabytes.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """`malloc_trim` of the GNU C library; other libraries return freed memory by themselves."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        # Of the process itself, whichever C library it was linked with.
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # another C library
        return None
