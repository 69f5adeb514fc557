"""Parts of a variable that are written: `v[1].assign(x)`, `v.scatter_nd_update(indices, x)`.

Both classes of variables have these methods: TensorFlow's own, and those of `get_variable`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp

from tailrace.base.array_like import Index, TensorLike
from tailrace.compat.arguments import VariableLike
from tailrace.compat.ipu.graph.deferred import Deferred, deferred_call, describing
from tailrace.compat.ipu.graph.state import value_of

WRITES = {"assign": "set", "assign_add": "add", "assign_sub": "subtract"}
"""What a part of a variable can be asked for, and what JAX calls it."""


class IndexedSlices(Protocol):
    """TensorFlow's rows of a tensor, with their numbers."""

    @property
    def indices(self) -> Any:
        """The numbers."""
        ...

    @property
    def values(self) -> Any:
        """The rows."""
        ...


_parts: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], Any]] = {}
"""Arrays that live, by their ids: the array, the variable that it is a part of, and which part."""


def part(variable: VariableLike, key: Index, read: Callable[[VariableLike, Any], Any]) -> Any:
    """What `variable[key]` is: the values, which remember where they come from."""
    if describing() or isinstance(key, Deferred):
        found = deferred_call(read, (variable, key), {})
        for name, how in WRITES.items():
            # As TensorFlow does it: the tensor gets the method, bound to the variable.
            setattr(found, name, lambda value, *_, _how=how, **__: put(variable, _how, key, value))
        return found
    found = read(variable, key)
    # An array has no place for a method of its own, so it is remembered here for as long as it lives.
    number = id(found)
    reference = weakref.ref(found, lambda _: _parts.pop(number, None))
    # The variable by a weak reference too: `variable[...]` is its own array, which it keeps alive.
    _parts[number] = reference, weakref.ref(variable), key
    return found


def writer(array: TensorLike, name: str) -> Callable[..., Any] | None:
    """`assign`, `assign_add` or `assign_sub` of a part of a variable; None of other arrays."""
    if id(array) not in _parts:
        return None
    reference, held, key = _parts[id(array)]
    variable = held()
    # The id of an array that is gone may be that of another one.
    if reference() is not array or variable is None:
        return None
    return lambda value, *_, **__: put(variable, WRITES[name], key, value)


def put(variable: VariableLike, how: str, key: Index, value: TensorLike) -> Any:
    """Change a part of a variable, now or when a session runs; returns the variable."""
    if describing() or isinstance(value, Deferred) or isinstance(key, Deferred):
        return deferred_call(put, (variable, how, key, value), {})
    array = jnp.asarray(value_of(variable))
    return variable.assign(getattr(array.at[key], how)(jnp.asarray(value).astype(array.dtype)))


def _places(indices: TensorLike) -> tuple[Any, ...]:
    """Rows of coordinates as JAX's index."""
    return tuple(jnp.moveaxis(jnp.asarray(indices), -1, 0))


def _scatter_nd(how: str) -> Callable[..., Any]:
    def method(
        self: VariableLike, indices: TensorLike, updates: TensorLike, name: str | None = None
    ) -> Any:
        """Change the places that rows of `indices` name; returns the variable.

        Args:
            indices: rows of coordinates.
            updates: a value for each of them.
            name: without effect.
        """
        del name
        if describing():
            return deferred_call(method, (self, indices, updates), {})
        return put(self, how, _places(indices), updates)

    return method


def _scatter(how: str) -> Callable[..., Any]:
    def method(self: VariableLike, sparse_delta: IndexedSlices, *_: Any, **__: Any) -> Any:
        """Change the rows that a `tf.IndexedSlices` names; returns the variable.

        Args:
            sparse_delta: the rows and their numbers.
            *_: without effect.
            **__: without effect.
        """
        return put(self, how, jnp.asarray(sparse_delta.indices), sparse_delta.values)

    return method


def sparse_read(self: VariableLike, indices: TensorLike, name: str | None = None) -> Any:
    """The rows with these numbers.

    Args:
        indices: the numbers.
        name: without effect.
    """
    del name
    if describing():
        return deferred_call(sparse_read, (self, indices), {})
    return jnp.asarray(value_of(self))[jnp.asarray(indices)]


def gather_nd(self: VariableLike, indices: TensorLike, name: str | None = None) -> Any:
    """The elements that rows of `indices` name.

    Args:
        indices: rows of coordinates.
        name: without effect.
    """
    del name
    if describing():
        return deferred_call(gather_nd, (self, indices), {})
    return jnp.asarray(value_of(self))[_places(indices)]


METHODS: dict[str, Callable[..., Any]] = {
    **{f"scatter_nd_{name}": _scatter_nd(name) for name in ("add", "max", "min")},
    "scatter_nd_sub": _scatter_nd("subtract"),
    "scatter_nd_update": _scatter_nd("set"),
    **{f"scatter_{name}": _scatter(name) for name in ("add", "max", "min", "mul")},
    "scatter_div": _scatter("divide"),
    "scatter_sub": _scatter("subtract"),
    "scatter_update": _scatter("set"),
    "sparse_read": sparse_read,
    "gather_nd": gather_nd,
}
"""The methods, by their names in TensorFlow."""


def add_methods(kind: type) -> None:
    """Give a class of variables these methods."""
    for name, method in METHODS.items():
        setattr(kind, name, method)
