"""Where captured gradients go."""

from __future__ import annotations

import contextvars
from typing import Any


class GradientCaptureContext:
    """Collects the gradients of captured values that are computed inside it. Not inside a pipeline.

    Make it inside the program, which is traced more than once.

    Attributes:
        captured_gradients: for each tag a list with the gradient of each leaf of what was captured.

    >>> from tailrace.compat import ipu
    >>> w = ipu.Variable(3.0, name="w")
    >>> def step():
    ...     with ipu.eager.backprop.GradientCaptureContext() as context:
    ...         hidden = ipu.ops.grad_util_ops.capture_upstream_gradients(w * 2, tag="hidden")
    ...         ipu.GradientTape().gradient(hidden * 5, w)
    ...     return context.captured_gradients["hidden"][0]
    >>> ipu.ipu_compiler.compile(step)()[0].item()
    5.0
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
        """Store the gradients of the captured values, in order (called where gradients are computed).

        Args:
            found: the gradients.
        """
        # In the order in which the zeros were asked for: tag by tag.
        rest = iter(found)
        self.captured_gradients = {
            tag: [next(rest) for _ in zeros] for tag, zeros in self.zeros.items()
        }


# Of this thread or task: programs may be traced in several at once.
_active: contextvars.ContextVar[Any] = contextvars.ContextVar("ipu_capture", default=None)


def active() -> Any:
    """The context or tape that captures gradients now, or None."""
    return _active.get()
