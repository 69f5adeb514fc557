"""Where captured gradients go."""

from __future__ import annotations

import contextvars
from typing import Any


class GradientCaptureContext:
    """Gradients taken inside leave those of captured values here.

    Attributes:
        captured_gradients: for each tag a list with the gradient in each leaf of what was captured.
    """

    def __init__(self) -> None:
        self.captured_gradients: dict[str, list[Any]] = {}
        self.zeros: dict[str, list[Any]] = {}
        self._token: Any = None

    def __enter__(self) -> Any:
        self._token = _active.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.reset(self._token)

    def filled(self, found: list[Any]) -> None:
        """Take over the gradients in the zeros, in order."""
        rest = iter(found)
        self.captured_gradients = {
            tag: [next(rest) for _ in zeros] for tag, zeros in self.zeros.items()
        }


_active: contextvars.ContextVar[Any] = contextvars.ContextVar("ipu_capture", default=None)


def active() -> Any:
    """The context or tape that captures gradients now, or None."""
    return _active.get()
