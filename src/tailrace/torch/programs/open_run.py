"""The run of a training model, while the loop around its calls is the user's own.

Nobody says when that loop has ended. The run directory is completed when a call fails, when the model
is destroyed or garbage, and at the latest when the process exits.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Mapping
from typing import Any

from tailrace.trainer.observation.journal import Journal

_at_exit: Any = getattr(threading, "_register_atexit", atexit.register)
"""Registers what runs when a process exits. Writing a run needs pools of threads, which Python ends
before it calls the functions of `atexit`."""

_open: dict[Any, None] = {}
"""What is open, and is closed at exit: runs, directories of checkpoints; in their order."""


class OpenRun:
    """Opens a journal for calls, and closes it. Refers to nothing of the model, whose end it must not
    put off.

    Args:
        journal: the journal.
        info: the description of what runs.
    """

    def __init__(self, journal: Journal, info: Mapping[str, Any]) -> None:
        self._journal, self._info = journal, dict(info)
        self._open: contextlib.ExitStack | None = None
        # The thread that writes a run does not exist in a forked process.
        self._process = os.getpid()

    def open(self) -> None:
        """Open it, unless it is open; a run that was closed goes on."""
        if self._open is None:
            opened = contextlib.ExitStack()
            opened.enter_context(self._journal.open(self._info.copy))
            self._open = opened
            closed_at_exit(self)

    def close(self, error: BaseException | None = None) -> None:
        """Close it, if it is open: history and records on disk are complete afterwards.

        Args:
            error: why, if a call failed: a run says where a guard has stopped it.
        """
        opened, self._open = self._open, None
        is_closed(self)
        if opened is not None and self._process == os.getpid():
            kind = None if error is None else type(error)
            opened.__exit__(kind, error, None if error is None else error.__traceback__)


def closed_at_exit(opened: Any) -> None:
    """Have `close()` called when the process exits, the latest first."""
    _close_at_exit()
    _open[opened] = None


def is_closed(opened: Any) -> None:
    """Nothing is left to be closed."""
    _open.pop(opened, None)


@functools.cache
def _close_at_exit() -> None:
    """Have closed what is still open then; once for a process."""

    def close() -> None:
        for opened in reversed(list(_open)):
            opened.close()

    _at_exit(close)
