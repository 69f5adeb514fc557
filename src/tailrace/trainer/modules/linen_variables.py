"""The variables of a Flax Linen module in place of parameters.

Linen modules hold no values: `model.init` returns them as a dict of collections. "params" is trained;
the other collections are the model state, and functions get all of them, as `model.apply` does:

    def loss_fn(variables, x, y):
        logits, updates = model.apply(variables, x, mutable=["batch_stats"])
        return loss(logits, y), (updates, aux)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.core import FrozenDict, freeze, unfreeze

from tailrace.base.trees import Tree
from tailrace.errors import OptionError, ProgramError
from tailrace.trainer.modules.binding import Binding
from tailrace.trainer.modules.scopes import module_scope

PARAMS = "params"


def recognised(params: Tree) -> bool:
    """Whether this is a dict of collections, "params" among them."""
    return (
        isinstance(params, Mapping)
        and PARAMS in params
        and all(
            isinstance(name, str) and isinstance(part, Mapping) for name, part in params.items()
        )
    )


class LinenBinding(Binding):
    """The collection "params", and the others."""

    returns_state = True

    def __init__(self, variables: Mapping[str, Any], model_state: Tree) -> None:
        if model_state is not None:
            raise OptionError(
                "The collections of Linen variables besides 'params' are the model state, so it is not "
                f"given beside them. Received: variables with {sorted(variables)}, and model_state. "
                "Give variables['params'] and model_state, or the variables alone."
            )
        self._frozen = isinstance(variables, FrozenDict)
        # Boxes name the axes of parameters for sharding by Flax, which does not happen here.
        plain = unfreeze(nn.meta.unbox(variables))
        self.params = plain.pop(PARAMS)
        self.model_state = plain or None

    def opened(self, params: Tree, state: Tree) -> tuple[Any, ...]:
        """All collections."""
        return (self.model(params, state),)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Scopes are the paths of modules, as those of parameters: without the outermost's class."""
        # Flax's own scopes have the name of the outermost class first, and taps would not find a layer
        # under the name of its parameters.
        with nn.override_named_call(False), nn.intercept_methods(_in_scope):
            yield

    def stored(self, opened: tuple[Any, ...], returned: Tree, before: Tree) -> Any:
        """The collections, those that were returned in their new values."""
        if not isinstance(returned, Mapping) or not set(returned) <= set(before):
            found = sorted(returned) if isinstance(returned, Mapping) else type(returned).__name__
            raise ProgramError(
                "With Linen variables, the loss function returns (loss, (updates, aux)); updates is "
                f"what model.apply(..., mutable=[...]) returns: some of {sorted(before)}. Received in "
                f"its place: {found}."
            )
        after = {**before, **unfreeze(nn.meta.unbox(returned))}
        if jax.tree.structure(after) != jax.tree.structure(before):
            raise ProgramError(
                "A step changes the values of collections, not which there are. Before: "
                f"{jax.tree.structure(before)}. Received: {jax.tree.structure(after)}."
            )
        return after

    def model(self, params: Tree, state: Tree) -> Any:
        """The variables: all collections, of the class that was given."""
        variables = {PARAMS: params, **(state or {})}
        return freeze(variables) if self._frozen else variables


def _in_scope(
    method: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    context: nn.module.InterceptorContext,
) -> Any:
    with module_scope("/".join(context.module.path)):
        return method(*args, **kwargs)
