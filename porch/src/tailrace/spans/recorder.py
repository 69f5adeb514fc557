"""Keeping what happens while a trace is open: spans of threads, counters, executions.

A recorder takes everything in from `open` to `close`. Several may be open at a time, one in the
other or beside each other; each keeps what happens in its own time.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

LEAVE_S = 10.0
"""How long the end of a trace waits for the executions that it has seen start."""

MOST = 1_000_000
"""Spans and values that one recorder keeps; what comes later is counted only."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """Something that took time. Times are nanoseconds of `time.perf_counter_ns`.

    Attributes:
        track: the number of the thread it happened in.
        name: what it was.
        start: when it began.
        end: when it was over.
        about: more about it.
    """

    track: int
    name: str
    start: int
    end: int
    about: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """The value of a counter at a time."""

    name: str
    time: int
    value: float


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """One execution, as the host sees it: from its dispatch, or the end of the one before.

    Attributes:
        number: counted since the recorder was opened.
        start: when it could begin.
        end: when its results were ready.
        first_step: the number of its first step.
        steps: how many it had.
        program: what ran; a `jax.stages.Compiled`.
        plan: of its pipeline, if it has one.
        failed: whether it raised.
    """

    number: int
    start: int
    end: int
    first_step: int
    steps: int
    program: Any
    plan: Any
    failed: bool


class Recorder:
    """Keeps what happens while it is open.

    Args:
        executions: which executions are of interest, counted from 0; None: everything.
        profiler: what watches operations on the devices during some of them, if anything does; see
            `tailrace.profiling.timeline.device_profiler`.
    """

    def __init__(self, executions: range | None = None, profiler: Any = None) -> None:
        self.executions, self.profiler = executions, profiler
        self.slices: list[Slice] = []
        self.counts: list[Count] = []
        self.ran: list[Ran] = []
        self.threads: dict[int, str] = {}
        self.left_out = 0
        self.began = self.ended = 0
        self._number = -1  # of the latest execution
        self._open = executions is None or executions.start == 0
        self._watch = _Watch(self.ran.append)

    def open(self) -> None:
        """Take in everything from now on."""
        global _recorders
        self.began = time.perf_counter_ns()
        with _lock:
            _recorders = (*_recorders, self)

    def close(self) -> None:
        """Take in nothing more; executions on their way are waited for."""
        global _recorders
        with _lock:
            _recorders = tuple(one for one in _recorders if one is not self)
        self._watch.stop()
        if self.profiler is not None:
            self.profiler.stop()
        self.ended = time.perf_counter_ns()

    # -- what happens ---------------------------------------------------------------------------

    def add(self, name: str, start: int, about: dict[str, Any]) -> None:
        """A span of this thread has ended."""
        if not self._open or len(self.slices) >= MOST:
            self.left_out += self._open
            return
        track = threading.get_ident()
        if track not in self.threads:
            self.threads[track] = threading.current_thread().name
        self.slices.append(Slice(track, name, start, time.perf_counter_ns(), about))

    def count(self, name: str, value: float) -> None:
        """A counter has a value now."""
        if self._open and len(self.counts) < MOST:
            self.counts.append(Count(name, time.perf_counter_ns(), value))
        else:
            self.left_out += self._open

    def begin_execution(self) -> None:
        """An execution is about to be prepared."""
        self._number += 1
        if self.executions is not None:
            self._open = self._number in self.executions

    def dispatch(self, program: Any) -> None:
        """It is about to be dispatched: it is compiled, and its elements are there."""
        if self._open and self.profiler is not None:
            self.profiler.before(program)

    def dispatched(self, ticket: Any, made: Callable[..., Ran], started: int) -> None:
        """It is on its way; `ticket` is ready when it is over."""
        if self._open:
            self._watch.add(ticket, made, started, self._number)
            if self.profiler is not None:
                self.profiler.after(ticket)


class _Watch:
    """Waits for executions in a thread, and says when each was over."""

    def __init__(self, add: Callable[[Ran], None]) -> None:
        self._add = add
        self._tickets: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, ticket: Any, made: Callable[..., Ran], started: int, number: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tailrace-trace", daemon=True)
            self._thread.start()
        self._tickets.put((ticket, made, started, number))

    def stop(self) -> None:
        if self._thread is not None:
            self._tickets.put(None)
            self._thread.join(
                LEAVE_S
            )  # it waits for an execution that may be stuck; it is a daemon
            self._thread = None

    def _run(self) -> None:
        last = 0
        while (item := self._tickets.get(timeout=None)) is not None:  # a thread without work
            ticket, made, started, number = item
            failed = False
            try:
                ticket.block_until_ready()
            except Exception:
                failed = True  # whoever collects it has the exception
            end = time.perf_counter_ns()
            self._add(made(number=number, start=max(started, last), end=end, failed=failed))
            last = end
            del ticket, item


_lock = threading.Lock()
_recorders: tuple[Recorder, ...] = ()


def recorders() -> tuple[Recorder, ...]:
    """Those that are open now."""
    return _recorders
