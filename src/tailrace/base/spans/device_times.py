"""Divides the time of a fit: the device computes, or it waits for what the host does meanwhile."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tailrace.base.spans import recorder

if TYPE_CHECKING:
    import jax

ACTIVITIES = ("device", "data", "compilation", "validation", "callbacks", "checkpoints", "host")
"""What the time of a fit is divided into: the device computes, or waits for one of the others."""

_SPANS = {
    "dataset wait": "data",
    "compilation": "compilation",
    "validation": "validation",
    "callback": "callbacks",
    "checkpoint": "checkpoints",
}
"""The activity of each span of the fit's thread; all others are the host's."""

_DISPATCH = "dispatch"

MOST = 100_000
"""The most spans between two executions; of more, the first are the host's."""

LEAVE_S = 1.0
"""The longest wait for the thread at the end of a fit, when all executions have ended."""

Interval = tuple[int, int]
"""A start and an end, in nanoseconds of `time.perf_counter_ns`."""


class Run:
    """One execution: dispatched, and perhaps finished."""

    __slots__ = ("began", "ended", "ready")

    def __init__(self, ready: jax.Array, began: int) -> None:
        self.ready, self.began, self.ended = ready, began, 0


class DeviceTimes:
    """Divides the time between the ends of executions into activities.

    An idle device waits for what the thread of the fit does: each idle moment belongs to the span that
    covers it, or to the host if none does. A thread waits for the executions: the fit itself may be
    waiting for data when one ends.
    """

    def __init__(self) -> None:
        self._spans = self._no_spans()
        self._runs: deque[Run] = deque()
        self._since = self._free = 0  # the end of the last period, and of the last execution
        self._thread = 0
        self._waiting: queue.SimpleQueue[Run | None] = queue.SimpleQueue()

    @contextmanager
    def open(self) -> Iterator[None]:
        """While a fit runs, in this thread."""
        self._thread, self._since = threading.get_ident(), time.perf_counter_ns()
        self._spans, self._runs, self._free = self._no_spans(), deque(), self._since
        waiting = self._waiting = queue.SimpleQueue()
        thread = threading.Thread(target=_wait, args=(waiting,), name="tailrace-times", daemon=True)
        thread.start()
        try:
            with recorder.listening(self):
                yield
        finally:
            waiting.put(None)
            thread.join(LEAVE_S)  # it may be waiting for an execution that is stuck; it is a daemon

    @staticmethod
    def _no_spans() -> deque[tuple[str, int, int]]:
        # Bounded: a PyTorch model is open until it is closed, and may not be called for days.
        return deque(maxlen=MOST)

    def add(self, name: str, start: int, about: object) -> None:
        """Add a span that has ended; called by `span`."""
        if threading.get_ident() == self._thread:
            self._spans.append((name, start, time.perf_counter_ns()))

    def began(self, ready: jax.Array, dispatches: int = 1) -> None:
        """Called after a dispatch; `ready` is ready when the execution has finished.

        Args:
            ready: an array of the execution, or of its last part.
            dispatches: the number of its parts, each of which was a dispatch; it began with the first.
        """
        starts = (start for name, start, _ in reversed(self._spans) if name == _DISPATCH)
        *_, start = [0, *itertools.islice(starts, dispatches)]
        run = Run(ready, start or time.perf_counter_ns())
        self._runs.append(run)
        self._waiting.put(run)

    def ended(self) -> tuple[float, ...]:
        """The seconds of each activity up to the end of the oldest execution, which has finished.

        Empty if there is none: it was dispatched in another way.
        """
        if not self._runs:
            return ()
        period, busy = (self._since, time.perf_counter_ns()), []
        run = self._runs.popleft()
        # The thread may not have been scheduled yet; then the execution ended just now.
        run.ended = run.ended or period[1]
        for one in (run, *self._runs):
            end = min(one.ended or period[1], period[1])
            # An execution starts when it is dispatched, or at the end of the one before.
            busy.append((max(one.began, self._free, period[0]), end))
            if one is run:
                self._free = max(self._free, run.ended)
        spans, self._spans, self._since = outermost(self._spans), self._no_spans(), period[1]
        return _divided(period, busy, spans)


def outermost(spans: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The spans of one thread that are not inside another, given in the order of their ends.

    >>> outermost([("wait", 1, 2), ("validation", 0, 3), ("wait", 4, 5)])
    [('validation', 0, 3), ('wait', 4, 5)]
    """
    found: list[tuple[str, int, int]] = []
    for span in spans:
        while found and found[-1][1] >= span[1]:
            found.pop()
        found.append(span)
    return found


def _divided(
    period: Interval, busy: list[Interval], spans: list[tuple[str, int, int]]
) -> tuple[float, ...]:
    """The seconds of each activity in a period; they add up to it."""
    idle = list(_between(period, busy))
    seconds: dict[str, int] = dict.fromkeys(ACTIVITIES, 0)
    for name, start, end in spans:
        if name in _SPANS:
            seconds[_SPANS[name]] += sum(_overlap((start, end), each) for each in idle)
    waited = sum(end - start for start, end in idle)
    seconds["device"] = period[1] - period[0] - waited
    seconds["host"] = waited - sum(seconds[name] for name in _SPANS.values())
    return tuple(seconds[name] * 1e-9 for name in ACTIVITIES)


def _between(period: Interval, busy: Iterable[Interval]) -> Iterator[Interval]:
    """The rest of a period, without ordered intervals."""
    at, stop = period
    for start, end in busy:
        if start > at:
            yield at, min(start, stop)
        at = max(at, end)
    if at < stop:
        yield at, stop


def _overlap(one: Interval, other: Interval) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _wait(waiting: queue.SimpleQueue[Run | None]) -> None:
    """Note when executions end."""
    while (run := waiting.get(timeout=None)) is not None:  # a thread without work
        with suppress(Exception):  # the fit that collects it gets the exception
            run.ready.block_until_ready()
        run.ended = time.perf_counter_ns()
        del run
