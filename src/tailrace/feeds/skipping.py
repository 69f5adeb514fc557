"""Skipping of data that was used before, with its progress in the log."""

from __future__ import annotations

import time
from collections.abc import Callable

from tailrace.base.messages import logger

SHOWN_EVERY_S = 5.0
"""How often skipping logs its progress, in seconds."""


def skip(count: int, take: Callable[[int], object], what: str, at_once: int = 1) -> None:
    """Take `count` items that were used before, and drop them.

    Args:
        count: the number of elements.
        take: takes that many; it raises if there are fewer.
        what: the items, for the log.
        at_once: the number of elements per call.
    """
    shown = time.monotonic()
    for start in range(0, count, at_once):
        end = min(start + at_once, count)
        take(end - start)
        if time.monotonic() - shown > SHOWN_EVERY_S:
            shown = time.monotonic()
            logger.warning("Skipping %s that were used before: %s of %s.", what, end, count)
