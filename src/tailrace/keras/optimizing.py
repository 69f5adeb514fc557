"""Keras optimizers as the engine calls them: gradients and state in, parameters and state out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import keras

from tailrace.errors import ProgramError
from tailrace.keras.state import SCALE, Layout
from tailrace.keras.wrappers import MapGradientOptimizer, Wrapper, overrides, wrappers_of


def applied(
    optimizer: Any, kept: Sequence[Any], grads: Sequence[Any], values: Sequence[Any], variables: Any
) -> tuple[list[Any], list[Any]]:
    """One update by an optimizer: the new values of the variables, and its own.

    `stateless_apply` passes by an overridden `apply_gradients`; that is called here.
    """
    if not overrides(optimizer, "apply_gradients", keras.optimizers.Optimizer):
        values, kept = optimizer.stateless_apply(list(kept), list(grads), list(values))
        return list(values), list(kept)
    own = optimizer.variables
    mapping = [*zip(variables, values, strict=True), *zip(own, kept, strict=True)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        optimizer.apply_gradients(zip(grads, variables, strict=True))
    return (
        [scope.get_current_value(v) for v in variables],
        [scope.get_current_value(v) for v in own],
    )


def check_optimizer(optimizer: Any) -> None:
    """Refuse by name what would be skipped in silence."""
    while isinstance(optimizer, Wrapper):
        optimizer = optimizer.inner_optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None and overrides(inner, "apply_gradients", keras.optimizers.Optimizer):
        raise ProgramError(
            f"The optimizer inside {type(optimizer).__name__} is called by the rules of that "
            f"wrapper, which pass by `apply_gradients`. Received: {type(inner).__name__}, which "
            f"overrides `apply_gradients`. Override `update_step` or `apply` instead."
        )


class Updates:
    """An optimizer of Keras with the methods that the engine calls."""

    def __init__(self, optimizer: Any, layout: Layout, start: dict[str, Any]) -> None:
        check_optimizer(optimizer)
        self.optimizer, self._layout, self._start = optimizer, layout, start
        wrappers = wrappers_of(optimizer)
        self.each = self._each if any(wrapper.sees_each for wrapper in wrappers) else None
        self._maps = [one for one in reversed(wrappers) if isinstance(one, MapGradientOptimizer)]
        self.each_alone = self._each_alone if self._maps else None
        scaled = layout.scale is not None or optimizer.loss_scale_factor is not None
        self.unscaled = self._unscaled if scaled else None

    def init(self, params: Any) -> dict[str, Any]:
        """The state that the optimizer's variables hold."""
        return self._start

    def _each(self, grads: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        """What becomes of the gradients of one microbatch, before they are accumulated."""
        variables = self._layout.trainable
        values, found = variables.values(params), variables.values(grads)
        for wrapper in reversed(wrappers_of(self.optimizer)):  # the innermost sees them first
            if wrapper.sees_each:
                found = wrapper.each(found, values, variables.all)
        return {**grads, **variables.tree(found)}

    def _each_alone(self, name: str, gradient: Any, value: Any) -> Any:
        """The same for one gradient, on the device of the stage that makes it."""
        for wrapper in self._maps if name != SCALE else ():
            gradient = wrapper.mapped(gradient, value)
        return gradient

    def _unscaled(self, grads: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        """The gradients of one microbatch as they would be if the loss were not scaled."""
        scale = params.get(SCALE, self.optimizer.loss_scale_factor)
        return {n: g / jnp.asarray(scale, g.dtype) for n, g in grads.items() if n != SCALE}

    def apply(
        self, grads: dict[str, Any], state: dict[str, Any], params: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One update."""
        layout = self._layout
        values, kept = applied(
            self.optimizer,
            layout.optimizer.values(state),
            layout.trainable.values(grads),
            layout.trainable.values(params),
            layout.trainable.all,
        )
        after = layout.trainable.tree(values)
        after = {name: jnp.asarray(value, params[name].dtype) for name, value in after.items()}
        if layout.scale is not None:
            after[SCALE] = kept[layout.scale]
        return after, layout.optimizer.tree(kept)
