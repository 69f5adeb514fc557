"""Functions whose code the original kept once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.compat.originals.missing import missing_from


def outlined_function(
    func: Callable[..., Any] | None = None,
    unique_sharding: bool = False,
    keep_input_layouts: object = None,
    name: str | None = None,
) -> Any:
    """The function itself: how often its code is in the program is up to the compiler here.

    Args:
        func: the function; None to use this as a decorator with arguments.
        unique_sharding: without effect.
        keep_input_layouts: without effect.
        name: without effect.

    >>> from tailrace.compat import ipu
    >>> @ipu.outlined_function
    ... def double(x):
    ...     return x * 2
    >>> double(4)
    8
    """
    del unique_sharding, keep_input_layouts, name
    return (lambda function: function) if func is None else func


__getattr__, __dir__ = missing_from(__name__)
