"""Silences what Orbax logs about a checkpoint: what it raises is in our sentence."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Orbax's log, which is for its developers."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def quiet_reading(path: Path) -> Iterator[None]:
    """The same, and no tracebacks of arrays that could not be read either.

    Orbax reads all arrays at the same time, and raises the error of the first one. Those of the others
    are logged by asyncio when Python collects their tasks, at any time after the read.
    """
    _unawaited.paths.add(str(path))
    logger = logging.getLogger("asyncio")
    logger.addFilter(_unawaited)  # once, however often it is added
    with quiet():
        yield
    _unawaited.paths.discard(str(path))  # only if it could be read


class _Unawaited(logging.Filter):
    """Drops asyncio exceptions that name a checkpoint whose read has failed, or is not over."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        text = f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}"
        return not any(path in text for path in [*self.paths])


_unawaited = _Unawaited()
