"""The table of operations, and who computes a call: TensorFlow, a session, or Keras and JAX."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tailrace.compat.ipu.graph.deferred import (
    Deferred,
    control_inputs,
    deferred_call,
    describing,
)
from tailrace.compat.ipu.graph.state import is_variable
from tailrace.compat.ipu.graph.variables import Variable as IpuVariable
from tailrace.compat.tensorflow import host
from tailrace.compat.tensorflow.operations import lengths
from tailrace.data.array_like import TensorLike

OPERATIONS: dict[str, Callable[..., Any]] = {}
"""What there is, by its name in TensorFlow: `reduce_mean`, `math.reduce_mean`, `nn.relu`."""


def operation(
    *paths: str, draws: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put a function into the table, under these names; `name=` is accepted and has no effect.

    Args:
        *paths: its names.
        draws: whether it gives other values each time that it is run.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        takes_name = "name" in inspect.signature(function).parameters
        computes_lengths = paths[0].rpartition(".")[2] in lengths.OPERATIONS

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            kind = _kind((args, kwargs), draws)
            if kind == "host":
                return host.named(paths[0])(*_for_host(args), **_for_host(kwargs))
            if kind == "deferred":
                return deferred_call(called, args, kwargs)
            if not takes_name:
                kwargs.pop("name", None)
            if computes_lengths and lengths.are_lengths(leaves((args, kwargs))):
                with jax.ensure_compile_time_eval():
                    return mapped(lengths.known, function(*args, **kwargs))
            return function(*_plain(args), **_plain(kwargs))

        called.__name__ = called.__qualname__ = paths[0].rpartition(".")[2]
        for path in paths:
            OPERATIONS[path] = called
        return called

    return enter


def names_under(prefix: str) -> list[str]:
    """The names in a module of the table: those under `nn`, or at the top for an empty prefix."""
    start = f"{prefix}." if prefix else ""
    ends = [path.removeprefix(start) for path in OPERATIONS if path.startswith(start)]
    return sorted({end for end in ends if "." not in end})


def leaves(value: TensorLike) -> Iterator[Any]:
    """The leaves of a nest of lists, tuples and dicts."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: TensorLike) -> Any:
    """A nest with its leaves replaced."""
    if isinstance(value, dict):
        return {key: mapped(function, inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(function, inner) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, inner) for inner in value)
    return function(value)


def _kind(given: object, draws: bool) -> str:
    found, in_graph = "here", describing()
    # Random numbers are drawn anew in each run, and what has control inputs must wait for them.
    if in_graph and (draws or control_inputs()):
        return "deferred"
    for leaf in leaves(given):
        if isinstance(leaf, Deferred) or (in_graph and is_variable(leaf)):
            return "deferred"
        # Inside of `dataset.map` values are TensorFlow's and have none yet; strings exist only
        # there.
        if host.is_tensor(leaf) and (host.is_symbolic(leaf) or not host.is_numeric(leaf)):
            found = "host"
    return found


def _plain(given: object) -> Any:
    """Arguments with variables read, and tensors of TensorFlow that have values as arrays."""

    def one(leaf: object) -> Any:
        if isinstance(leaf, IpuVariable):
            return leaf.value()
        return host.to_array(leaf) if host.is_tensor(leaf) else leaf

    return mapped(one, given)


def _for_host(given: object) -> Any:
    """Arguments for TensorFlow: arrays of JAX as numpy's."""

    def one(leaf: object) -> Any:
        return np.asarray(leaf) if type(leaf).__module__.startswith("jax") else leaf

    return mapped(one, given)
