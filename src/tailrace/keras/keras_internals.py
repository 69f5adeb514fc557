"""All uses of Keras beyond its documented interface, each with its reason.

Methods of Keras are hooked once, when `tailrace.keras` is imported, and never unhooked. A hook checks
whether it concerns the current model (or scope) and otherwise calls the original method, so nothing
leaks from one thread, scope or model to another.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

PLAIN: dict[str, Callable[..., Any]] = {}
"""The original methods of `keras.Model`, by name."""


def hook(kind: type, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method by `around(plain, self, ...)`; returns `plain`, the original method.

    The method is replaced in the class that defines it: Keras compares methods with those of its
    classes to detect overrides. Signature and attributes of the method are copied, because Keras reads
    them.
    """
    owner = next(one for one in kind.__mro__ if name in vars(one))
    plain = vars(owner)[name]

    @functools.wraps(plain)
    def hooked(self: object, *args: Any, **kwargs: Any) -> Any:
        return around(plain, self, *args, **kwargs)

    hooked.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    setattr(owner, name, hooked)
    return plain


@functools.cache
def functional_class() -> Any:
    """The class of Functional models, which has no public name in Keras."""
    # With names of their own: unnamed ones would advance Keras' counters, and with them the names
    # of the user's layers.
    inputs = keras.Input((1,), name="of_a_functional_model")
    return type(keras.Model(inputs, inputs, name="a_functional_model"))


def layers_in(layer: keras.Layer) -> list[keras.Layer]:
    """A layer and the layers inside it, whatever attribute holds them."""
    found = {id(layer): layer}
    waiting: list[Any] = list(vars(layer).values())
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, keras.Layer) and id(value) not in found:
            found[id(value)] = value
            waiting += vars(value).values()
    return list(found.values())
