"""What a computation returned: tensors and operations, in a structure that is kept."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.operations import Operation
from tailrace.compat.ipu.graph.state import is_variable, value_of
from tailrace.compat.nests import leaves, map_leaves


class Result:
    """What a computation returned: its tensors, and how to give them back."""

    def __init__(self, out: Tree, plain: bool = False) -> None:
        self._out = out
        found = leaves(out)
        # The original compiled to a list of tensors, then operations; plain functions may mix,
        # and in a dict each has its name.
        done = [_is_done(leaf) for leaf in found]
        if isinstance(out, list | tuple) and not plain and done != sorted(done):
            raise IPUValueError(
                "A computation returns zero or more Tensor values followed by zero or more "
                "Operations."
            )
        self.tensors: list[Any] = [
            jnp.asarray(value_of(leaf) if is_variable(leaf) else leaf)
            for leaf in found
            if not _is_done(leaf)
        ]

    def with_values(self, values: list[Any]) -> Any:
        """The same structure with these tensors; operations are left out."""
        if not values:
            return None
        found = _without_none(self.as_returned(values))
        # A list also for one value, as a session of the original returned it.
        return found if isinstance(found, list | dict) else [found]

    def as_returned(self, values: list[Any]) -> Any:
        """What the computation returned, with these tensors; None for operations."""
        rest = iter(values)
        return map_leaves(lambda out: None if _is_done(out) else next(rest), self._out)


def _without_none(out: Tree) -> Any:
    """A structure of lists and dicts without what was an operation."""
    if isinstance(out, dict):
        return {key: _without_none(value) for key, value in out.items() if value is not None}
    if isinstance(out, list | tuple):
        return [_without_none(value) for value in out if value is not None]
    return out


def _is_done(value: object) -> bool:
    return value is None or isinstance(value, Operation)
