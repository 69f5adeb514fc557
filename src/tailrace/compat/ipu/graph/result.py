"""What a computation returned: tensors and operations, in a structure that is kept."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.operations import Operation
from tailrace.compat.ipu.graph.state import is_variable, value_of
from tailrace.data.trees import Tree


class Result:
    """What a computation returned: its tensors, and how to give them back."""

    def __init__(self, out: Tree, plain: bool = False) -> None:
        self._out, self._plain = out, plain
        self.tensors: list[Any] = []
        self._walk(out)

    def _walk(self, out: Tree, ended: bool = False) -> bool:
        if isinstance(out, dict):
            for value in out.values():
                ended = self._walk(value, ended)
            return ended
        if isinstance(out, list | tuple):
            for value in out:
                ended = self._walk(value, ended)
            return ended
        if out is None or isinstance(out, Operation):
            return True
        # The original compiled to a list of tensors with operations behind; plain functions may mix.
        if ended and not self._plain:
            raise IPUValueError(
                "A computation returns zero or more Tensor values followed by zero or more "
                "Operations."
            )
        if is_variable(out):
            out = value_of(out)
        self.tensors.append(jnp.asarray(out))
        return ended

    def with_values(self, values: list[Any]) -> Any:
        """The same structure with these tensors; operations are left out."""
        rest = iter(values)

        def again(out: Tree) -> Any:
            if isinstance(out, dict):
                return {key: again(value) for key, value in out.items() if not _is_done(value)}
            if isinstance(out, list | tuple):
                return [again(value) for value in out if not _is_done(value)]
            return next(rest)

        if not values:
            return None
        found = again(self._out)
        # A list also for one value, as a session of the original returned it.
        return found if isinstance(found, list | dict) else [found]

    def as_returned(self, values: list[Any]) -> Any:
        """What the computation returned, with these tensors; None for operations."""
        rest = iter(values)

        def again(out: Tree) -> Any:
            if isinstance(out, dict):
                return {key: again(value) for key, value in out.items()}
            if isinstance(out, tuple) and hasattr(out, "_fields"):
                return type(out)(*(again(value) for value in out))
            if isinstance(out, list | tuple):
                return type(out)(again(value) for value in out)
            return None if _is_done(out) else next(rest)

        return again(self._out)


def _is_done(value: object) -> bool:
    return value is None or isinstance(value, Operation)
