"""One background thread that does one thing after another, and never keeps the process alive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

STOP_S = 10.0
"""How long `stop` waits for what is being done, in seconds."""


class Worker:
    """A named daemon thread with a queue of calls.

    The pool of the standard library joins its threads when the interpreter exits, so a dataset that
    blocks for ever would keep the process from ending. This thread is left behind instead.

    >>> worker = Worker("doctest")
    >>> worker.submit(sum, [1, 2]).result()
    3
    >>> worker.stop()
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `function(*args, **kwargs)` in the thread, after everything submitted before."""
        future: Future[Any] = Future()
        self._calls.put((future, function, args, kwargs))
        return future

    def stop(self, wait_s: float = STOP_S) -> None:
        """End the thread after what it does now; calls not begun should be cancelled before."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=wait_s)

    def __del__(self) -> None:
        self._calls.put(None)


def _work(calls: queue.SimpleQueue[Any]) -> None:
    while (call := calls.get()) is not None:
        future, function, args, kwargs = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
        del call, future, function, args, kwargs  # nothing is kept alive while the thread waits
