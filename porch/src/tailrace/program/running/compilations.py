"""What was compiled, how long it took, and why: told to whoever listens while it happens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One program that was compiled, or found compiled.

    Attributes:
        purpose: what it is for: "training", "evaluation of accuracy".
        cause: why there was none: the first of its form, another shape, another length.
        seconds: how long it took, tracing and lowering included.
        shared: whether an equal program had been compiled in this process before.
        ended: when it was ready, in seconds since 1970.
    """

    purpose: str
    cause: str
    seconds: float = 0.0
    shared: bool = False
    ended: float = 0.0

    def __str__(self) -> str:
        took = f"{self.seconds:.2f} s" + (", shared" if self.shared else "")
        return f"{self.purpose}: {self.cause} ({took})"


Listener = Callable[[Compilation], None]

_listening: ContextVar[Listener | None] = ContextVar("tailrace_compilations", default=None)


@contextmanager
def hearing(listener: Listener) -> Iterator[None]:
    """While inside, `listener` is told of each compilation: before it (0 seconds), and after."""
    token = _listening.set(listener)
    try:
        yield
    finally:
        _listening.reset(token)


@contextmanager
def compiling(purpose: str, cause: str) -> Iterator[Callable[[bool], Compilation]]:
    """Around a compilation; the function that is yielded is called at its end: was it shared?"""
    listener, started = _listening.get(), time.perf_counter()
    if listener is not None:
        listener(Compilation(purpose, cause))

    def done(shared: bool) -> Compilation:
        seconds = time.perf_counter() - started
        made = Compilation(purpose, cause, seconds, shared, time.time())
        if listener is not None:
            listener(made)
        return made

    yield done
