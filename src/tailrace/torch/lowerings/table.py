"""The table of lowerings: an operation of PyTorch, and the JAX function that computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

LOWERINGS: dict[Any, Callable[..., Any]] = {}
"""By overload. A lowering takes JAX values, and numbers, lists and dtypes as the graph has them, and
returns a JAX value or a tuple of them; where results are is not its business, so `device`, `layout`,
`pin_memory` and `memory_format` are taken off before."""

BY_NAME: dict[str, Callable[..., Any]] = {}
"""Lowerings of operations that other packages register when they are imported, by `package::name`."""


def lowering(*overloads: Any) -> Callable[[F], F]:
    """Register a function as the lowering of these operations."""

    def register(function: F) -> F:
        for one in overloads:
            if one in LOWERINGS:
                raise ValueError(f"{one} has two lowerings")
            LOWERINGS[one] = function
        return function

    return register
