"""`span` and `counter`: how code reports what it does to open traces.

    with span("checkpoint", step=120):
        ...

Without an open trace, both check one tuple and return. A fit with a run directory listens to spans too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tailrace.base.spans import recorder
from tailrace.base.spans.recorder import Listener, Ran, Recorder
from tailrace.errors import OptionError

if TYPE_CHECKING:
    import jax


class _Nothing:
    """The result of `span` without an open trace."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


# One for all: a span costs no allocation without a trace.
_NOTHING = _Nothing()


class _Span:
    __slots__ = ("about", "listeners", "name", "start")

    def __init__(self, listeners: tuple[Listener, ...], name: str, about: dict[str, Any]) -> None:
        self.listeners, self.name, self.about = listeners, name, about
        self.start = 0

    def __enter__(self) -> None:
        self.start = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # A span that ends by an exception is recorded too: it is often the one that is looked for.
            self.about["raised"] = kind.__name__
        for each in self.listeners:
            each.add(self.name, self.start, self.about)


def span(name: str, **about: object) -> _Span | _Nothing:
    """A context that is a span of this thread in every open trace.

    >>> with span("reading", file="digits"):
    ...     pass
    """
    open_now = recorder.listeners()
    return _Span(open_now, name, about) if open_now else _NOTHING


def seconds_of_a_span() -> float:
    """The cost of one span in a traced run, measured on spans that are discarded."""
    # The fastest of several rounds: a pause of the process is not the cost of a span.
    alone, best, count = (Recorder(),), float("inf"), 20
    for _ in range(count):
        started = time.perf_counter()
        for _ in range(count):
            with _Span(alone, "cost", {"number": 1}):
                pass
        best = min(best, time.perf_counter() - started)
    return best / count


def is_traced() -> bool:
    """Whether a trace is open: for values that are worth computing only then."""
    return bool(recorder.recorders())


def counter(name: str, value: float) -> None:
    """Record the value of a counter in every open trace; without one, a no-op.

    Args:
        name: the name of the counter, which is a track of the timeline.
        value: a number.

    Raises:
        OptionError: the value is not a number; only while a trace is open.

    Example:
        >>> import tailrace as tr
        >>> tr.counter("learning rate", 0.1)
    """
    open_now = recorder.recorders()
    if not open_now:
        return
    try:
        # Here, not in the recorder: without a trace, a value on a device is never read.
        number = float(value)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"A counter has a number. Received: tr.counter({name!r}, {value!r})."
        ) from error
    for each in open_now:
        each.count(str(name), number)


@contextmanager
def waiting_for(ticket: jax.Array, name: str) -> Iterator[None]:
    """If spans are recorded: one until an array is ready, then one for its use.

    Copying results waits for them first; only a separate wait shows how long the copy itself took.
    """
    if recorder.listeners():
        with span("execution wait"):
            ticket.block_until_ready()
    with span(name):
        yield


class Execution:
    """One execution while it is prepared and dispatched, for open traces."""

    __slots__ = ("_recorders", "_started")

    def __init__(self) -> None:
        # Taken once: a trace that opens between preparation and dispatch does not see half an
        # execution.
        self._recorders = recorder.recorders()
        self._started = 0
        for each in self._recorders:
            each.begin_execution()

    def dispatch(self, program: jax.stages.Compiled) -> None:
        """Called when everything is ready, before `program` is called."""
        for each in self._recorders:
            each.dispatch(program)
        if self._recorders:
            self._started = time.perf_counter_ns()

    def dispatched(
        self,
        ticket: jax.Array,
        first_step: int,
        steps: int,
        program: jax.stages.Compiled,
        plan: Any,
    ) -> None:
        """Called after that; `ticket` is ready when the execution has finished."""
        for each in self._recorders:
            # Its end is not known yet: the recorder's thread adds it, and makes the `Ran` then.
            made = functools.partial(
                Ran, first_step=first_step, steps=steps, program=program, plan=plan
            )
            each.dispatched(ticket, made, self._started)
