"""Waiting with an end: for data that is late, and for what a running program still has to send."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

from tailrace.data.counts import check_number
from tailrace.errors import DataTimeout, FeedError, OptionError, WaitStopped
from tailrace.messages import logger

Item = TypeVar("Item")

NOTE_S = 30.0
"""After how long a wait for data is noted; then after twice as long, and so on."""

LOOK_S = 0.2
"""How often a wait looks whether it shall end."""


class Awaited(Protocol):
    """What is read from, as one sees it who waits for it."""

    def awaited(self) -> str:
        """What is awaited, in words: which element of which dataset."""
        ...

    def waited_s(self) -> float:
        """For how long it has been awaited; 0 where nothing is."""
        ...


@dataclasses.dataclass(frozen=True)
class Lasting:
    """Something that is awaited from now on."""

    what: str
    since: float = dataclasses.field(default_factory=time.monotonic)

    def awaited(self) -> str:
        """What is awaited, in words."""
        return self.what

    def waited_s(self) -> float:
        """For how long it has been awaited."""
        return time.monotonic() - self.since


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long data is waited for, and what else ends a wait.

    Attributes:
        timeout_s: the longest wait for one element, in seconds; None: without a limit, but noted
            after `NOTE_S`.
        stopped: asked every so often; the wait ends with `WaitStopped` when it says True.
    """

    timeout_s: float | None = None
    stopped: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, positive=True, error=OptionError)

    def wait_for(self, future: Future[Any], source: Awaited) -> None:
        """Wait until `future` is done, however it ends.

        Args:
            future: what is waited for. It may wait for the device too: that is not counted.
            source: what it reads from.
        """
        note_at = NOTE_S
        while not wait([future], timeout=min(LOOK_S, self.timeout_s or LOOK_S)).done:
            waited = source.waited_s()
            if self.stopped is not None and self.stopped():
                raise WaitStopped(f"Waiting for {source.awaited()} was stopped.")
            if self.timeout_s is not None and waited >= self.timeout_s:
                raise DataTimeout(
                    f"An element comes within timeout_s={self.timeout_s:g} seconds, and "
                    f"{source.awaited()} did not. Look at what the dataset waits for, or raise "
                    f"timeout_s. What was read before is kept."
                )
            if waited >= note_at:
                logger.warning(f"Still waiting for {source.awaited()}, for {waited:.0f} s now.")
                note_at *= 2


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
