"""Ctrl-C and SIGTERM during a fit: once to finish properly, twice to leave at once.

After the first signal the running execution finishes; then the fit saves, if it has a checkpoint, and
raises. A fit that waits for its dataset stops waiting. A second signal raises at once; under
`tailrace launch`, which passes signals on, the launcher decides how long is waited.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from tailrace.devices.processes.launched import is_launched

SIGNALS = (signal.SIGINT, signal.SIGTERM)

SAME_S = 0.2
"""Signals that come closer together than this are one: `timeout` signals a process and its group."""


class Interrupts:
    """While it is open, signals are recorded instead of raised; in the main thread only.

    Attributes:
        asked: the received signal; None before.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        # Python allows signal handlers in the main thread only; a fit in another thread leaves
        # signals to it.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in SIGNALS}
            for number in SIGNALS:
                signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._put_back()

    def reraise(self) -> None:
        """Raise the exception of the received signal, if any."""
        if self.asked is not None:
            raise meaning(self.asked)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            # A scheduler may signal all processes of a job, and the launcher passes its own signal on:
            # the same one comes twice, at any distance.
            if is_launched() or time.monotonic() - self._at < SAME_S:
                return
            self._put_back()
            raise meaning(number)
        # Nothing else happens in a handler: it runs between any two bytecodes of the loop, or of a
        # library.
        self.asked, self._at = number, time.monotonic()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            # `getsignal` returns None for a handler that was not installed from Python; it cannot
            # be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}


def meaning(number: int) -> BaseException:
    """The exception for a signal."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def held_back() -> Generator[None]:
    """Hold back signals that raise, until the context ends; a second one raises at once.

    For a loop that is the user's own, with the user's handlers: what belongs together (the state on the
    devices, its step, its history) changes together, or a Ctrl-C leaves it half done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {}

    def put_back() -> None:
        while before:
            signal.signal(*before.popitem())

    def hold(number: int, frame: FrameType | None) -> None:
        handler = before.get(number)
        if came and handler is not None:
            put_back()
            handler(number, frame)
        came.append(number)

    for number in SIGNALS:
        handler = signal.getsignal(number)
        # One that is ignored, or ends the process, does so in the middle as well.
        if callable(handler):
            before[number] = handler
            signal.signal(number, hold)
    handlers = dict(before)
    try:
        yield
    finally:
        waiting = bool(before)  # otherwise the second one has raised
        put_back()
        for number in came[:1] if waiting else ():
            handlers[number](number, None)
