"""Gradients of activations, captured where they flow back through a value.

A value is captured by adding a zero to it: the gradient in that zero is the gradient in the value.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.compat.ipu.errors import IPURuntimeError, IPUValueError
from tailrace.compat.ipu.graph.gradients import GradientTape, watched_zero


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


class GradientCaptureTape(GradientTape, GradientCaptureContext):
    """A `GradientTape` that captures gradients as well."""

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        GradientTape.__init__(self, persistent, watch_accessed_variables)
        GradientCaptureContext.__init__(self)

    def __enter__(self) -> GradientCaptureTape:
        GradientCaptureContext.__enter__(self)
        return self

    def __exit__(self, *error: object) -> None:
        GradientCaptureContext.__exit__(self, *error)

    def gradient(self, target: Any, sources: Any) -> Any:
        """The gradient of `target` in `sources`; captured gradients are there afterwards."""
        # It is often asked behind its block: then it is opened once more.
        with contextlib.nullcontext() if active() is self else self:
            return super().gradient(target, sources)


_active: contextvars.ContextVar[Any] = contextvars.ContextVar("ipu_capture", default=None)


def active() -> Any:
    """The context or tape that captures gradients now, or None."""
    return _active.get()


def capture_upstream_gradients(args: Any, tag: str = "") -> Any:
    """`args` (a tree) as they are; their gradients are captured under `tag`."""
    context = active()
    if context is None:
        raise IPURuntimeError(
            "capture_upstream_gradients may only be used within the context of a "
            "GradientCaptureTape or a GradientCaptureContext."
        )
    if tag in context.zeros:
        raise IPUValueError(f"Gradients are captured under the tag {tag!r} already.")
    leaves, structure = jax.tree.flatten(args)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    zeros = context.zeros[tag] = [watched_zero(leaf) for leaf in leaves]
    summed = [leaf + zero for leaf, zero in zip(leaves, zeros, strict=True)]
    return jax.tree.unflatten(structure, summed)
