"""`tk.PipelineStage`: layers note the stage of a pipeline that they are made and called in."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import keras

from tailrace.errors import OptionError, ProgramError

_stage: contextvars.ContextVar[int | None] = contextvars.ContextVar("tailrace_stage", default=None)
_open_scopes: contextvars.ContextVar[int] = contextvars.ContextVar("tailrace_scopes", default=0)

CALLS, MADE = "_tailrace_call_stages", "_tailrace_stage"
"""Under these names a layer keeps the stages of its calls, and the one that it was made in."""


@contextlib.contextmanager
def in_scope() -> Iterator[None]:
    """While the scope of a strategy is open, stages can be named."""
    token = _open_scopes.set(_open_scopes.get() + 1)
    try:
        yield
    finally:
        _open_scopes.reset(token)


class PipelineStage:
    """Layers made and called inside belong to a stage of a pipeline.

    Args:
        stage: the number of the stage, from 0.

    Example:
        >>> import keras, tailrace.keras as tk
        >>> with tk.Strategy().scope():
        ...     inputs = keras.Input((4,))
        ...     with tk.PipelineStage(0):
        ...         x = keras.layers.Dense(8)(inputs)
        ...     with tk.PipelineStage(1):
        ...         x = keras.layers.Dense(2)(x)
        ...     model = keras.Model(inputs, x)
        >>> [one.pipeline_stage for one in model.get_pipeline_stage_assignment()]
        [0, 1]
    """

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def __enter__(self) -> PipelineStage:
        if isinstance(self.stage, bool) or not isinstance(self.stage, int) or self.stage < 0:
            raise OptionError(
                f"A pipeline stage is a number of at least 0. Received: PipelineStage({self.stage!r})."
            )
        if not _open_scopes.get():
            raise ProgramError(
                "PipelineStage may only be used from within a tk.Strategy context. Write it inside "
                "`with strategy.scope():`."
            )
        if _stage.get() is not None:
            raise ProgramError(
                f"Pipeline stages must not be nested. PipelineStage({self.stage}) stands inside "
                f"PipelineStage({_stage.get()})."
            )
        self._token = _stage.set(self.stage)
        self._patched = _noted_layers()
        self._patched.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._patched.__exit__(*error)
        _stage.reset(self._token)


@contextlib.contextmanager
def _noted_layers() -> Iterator[None]:
    """Layers note the stage that they are made and called in."""
    kind: Any = keras.layers.Layer
    make, call = kind.__init__, kind.__call__

    def making(layer: Any, *args: Any, **kwargs: Any) -> None:
        make(layer, *args, **kwargs)
        layer.__dict__[MADE] = _stage.get()

    def calling(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if _stage.get() is not None:
            flat = keras.tree.flatten((args, kwargs))
            symbolic = any(isinstance(one, keras.KerasTensor) for one in flat)
            if symbolic or CALLS not in layer.__dict__:
                layer.__dict__.setdefault(CALLS, []).append(_stage.get())
        return call(layer, *args, **kwargs)

    kind.__init__, kind.__call__ = making, calling
    try:
        yield
    finally:
        kind.__init__, kind.__call__ = make, call


def current_stage() -> int | None:
    """The stage that is named where this is called, if one is."""
    return _stage.get()
