"""What to write instead of a keyword that a method does not have."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tailrace.errors import OptionError

Method = TypeVar("Method", bound=Callable[..., Any])

OF_OPTIMIZERS = ("learning_rate", "lr", "momentum", "weight_decay")

_arguments: dict[str, list[str]] = {}
"""The arguments of each method that suggests."""


def suggesting(called: str, instead: Mapping[str, str] | None = None) -> Callable[[Method], Method]:
    """Make the TypeError of an unknown keyword say what may have been meant.

    Args:
        called: the name of the method in messages.
        instead: options of a related method that this one refuses, with what to write instead.

    >>> @suggesting("train")
    ... def train(*, epochs=1): ...
    >>> train(epoch=2)
    Traceback (most recent call last):
    TypeError: train() got an unexpected keyword argument 'epoch'. Is 'epochs' meant?
    """

    def decorate(method: Method) -> Method:
        known = _arguments[called] = list(inspect.signature(method).parameters)

        @functools.wraps(method)
        def checked(*args: Any, **options: Any) -> Any:
            for name in options:
                if instead is not None and name in instead:
                    raise OptionError(
                        f"{called} has no {name}=. Received: {name}={options[name]!r:.60}. "
                        f"{instead[name]}"
                    )
                if name not in known:
                    raise TypeError(
                        f"{called}() got an unexpected keyword argument {name!r}. "
                        f"{_suggestion(name, known)}"
                    )
            return method(*args, **options)

        return checked  # type: ignore[return-value]

    return decorate


def _suggestion(name: str, known: list[str]) -> str:
    if name in OF_OPTIMIZERS:
        return "It belongs to the optimizer: optax.adam(learning_rate)."
    for other, arguments in _arguments.items():
        if name in arguments:
            return f"It is an argument of {other}."
    near = difflib.get_close_matches(name, known, n=1)
    return f"Is {near[0]!r} meant?" if near else f"There are: {', '.join(known[1:])}."
