"""The table of operations, and who computes a call: TensorFlow, a session, or Keras and JAX."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
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
from tailrace.compat.nests import leaves, map_leaves
from tailrace.compat.tensorflow import host
from tailrace.compat.tensorflow.operations import lengths
from tailrace.compat.tensorflow.tensor_shape import TensorShape
from tailrace.errors import OptionError

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
        signature = inspect.signature(function)
        takes_name = "name" in signature.parameters
        computes_lengths = paths[0].rpartition(".")[2] in lengths.OPERATIONS

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            kind = _kind((args, kwargs), draws)
            if kind == "host":
                # Inside `dataset.map`: the program's operations are TensorFlow's there, as they are
                # in the original.
                return host.named(paths[0])(*_for_host(args), **_for_host(kwargs))
            if kind == "deferred":
                return deferred_call(called, args, kwargs)
            if not takes_name:
                kwargs.pop("name", None)
            args, kwargs = _plain(args), _plain(kwargs)
            if computes_lengths and lengths.are_lengths(leaves((args, kwargs))):
                # Of lengths alone: computed now, by numpy's rules, so that shapes can be made of it.
                with jax.ensure_compile_time_eval():
                    return map_leaves(lengths.known, function(*args, **kwargs))
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                # Looked into only now: binding the arguments of every call would slow all.
                raise _refused(paths[0], signature, args, kwargs) or error from error

        called.__name__ = called.__qualname__ = paths[0].rpartition(".")[2]
        for path in paths:
            OPERATIONS[path] = called
        return called

    return enter


def _refused(
    path: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OptionError | None:
    """What to say of arguments that an operation does not take; None: they are not what is wrong."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        taken = ", ".join(signature.parameters)
        return OptionError(f"tf.{path} takes {taken}. Received other arguments: {error}.")
    return None


def only(path: str, given: Mapping[str, Any], *known: str) -> None:
    """Refuse further arguments of an operation, but for these names that it once had."""
    if unknown := sorted(set(given) - set(known)):
        raise OptionError(
            f"tf.{path} has no argument {unknown[0]!r}. Of older versions it takes "
            f"{', '.join(known)}."
        )


def names_under(prefix: str) -> list[str]:
    """The names in a module of the table: those under `nn`, or at the top for an empty prefix."""
    start = f"{prefix}." if prefix else ""
    ends = [path.removeprefix(start) for path in OPERATIONS if path.startswith(start)]
    return sorted({end for end in ends if "." not in end})


def _kind(given: object, draws: bool) -> str:
    found, in_graph = "here", describing()
    # Random numbers are drawn again in each run, and what has control inputs must wait for them.
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
    """Arguments with variables read, shapes as tuples, and tensors of TensorFlow as arrays."""

    def one(leaf: object) -> Any:
        if isinstance(leaf, IpuVariable):
            return leaf.value()
        if isinstance(leaf, TensorShape) and leaf.rank is not None:
            return tuple(leaf.as_list())
        return host.to_array(leaf) if host.is_tensor(leaf) else leaf

    return map_leaves(one, given)


def _for_host(given: object) -> Any:
    """Arguments for TensorFlow: arrays of JAX as numpy's."""

    def one(leaf: object) -> Any:
        return np.asarray(leaf) if type(leaf).__module__.startswith("jax") else leaf

    return map_leaves(one, given)
