"""Calls of device functions: which of the arguments are data, and the program for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from tailrace.base.trees import Tree
from tailrace.compat.ipu.ipu_compiler import CompiledOp


class Calls:
    """The programs that device functions became, by function and by arguments that are no data.

    Arrays, also in lists, tuples and dicts, are inputs of the program; everything else (iterators,
    queues, models, numbers) is part of it.

    Args:
        one_device: whether programs run on the first device alone, and return what the function
            returns, in its own form.
        around: opened while a function is traced.
    """

    def __init__(
        self,
        one_device: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._programs: dict[Any, CompiledOp] = {}
        self._one_device, self._around = one_device, around

    def __len__(self) -> int:
        return len(self._programs)

    def __call__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function with these arguments in one program."""
        leaves, structure = jax.tree.flatten((list(args), kwargs), is_leaf=_is_whole)
        given = [own_array(leaf) for leaf in leaves]
        arrays = [value for value in given if is_array(value)]
        # Arrays are data: only their form matters (`CompiledOp`). All other arguments are part of the
        # program, so another object is another program.
        key = (fn, structure, *(None if is_array(v) else _identity(v) for v in given))
        if key not in self._programs:
            computation = self._computation(fn, structure, given)
            self._programs[key] = CompiledOp(computation, arrays, self._one_device)
        return self._programs[key](*arrays)

    def _computation(
        self, fn: Callable[..., Any], structure: Tree, given: list[Any]
    ) -> Callable[..., Any]:
        data = [is_array(value) for value in given]
        # What is no data is kept, so that no other object takes the identity of one of them.
        rest = [None if is_data else value for value, is_data in zip(given, data, strict=True)]

        def computation(*changing: Any) -> Any:
            arrays = iter(changing)
            leaves = [next(arrays) if d else value for d, value in zip(data, rest, strict=True)]
            args, kwargs = jax.tree.unflatten(structure, leaves)
            with self._around():
                return fn(*args, **kwargs)

        return computation


def _is_whole(value: object) -> bool:
    """Whether a value is taken as it is: None, objects, and containers of other kinds."""
    return value is None or type(value) not in (list, tuple, dict)


def own_array(value: object) -> Any:
    """An array of another library as one of numpy; anything else as it is."""
    is_foreign = type(value).__module__.split(".")[0] in ("tensorflow", "torch")
    # Not a variable, which converts to an array too: it is state, not data.
    if is_foreign and hasattr(value, "__array__") and not hasattr(value, "assign"):
        return np.asarray(value)
    return value


def is_array(value: object) -> bool:
    """Whether a value is data: an array or a number of numpy or JAX."""
    return isinstance(value, np.ndarray | np.generic | jax.Array)


def _identity(value: object) -> Any:
    """What a program is found again by: numbers and texts by value and kind, objects themselves."""
    if isinstance(value, int | float | str | bool | None):
        # With the type: 1, 1.0 and True are equal as keys, but not as arguments of a program.
        return type(value), value
    return id(value)
