"""One update by a Keras optimizer, whichever of its methods was overridden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


def overrides(thing: object, name: str, base: type) -> bool:
    """Whether `thing` has a version of its own of a method of `base`, in its class or in itself."""
    method = getattr(base, name)
    return name in vars(thing) or getattr(type(thing), name, method) is not method


def applied(
    optimizer: keras.optimizers.Optimizer,
    kept: Sequence[Any],
    grads: Sequence[Any],
    values: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> tuple[list[Any], list[Any]]:
    """One update by an optimizer: the new values of the variables, and its own.

    `stateless_apply` passes by an overridden `apply_gradients`; that is called here.
    """
    if not overrides(optimizer, "apply_gradients", keras.optimizers.Optimizer):
        values, kept = optimizer.stateless_apply(list(kept), list(grads), list(values))
        return list(values), list(kept)
    # Run in a scope that holds the values: the override assigns to variables, and the scope records
    # it.
    own = optimizer.variables
    mapping = [*zip(variables, values, strict=True), *zip(own, kept, strict=True)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        optimizer.apply_gradients(zip(grads, variables, strict=True))
    return (
        [scope.get_current_value(v) for v in variables],
        [scope.get_current_value(v) for v in own],
    )
