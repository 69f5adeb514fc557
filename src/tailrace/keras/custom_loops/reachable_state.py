"""The models, optimizers and metrics that a device function can reach.

Their variables become inputs and outputs of the program. They may be arguments, items of lists and
dicts there, in the closure of the function, globals that it names, or attributes of an object found in
one of these places.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

Reachable = (
    keras.layers.Layer
    | keras.optimizers.Optimizer
    | keras.metrics.Metric
    | keras.random.SeedGenerator
    | keras.Variable
)
"""An object with variables."""

DEEPEST, LONGEST = 8, 1000
"""The depth of the search, and the most items of a container to search: data have more."""


def reached_by(function: Callable[..., Any], given: object) -> list[Any]:
    """The objects with variables that a function called with `given` may use, each once."""
    seen: dict[int, Any] = {}
    found = [one for one in _inside(given, seen) if isinstance(one, Reachable)]
    return found + [one for one in _inside(function, seen) if isinstance(one, Reachable)]


def variables_of(one: Reachable) -> list[Any]:
    """The variables of such an object."""
    if isinstance(one, keras.Variable):
        return [one]
    if isinstance(one, keras.random.SeedGenerator):
        return [one.state]
    return list(one.variables)


def _inside(value: object, seen: dict[int, Any], depth: int = 0) -> Iterator[Any]:
    if id(value) in seen or depth > DEEPEST:
        return
    # With the value, so that its id is not used again during the search.
    seen[id(value)] = value
    if isinstance(value, Reachable):
        yield value
    else:
        for part in _parts(value):
            yield from _inside(part, seen, depth + 1)


def _parts(value: object) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values() if len(value) <= LONGEST else ()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value if len(value) <= LONGEST else ()
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType) and not _is_library(value):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                continue
        for name in _names(value.__code__):
            yield value.__globals__.get(name)
    # Not into classes and modules: from there everything can be reached.
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType | Callable):
        yield vars(value) if not _is_library(type(value)) else None
        yield getattr(value, "variables", None)


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names that a function uses, including its inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_library(function: Callable[..., Any]) -> bool:
    # A function of a library reaches what it is given, and no model of the user's besides.
    module = (function.__module__ or "").split(".")[0]
    return module in ("keras", "jax", "numpy", "tensorflow", "torch", "tailrace")
