"""Finished executions on their way to the disk, and the thread that writes them.

The training loop queues an execution and continues; every few seconds the thread writes all that is
queued. The queue is bounded: a loop that is faster than the disk waits for it. If the disk is full,
training continues while the thread retries.
"""

from __future__ import annotations

import dataclasses
import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tailrace.base.messages import logger
from tailrace.errors import RunError, TailraceError
from tailrace.records.sinks import Finished, Validated

THREAD = "tailrace-run-writer"
WRITE_EVERY_S = 2.0
"""The shortest time between writes, in seconds."""
PAUSE_S = 10.0
"""The longest time between writes: a killed process loses at most this much."""
SHARE, DISK_SHARE = 0.005, 0.1
"""The fraction of time that writing may use the processor, and that it may wait for the disk, which
costs training nothing. If either takes longer, writes become rarer, down to one per `PAUSE_S`."""
MOST_WAITING = 1 << 26
"""The bytes of queued executions from which they are written at once."""
MOST_QUEUED = 1 << 28
"""The most bytes of queued executions; beyond that the training loop waits."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk, which may have room later."""
FULL_S, RETRY_S = 60.0, 1.0
"""How long to wait for room on a full disk before the fit ends, and how often to retry."""
LOOK_S = 1.0
"""How often a waiting thread checks that the other one is still alive, in seconds."""


@dataclasses.dataclass
class Mark:
    """A position in the queue, and the rows of the tables there once it is written."""

    rows: dict[str, Any] | None = None


class Destination(Protocol):
    """What the thread writes to; its methods are called in the thread only."""

    def write(
        self, queued: list[Finished | Validated | Mark], *, writing: bool
    ) -> tuple[float, float]:
        """Write; returns the seconds of processor time and of waiting for the disk.

        Args:
            queued: executions and validations, and marks between them.
            writing: whether there may be more.
        """
        ...

    def failed(self) -> None:
        """Drop what could not be written: nothing more will be."""
        ...

    def ended_silently(self) -> RunError:
        """The error for a thread that has died without one. Called in the training's thread."""
        ...


class WriteQueue:
    """The queue of one fit, with its thread; one condition guards all of its fields.

    Args:
        destination: where executions are written.
    """

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._changed = threading.Condition()
        self._queue: deque[tuple[Finished | Validated | Mark, int]] = deque()
        self._bytes = 0
        self._closing = False
        self._blocked = False  # the training waits for room
        self._asked = self._answered = 0  # requests to write at once
        self._failure: RunError | None = None
        self._raised = False
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name=THREAD, daemon=True
        )
        self._thread.start()

    # -- the side of the training loop ------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether executions may still be put; false once it has ended."""
        return self._thread is not None

    def put(self, done: Finished | Validated) -> None:
        """Queue one execution, or a validation; waits only if too much is queued."""
        self.raise_failure()
        size = done.nbytes
        with self._changed:
            # `self._queue`: an execution above the limit is taken once the queue is empty, or it
            # would never be.
            while self._queue and self._bytes + size > MOST_QUEUED and not self._failure:
                self._blocked = True
                self._changed.notify_all()
                self._changed.wait(timeout=LOOK_S)
                self._check_thread()
            self._blocked = False
            if self._failure is None:
                self._queue.append((done, size))
                self._bytes += size
                if self._bytes > MOST_WAITING:
                    self._changed.notify_all()  # otherwise the thread sleeps until its next write
        self.raise_failure()

    def put_mark(self, mark: Mark) -> bool:
        """Queue a mark; false if the queue has ended."""
        with self._changed:
            if self._thread is None:
                return False
            # No bytes: a mark never waits for room, and does not hurry the thread. `flush` does.
            self._queue.append((mark, 0))
            return True

    def flush(self) -> None:
        """Wait until everything queued so far is on disk, or cannot be."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            while self._thread is not None and self._failure is None and self._answered < mine:
                # With a limit: a thread that died does not notify.
                self._changed.wait(timeout=0.1)
                thread = self._thread
                if self._closing and (thread is None or not thread.is_alive()):
                    return  # it wrote everything before it ended
                self._check_thread()

    def end(self) -> None:
        """Write the rest, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        assert self._thread is not None
        # The thread does end: each of its waits has a limit.
        while self._thread.is_alive():
            self._thread.join(timeout=LOOK_S)
        self._thread = None

    def raise_failure(self) -> None:
        """Raise the thread's error, once: a loop that continues is not stopped again at each step."""
        if self._failure is not None and not self._raised:
            self._raised = True
            raise self._failure

    def _check_thread(self) -> None:
        """Notice a thread that ended silently, instead of waiting for it forever."""
        thread = self._thread
        dead = thread is not None and not thread.is_alive() and not self._closing
        if dead and self._failure is None:
            self._failure = self._destination.ended_silently()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._follow()
        # The destination turns what goes wrong into these. Anything else is our bug: the thread
        # ends, and `_check_thread` notices.
        except TailraceError as error:
            with self._changed:
                self._failure = error if isinstance(error, RunError) else RunError(str(error))
                # Nothing will be written any more; what waits would only take memory, and hold up
                # `put`.
                self._queue.clear()
                self._bytes = 0
                self._destination.failed()
                self._changed.notify_all()

    def _follow(self) -> None:
        following = time.monotonic() + WRITE_EVERY_S
        ending = False
        while not ending:
            with self._changed:
                while not self._is_hurried() and (wait := following - time.monotonic()) > 0:
                    self._changed.wait(timeout=wait)
                # Left in the queue until they are on disk: `put` counts their bytes until then.
                taken = [done for done, _ in self._queue]
                ending, asked = self._closing, self._asked
            # Without the condition: training queues more while this is written.
            started, pause = time.monotonic(), 0.0
            # At the end also without rows: this commit says that nothing more comes.
            if taken or ending:
                busy, waited = self._destination.write(taken, writing=not ending)
                pause = max(busy / SHARE, waited / DISK_SHARE)
            following = started + max(WRITE_EVERY_S, min(pause, PAUSE_S))
            with self._changed:
                for _ in taken:
                    self._bytes -= self._queue.popleft()[1]
                taken.clear()  # or the sleeping thread would keep them alive
                self._answered = asked
                self._changed.notify_all()

    def _is_hurried(self) -> bool:
        waiting = self._blocked or self._bytes > MOST_WAITING
        return self._closing or self._asked > self._answered or waiting


def retried_while_full(
    commit: Callable[[], tuple[float, float]], directory: Path
) -> tuple[float, float]:
    """Commit, and retry while the disk is full; training continues meanwhile."""
    give_up = None
    while True:
        try:
            return commit()
        except OSError as error:
            full = not isinstance(error, TailraceError) and error.errno in FULL
            if not full or (give_up is not None and time.monotonic() > give_up):
                raise
        if give_up is None:
            # From the first failure on, not from the latest: the wait has an end.
            give_up = time.monotonic() + FULL_S
            logger.warning(
                f"The disk of the run directory {str(directory)!r} is full. What is not "
                f"written waits in memory; if there is no room in {FULL_S:g} s, the fit ends."
            )
        time.sleep(RETRY_S)
