"""Compilations and their causes, reported to listeners as they happen."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One program that was compiled, or reused.

    Attributes:
        purpose: its purpose: "training", "evaluation of accuracy".
        cause: why it was compiled: the first program, another shape, another length.
        seconds: the time it took, tracing and lowering included.
        shared: whether this process had compiled an equal program before.
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
def listening(listener: Listener) -> Generator[None]:
    """Call `listener` for each compilation in this context: before it (0 seconds) and after it."""
    token = _listening.set(listener)
    try:
        yield
    finally:
        _listening.reset(token)


@contextmanager
def compiling(
    purpose: str, cause: str, announced: bool = True
) -> Generator[Callable[[bool], Compilation]]:
    """A context around a compilation; call the yielded function at its end: was it shared?

    Args:
        purpose: what the program is for.
        cause: why it is compiled.
        announced: whether listeners hear of its beginning; False if training does not wait for it.
    """
    # A context variable, not an argument: compilations are deep inside a dispatch, and their
    # listeners far outside.
    listener, started = _listening.get(), time.perf_counter()
    if listener is not None and announced:
        # Before, with 0 seconds: a compilation of minutes must be announced, not reported afterwards.
        listener(Compilation(purpose, cause))

    def done(shared: bool) -> Compilation:
        seconds = time.perf_counter() - started
        made = Compilation(purpose, cause, seconds, shared, time.time())
        if listener is not None:
            listener(made)
        return made

    yield done
