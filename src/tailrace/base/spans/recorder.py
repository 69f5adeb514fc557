"""Records events while a trace is open: spans of threads, counters, executions.

A recorder records everything between `open` and `close`. Several may be open at a time, nested or
overlapping; each records the events of its interval.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import jax

LEAVE_S = 10.0
"""How long the end of a trace waits for executions that it saw start."""

MOST = 1_000_000
"""The most spans and values of one recorder; later ones are only counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """A time interval. Times are nanoseconds of `time.perf_counter_ns`.

    Attributes:
        track: the id of its thread.
        name: its name.
        start: its start.
        end: its end.
        about: additional values.
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
    """One execution, as seen by the host: from its dispatch, or the end of the previous one.

    Attributes:
        number: its index since the recorder was opened.
        start: when it could begin.
        end: when its results were ready.
        first_step: the index of its first step.
        steps: the number of its steps.
        program: the `jax.stages.Compiled` that ran.
        plan: the plan of its pipeline, if it has one.
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
    """Records events while it is open.

    Args:
        executions: the executions to record, counted from 0; None for all.
        profiler: a profiler of operations on the devices during some of them, if any; see
            `tailrace.profiling.programs.device_operations`.
    """

    def __init__(self, executions: range | None = None, profiler: Any = None) -> None:
        self.executions, self.profiler = executions, profiler
        self.slices: list[Slice] = []
        self.counts: list[Count] = []
        self.ran: list[Ran] = []
        self.threads: dict[int, str] = {}
        self.left_out = 0
        self.began = self.ended = 0
        self._number = -1  # the index of the latest execution
        self._open = executions is None or executions.start == 0
        self._watch = _Watch(self.ran.append)

    def open(self) -> None:
        """Start recording."""
        global _recorders, _listeners
        self.began = time.perf_counter_ns()
        with _lock:
            # New tuples each time: readers take them without the lock, and see one state or the other.
            _recorders, _listeners = (*_recorders, self), (*_listeners, self)

    def close(self) -> None:
        """Stop recording; waits for executions in flight."""
        global _recorders, _listeners
        with _lock:
            _recorders = tuple(one for one in _recorders if one is not self)
            _listeners = tuple(one for one in _listeners if one is not self)
        self._watch.stop()
        if self.profiler is not None:
            self.profiler.stop()
        self.ended = time.perf_counter_ns()

    # -- events ---------------------------------------------------------------------------------

    def add(self, name: str, start: int, about: dict[str, Any]) -> None:
        """Record a span of this thread that has ended."""
        if not self._open or len(self.slices) >= MOST:
            self.left_out += self._open
            return
        track = threading.get_ident()
        if track not in self.threads:
            self.threads[track] = threading.current_thread().name
        self.slices.append(Slice(track, name, start, time.perf_counter_ns(), about))

    def count(self, name: str, value: float) -> None:
        """Record the value of a counter."""
        if self._open and len(self.counts) < MOST:
            self.counts.append(Count(name, time.perf_counter_ns(), value))
        else:
            self.left_out += self._open

    def begin_execution(self) -> None:
        """Called before an execution is prepared."""
        self._number += 1
        if self.executions is not None:
            # Spans of other executions are not recorded: the room of a recorder is for the chosen ones.
            self._open = self._number in self.executions

    def dispatch(self, program: jax.stages.Compiled) -> None:
        """Called before it is dispatched: it is compiled, and its elements are ready."""
        if self._open and self.profiler is not None:
            self.profiler.before(program)

    def dispatched(self, ticket: jax.Array, made: Callable[..., Ran], started: int) -> None:
        """Called after the dispatch; `ticket` is ready when the execution has finished."""
        if self._open:
            self._watch.add(ticket, made, started, self._number)
            if self.profiler is not None:
                self.profiler.after(ticket)


class _Watch:
    """Waits for executions in a thread, and records when each has finished."""

    def __init__(self, add: Callable[[Ran], None]) -> None:
        self._add = add
        self._tickets: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, ticket: jax.Array, made: Callable[..., Ran], started: int, number: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tailrace-trace", daemon=True)
            self._thread.start()
        self._tickets.put((ticket, made, started, number))

    def stop(self) -> None:
        if self._thread is not None:
            self._tickets.put(None)
            # It waits for an execution, which may be stuck: not forever, and it is a daemon.
            self._thread.join(LEAVE_S)
            self._thread = None

    def _run(self) -> None:
        last = 0
        while (item := self._tickets.get(timeout=None)) is not None:  # a thread without work
            ticket, made, started, number = item
            failed = False
            try:
                ticket.block_until_ready()
            except Exception:
                failed = True  # the caller that collects it gets the exception
            end = time.perf_counter_ns()
            # A device runs executions one after the other: one that waited in its queue began when
            # the previous one ended.
            self._add(made(number=number, start=max(started, last), end=end, failed=failed))
            last = end
            # While the thread waits for the next one, it must not keep arrays of this one alive.
            del ticket, item


class Listener(Protocol):
    """Takes in the spans of all threads; a recorder is one."""

    def add(self, name: str, start: int, about: dict[str, Any]) -> None:
        """Called at the end of a span, by its thread."""
        ...


_lock = threading.Lock()
_recorders: tuple[Recorder, ...] = ()
_listeners: tuple[Listener, ...] = ()


def recorders() -> tuple[Recorder, ...]:
    """The open recorders."""
    return _recorders


def listeners() -> tuple[Listener, ...]:
    """The open recorders, and other listeners to spans."""
    return _listeners


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """While a listener receives spans."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _lock:
            _listeners = tuple(one for one in _listeners if one is not listener)
