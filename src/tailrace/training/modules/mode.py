"""Whether what is traced now is a training step or an evaluation."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_evaluating: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tailrace_evaluating", default=False
)


def is_training() -> bool:
    """True, except while a function of `evaluate` or `predict` is traced.

    >>> with evaluating():
    ...     is_training()
    False
    >>> is_training()
    True
    """
    return not _evaluating.get()


@contextlib.contextmanager
def evaluating() -> Iterator[None]:
    """Modules that are opened in this block are in evaluation mode."""
    token = _evaluating.set(True)
    try:
        yield
    finally:
        _evaluating.reset(token)
