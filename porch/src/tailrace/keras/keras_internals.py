"""Where this front end reaches beyond Keras' documented interface: each place, with its reason.

Methods of Keras are hooked once, when `tailrace.keras` is imported, and never unhooked. A hook asks
whether it concerns the model (or the scope) at hand and otherwise calls what was there before, so
nothing leaks from one thread, scope or model to another.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

PLAIN: dict[str, Callable[..., Any]] = {}
"""Methods of `keras.Model` as Keras wrote them, by name."""


def hook(kind: type, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    """Let `around(plain, self, ...)` answer for a method; returns `plain`, the method as it was.

    The method is replaced in the class that defines it: Keras compares methods with those of its own
    classes to see what a user has overridden. Signature and marks of the method stay, because Keras
    reads them.
    """
    owner = next(one for one in kind.__mro__ if name in vars(one))
    plain = vars(owner)[name]

    @functools.wraps(plain)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(plain, self, *args, **kwargs)

    hooked.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    setattr(owner, name, hooked)
    return plain


@functools.cache
def functional_class() -> Any:
    """The class of Functional models, which Keras does not name in public."""
    inputs = keras.Input((1,), name="of_a_functional_model")
    return type(keras.Model(inputs, inputs, name="a_functional_model"))
