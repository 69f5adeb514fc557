"""A state with Flax NNX modules in it: modules, optimizers, metrics and random streams of NNX.

They refer to one another (an optimizer to its model), so the whole state is split into a graph and
arrays at once, and is made from these in each step again. What a step assigns to a module counts.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.trainer.modules.own_state import OwnBinding, another_structure


def holds_modules(state: Tree) -> bool:
    """Whether there is a node of NNX in a tree."""
    return any(map(_is_node, jax.tree.leaves(state, is_leaf=_is_node)))


class NnxOwnBinding(OwnBinding):
    """A tree with NNX modules as a tree of arrays."""

    def __init__(self, state: Tree) -> None:
        self._graph, arrays = nnx.split(state)
        self.model_state = nnx.to_pure_dict(arrays)

    def tree(self, arrays: Tree) -> Any:
        """The user's state with these arrays in it: new modules."""
        return nnx.merge(self._graph, nnx.State(arrays))

    def stored(self, opened: tuple[Any, ...], returned: Tree, before: Tree) -> Any:
        """The arrays of a state like the one that was given."""
        graph, arrays = nnx.split(returned)
        after = nnx.to_pure_dict(arrays)
        if jax.tree.structure(after) != jax.tree.structure(self.model_state):
            raise another_structure(self.model_state, after)
        if graph != self._graph:
            raise ProgramError(
                "A step changes the values of its modules, not what they are made of: the module that "
                "came back has other attributes than the one that was given. Create variables in "
                "__init__, and pop what was sown."
            )
        return after


def _is_node(part: object) -> bool:
    return isinstance(part, nnx.Module | nnx.Variable | nnx.State | nnx.Rngs | nnx.Optimizer)
