"""An `nnx.State` in place of parameters, as `nnx.split` makes it.

Functions get a state of variables again, to merge; the engine has plain values, so that a parameter is
called by its path alone, without the `value` that a variable adds.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from tailrace.base.trees import Tree
from tailrace.trainer.modules.binding import Binding


class NnxStateBinding(Binding):
    """The values of a state of parameters, and of the model state if it is an `nnx.State` too."""

    returns_state = True

    def __init__(self, params: nnx.State, model_state: Tree) -> None:
        # Both have their leaves in one order, so values can be put back by position.
        self.params, self._params = nnx.to_pure_dict(params), jax.tree.structure(params)
        self.model_state, self._state = model_state, None
        if isinstance(model_state, nnx.State):
            self.model_state, self._state = (
                nnx.to_pure_dict(model_state),
                jax.tree.structure(model_state),
            )

    def opened(self, params: Tree, state: Tree) -> tuple[Any, ...]:
        """The arguments of the user's function: states of variables."""
        first = self.shown_params(params)
        return (first,) if self.model_state is None else (first, self.shown_state(state))

    def stored(self, opened: tuple[Any, ...], returned: Tree, before: Tree) -> Any:
        """What the function returned."""
        return nnx.to_pure_dict(returned) if isinstance(returned, nnx.State) else returned

    def model(self, params: Tree, state: Tree) -> Any:
        """The parameters: the user has the module itself."""
        return self.shown_params(params)

    def shown_params(self, params: Tree) -> Any:
        """A state, as it was given."""
        return jax.tree.unflatten(self._params, jax.tree.leaves(params))

    def shown_state(self, state: Tree) -> Any:
        """A state, where one was given."""
        if self._state is None:
            return state
        return jax.tree.unflatten(self._state, jax.tree.leaves(state))
