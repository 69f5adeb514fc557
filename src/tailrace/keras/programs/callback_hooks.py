"""The hooks of Keras callbacks as spans in open traces."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from tailrace.base.spans.span import is_traced, span
from tailrace.keras.optimizers.application import overrides

HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
"""The methods that Keras calls."""


@contextlib.contextmanager
def callback_spans(callbacks: object) -> Iterator[None]:
    """A context in which each hook of these callbacks is a span, if a trace is open."""
    if not callbacks or not is_traced():
        yield
        return
    listed = getattr(callbacks, "callbacks", None) or keras.tree.flatten(callbacks)
    with contextlib.ExitStack() as hooks:
        # Each once: a callback may be listed twice, and its hook must not be wrapped twice.
        for callback in {id(one): one for one in listed}.values():
            for name in HOOKS:
                if overrides(callback, name, keras.callbacks.Callback):
                    hooks.enter_context(_hook_span(callback, name))
        yield


@contextlib.contextmanager
def _hook_span(callback: keras.callbacks.Callback, name: str) -> Iterator[None]:
    own, hook = vars(callback), getattr(callback, name)
    before = own.get(name)

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        with span("callback", callback=type(callback).__name__, hook=name):
            return hook(*args, **kwargs)

    # On the object, not its class: other callbacks of that class may belong to another fit.
    own[name] = run
    try:
        yield
    finally:
        if before is None:
            own.pop(name, None)
        else:
            own[name] = before
