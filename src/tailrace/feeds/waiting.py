"""Waiting with a limit: for late data, and for values that a running program has yet to send."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

from tailrace.base.checks import check_number
from tailrace.base.messages import logger
from tailrace.errors import DataTimeout, FeedError, OptionError, WaitStopped

Item = TypeVar("Item")

NOTE_S = 30.0
"""Seconds after which a wait for data is logged; then after twice as long, and so on."""

LOOK_S = 0.2
"""How often a wait checks whether it should end, in seconds."""


class Awaited(Protocol):
    """A source of data, from the view of a caller that waits for it."""

    def awaited(self) -> str:
        """What is awaited, for messages: which element of which dataset."""
        ...

    def waited_s(self) -> float:
        """For how long it has been awaited, in seconds; 0 if nothing is."""
        ...


@dataclasses.dataclass(frozen=True)
class Lasting:
    """Something that is awaited from now on, under a fixed description."""

    what: str
    since: float = dataclasses.field(default_factory=lambda: time.monotonic())

    def awaited(self) -> str:
        """What is awaited, for messages."""
        return self.what

    def waited_s(self) -> float:
        """For how long it has been awaited, in seconds."""
        return time.monotonic() - self.since


@dataclasses.dataclass(frozen=True)
class Patience:
    """The limits of a wait for data.

    Attributes:
        timeout_s: the longest wait for one element, in seconds; None for no limit, with a log message
            after `NOTE_S`.
        stopped: polled during the wait, which ends with `WaitStopped` when it returns True.
    """

    timeout_s: float | None = None
    stopped: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, positive=True, error=OptionError)

    @property
    def limited(self) -> bool:
        """Whether a wait may end before what it waits for: that needs a thread to wait for."""
        return self.timeout_s is not None or self.stopped is not None

    def wait_for(self, future: Future[Any], source: Awaited) -> None:
        """Wait until `future` is done, with a result or an exception.

        Args:
            future: what to wait for. Its own waits for the device do not count.
            source: what it reads from.
        """
        # In short waits: a Ctrl-C, and `stopped`, are noticed only between them.
        note_at = NOTE_S
        while not wait([future], timeout=min(LOOK_S, self.timeout_s or LOOK_S)).done:
            # For one element, by the source's clock: a block of many elements may take longer than
            # the limit.
            waited = source.waited_s()
            if self.stopped is not None and self.stopped():
                raise WaitStopped(f"Waiting for {source.awaited()} was stopped.")
            if self.timeout_s is not None and waited >= self.timeout_s:
                raise DataTimeout(
                    f"An element comes within timeout_s={self.timeout_s:g} seconds, and "
                    f"{source.awaited()} did not. Look at what the dataset waits for, or raise "
                    f"timeout_s."
                )
            if waited >= note_at:
                _note(source, waited)
                note_at *= 2


def _note(source: Awaited, waited: float) -> None:
    logger.warning(f"Still waiting for {source.awaited()}, for {waited:.0f} s now.")


class Heartbeat:
    """Logs the waits of a caller that reads a source itself, and so cannot; a context.

    Args:
        source: what the caller reads.
    """

    def __init__(self, source: Awaited) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=_beat, args=(source, self._ended), name="tailrace-heartbeat", daemon=True
        )

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=LOOK_S)


def _beat(source: Awaited, ended: threading.Event) -> None:
    note_at = NOTE_S
    while not ended.wait(LOOK_S):
        waited = source.waited_s()
        if waited < NOTE_S:
            note_at = NOTE_S
        elif waited >= note_at:
            _note(source, waited)
            note_at = 2 * waited


class Runs:
    """The running programs that send to one queue, as seen by the threads that read it.

    Attributes:
        changed: guards the queue; notified when a value arrives, or a program starts or ends.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._running = 0
        self._ended = 0

    def begin(self) -> None:
        """Report that a program that sends to the queue starts."""
        with self.changed:
            self._running += 1
            self.changed.notify_all()

    def end(self) -> None:
        """Report that the program has ended, successfully or not."""
        with self.changed:
            self._running -= 1
            # Counted, not flagged: a reader that was slow must see that a program ended, even if
            # another one runs by then.
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

        If nothing is queued and no program runs, wait for one to start, for at most `timeout_s`
        seconds.

        Args:
            take: returns the next item, or None if none is queued.
            waits: whether an item is queued.
            timeout_s: how long to wait for a program to start.
            what: the queue, for the message.
        """
        with self.changed:
            # If something is queued or runs, the program has started, and an end before this call
            # counts. Otherwise a program has yet to start and end.
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
                # With a limit, to look at `give_up` again: nothing notifies when no program starts.
                self.changed.wait(timeout=0.5)
