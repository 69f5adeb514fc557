"""Waiting for what a running program still has to send, and knowing when it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from tailrace.errors import FeedError

Item = TypeVar("Item")


class Runs:
    """The runs of programs that send to one place, seen from the threads that read there.

    Attributes:
        changed: guards what is sent; notified when something arrives, starts or ends.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._running = 0
        self._ended = 0

    def begin(self) -> None:
        """A program that sends there starts."""
        with self.changed:
            self._running += 1
            self.changed.notify_all()

    def end(self) -> None:
        """That program has ended, one way or the other."""
        with self.changed:
            self._running -= 1
            self._ended += 1
            self.changed.notify_all()

    def stream(
        self,
        take: Callable[[], Item | None],
        waits: Callable[[], bool],
        timeout_s: float,
        what: str,
    ) -> Iterator[Item]:
        """Items as they arrive, until the program that sends them has ended.

        If nothing waits and no program runs, one is waited for, `timeout_s` seconds at most.

        Args:
            take: the next item, or None if none waits.
            waits: whether an item waits.
            timeout_s: how long to wait for a program to start.
            what: the place, for the message.
        """
        with self.changed:
            seen = self._ended if not waits() and not self._running else self._ended - 1
        give_up = time.monotonic() + timeout_s
        while True:
            item = take()
            if item is not None:
                yield item
                continue
            with self.changed:
                if waits():
                    continue
                if not self._running and self._ended > seen:
                    return
                if not self._running and time.monotonic() > give_up:
                    raise FeedError(
                        f"No program that sends to {what} was started within {timeout_s:g} "
                        f"seconds. Start one in another thread, or raise timeout_s."
                    )
                self.changed.wait(timeout=0.5)
