"""A background thread that runs calls one after another and never keeps the process alive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

STOP_S = 10.0
"""How long `stop` waits for the current call, in seconds."""


class Worker:
    """A named daemon thread with a queue of calls.

    The standard library's pool joins its threads when the interpreter exits, so a dataset that blocks
    forever would keep the process from exiting. This thread is abandoned instead.

    >>> worker = Worker("doctest")
    >>> worker.submit(sum, [1, 2]).result()
    3
    >>> worker.stop()
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `function(*args, **kwargs)` in the thread, after everything submitted before."""
        # A `Future`, so that a caller can wait with a limit, and so that an exception reaches it.
        future: Future[T] = Future()
        self._calls.put((future, function, args, kwargs))
        return future

    def stop(self, wait_s: float = STOP_S) -> None:
        """End the thread after its current call; cancel calls that have not started first."""
        self._calls.put(None)
        # A thread cannot wait for itself: a dataset may close its queue while it is being read.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=wait_s)

    # The thread refers to the queue of calls alone, not to this object, so that dropping it ends the
    # thread.
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
        del call, future, function, args, kwargs  # or the waiting thread would keep them alive
