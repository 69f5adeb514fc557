"""`tk.PipelineStage`: layers record the stage in which they are created and called."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from tailrace.errors import OptionError, ProgramError
from tailrace.keras.keras_internals import hook
from tailrace.keras.scopes import Scopes

_stage: contextvars.ContextVar[int | None] = contextvars.ContextVar("tailrace_stage", default=None)
_allowed = Scopes("tailrace_stages_allowed")

following: contextvars.ContextVar[Any] = contextvars.ContextVar("tailrace_following", default=None)
"""The subclassed model whose layer calls are being followed, if any."""

CALLS, MADE = "_tailrace_call_stages", "_tailrace_stage"
"""The attributes in which a layer records the stages of its calls, and of its creation."""


def in_scope() -> AbstractContextManager[None]:
    """A context in which stages can be given: the scope of a strategy."""
    return _allowed.opened(True)


class PipelineStage:
    """Layers created and called inside belong to a stage of a pipeline.

    Args:
        stage: the index of the stage, from 0.

    Raises:
        OptionError: it is not a whole number of at least 0; when the block is entered.
        ProgramError: it is outside of a strategy's scope, or inside another stage; when it is entered.

    Example:
        >>> import tailrace.keras as tk, keras
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
                f"A pipeline stage is a whole number of at least 0. "
                f"Received: PipelineStage({self.stage!r})."
            )
        if not _allowed.innermost():
            raise ProgramError(
                "PipelineStage may only be used from within a tk.Strategy context. Write it inside "
                "`with strategy.scope():`."
            )
        if _stage.get() is not None:
            raise ProgramError(
                f"Pipeline stages must not be nested. PipelineStage({self.stage}) is inside "
                f"PipelineStage({_stage.get()})."
            )
        self._token = _stage.set(self.stage)
        return self

    def __exit__(self, *error: Any) -> None:
        _stage.reset(self._token)


def _made(make: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> None:
    """Create a layer, and record the current stage."""
    make(layer, *args, **kwargs)
    if (stage := _stage.get()) is not None:
        layer.__dict__[MADE] = stage


def _called(call: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
    """Call a layer, and record the current stage; its model may be followed."""
    if (stage := _stage.get()) is not None:
        flat = keras.tree.flatten((args, kwargs))
        symbolic = any(isinstance(one, keras.KerasTensor) for one in flat)
        # A call on values (to build a layer, or eagerly) is not one of the model's, and counts only
        # if there is no other.
        if symbolic or CALLS not in layer.__dict__:
            layer.__dict__.setdefault(CALLS, []).append(stage)
    # Layers inside a layer belong to its stage, and are not counted.
    found = following.get()
    if found is None or found.depth:
        return call(layer, *args, **kwargs)
    if isinstance(layer, keras.Model) and layer.layers:  # its layers may be in several stages
        with found.inside(layer):
            return call(layer, *args, **kwargs)
    found.depth += 1  # before the call: a boundary calls layers for masks, which do not count
    try:
        args, kwargs = found.enter(layer, args, kwargs)
        return call(layer, *args, **kwargs)
    finally:
        found.depth -= 1


# In the base class, so that every layer comes here; outside of a stage both hooks only look at context
# variables.
hook(keras.layers.Layer, "__init__", _made)
hook(keras.layers.Layer, "__call__", _called)


def current_stage() -> int | None:
    """The current stage, if any."""
    return _stage.get()
