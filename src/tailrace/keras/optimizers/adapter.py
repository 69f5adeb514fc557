"""Keras optimizers in the engine's form: gradients and state in, parameters and state out."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.errors import OptionError, ProgramError
from tailrace.keras.optimizers.application import applied, overrides
from tailrace.keras.optimizers.wrapper import asked, scaled_twice
from tailrace.keras.optimizers.wrappers import (
    MapGradientOptimizer,
    chain_of,
    wrappers_by_scale,
    wrappers_of,
)
from tailrace.keras.outfeed_layers import scale_is_elsewhere
from tailrace.keras.programs.variables import SCALE, Layout


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse an override that would be silently ignored."""
    chain = chain_of(optimizer)
    scalers = [one for one in chain if isinstance(one, keras.optimizers.LossScaleOptimizer)]
    if len(scalers) > 1:
        raise OptionError(scaled_twice(scalers[0].inner_optimizer))
    # An optimizer around another that is not a wrapper of ours (a scaler of the user's own).
    inner = getattr(chain[-1], "inner_optimizer", None)
    if inner is not None:
        scalers, chain = [chain[-1]], [inner]
    if scalers and overrides(chain[-1], "apply_gradients", keras.optimizers.Optimizer):
        raise ProgramError(
            f"The optimizer inside {type(scalers[0]).__name__} is called by the rules of that "
            f"wrapper, which pass by `apply_gradients`. Received: {type(chain[-1]).__name__}, which "
            f"overrides `apply_gradients`. Override `update_step` or `apply` instead."
        )


def check_in_loop(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse an optimizer that does not work in a hand-written loop."""
    chain = chain_of(optimizer)
    if any(isinstance(one, keras.optimizers.LossScaleOptimizer) for one in chain):
        inner = type(chain[-1]).__name__
        raise ProgramError(
            f"A LossScaleOptimizer decides on the device whether a step is made, which Keras on JAX "
            f"can do in `fit` only. Received: a LossScaleOptimizer around {inner}, in a function given "
            f"to strategy.run. Train with `fit`, or scale by a fixed number: "
            f"{inner}(..., loss_scale_factor=1024.0), and differentiate optimizer.scale_loss(loss)."
        )


def without_scale(gradient: TensorLike, scale: TensorLike) -> Any:
    """The gradient of the loss, from that of the scaled loss; in at least the scale's precision."""
    narrow = jnp.finfo(gradient.dtype).bits < jnp.finfo(scale.dtype).bits
    wide = scale.dtype if narrow else gradient.dtype
    return gradient.astype(wide) / scale.astype(wide)


def with_scale(changed: TensorLike, before: TensorLike, scale: TensorLike) -> Any:
    """A changed gradient of the loss as a gradient of the scaled loss, which was `before`.

    If that was not finite, it is returned: the step is skipped anyway.
    """
    changed = jnp.asarray(changed)
    scaled = (changed * scale.astype(changed.dtype)).astype(before.dtype)
    return jnp.where(jnp.isfinite(before).all(), scaled, before)


class Updates:
    """A Keras optimizer with the methods that the engine calls."""

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, layout: Layout, start: dict[str, Any]
    ) -> None:
        check_optimizer(optimizer)
        self.optimizer, self._layout, self._start = optimizer, layout, start
        wrappers = wrappers_of(optimizer)
        self.each = self._each if any(wrapper.sees_each for wrapper in wrappers) else None
        self._wrappers = wrappers
        self._around, self._inside = [
            [one for one in reversed(group) if one.sees_each]  # the innermost sees them first
            for group in wrappers_by_scale(optimizer)
        ]
        self._maps = [one for one in self._around if isinstance(one, MapGradientOptimizer)]
        self.each_alone = self._each_alone if self._maps or self._inside else None
        scaled = layout.scale is not None or optimizer.loss_scale_factor is not None
        self.unscaled = self._unscaled if scaled else None

    def init(self, params: Tree) -> dict[str, Any]:
        """The state of the optimizer's variables."""
        return self._start

    def _each(self, grads: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        """The gradients of one microbatch after the wrappers, before they are accumulated."""
        variables = self._layout.trainable
        values, found = variables.values(params), variables.values(grads)
        for wrapper in self._around:
            found = wrapper.each(found, values, variables.all)
        # Wrappers inside the scaler are promised gradients of the loss itself; what is accumulated
        # stays scaled, because the scaler decides about the step from the scaled sum.
        if self._inside:
            scale = params[SCALE]
            changed = [without_scale(grad, scale) for grad in found]
            for wrapper in self._inside:
                changed = wrapper.each(changed, values, variables.all)
            pairs = zip(changed, found, strict=True)
            found = [with_scale(after, before, scale) for after, before in pairs]
        return {**grads, **variables.tree(found)}

    def _each_alone(self, name: str, gradient: TensorLike, value: object) -> Any:
        """The same for one gradient, on the device of the stage that computes it."""
        if self._inside:
            raise OptionError(scale_is_elsewhere(self._inside[0]))
        for wrapper in self._maps if name != SCALE else ():
            gradient = wrapper.mapped(gradient, value)
        return gradient

    def _unscaled(self, grads: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        """The unscaled gradients of one microbatch."""
        scale = params.get(SCALE, self.optimizer.loss_scale_factor)
        return {n: g / jnp.asarray(scale, g.dtype) for n, g in grads.items() if n != SCALE}

    def apply(
        self, grads: dict[str, Any], state: dict[str, Any], params: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One update."""
        layout = self._layout
        with asked(self._wrappers):
            values, kept = applied(
                self.optimizer,
                layout.optimizer.values(state),
                layout.trainable.values(grads),
                layout.trainable.values(params),
                layout.trainable.all,
            )
        after = layout.trainable.tree(values)
        after = {name: jnp.asarray(value, params[name].dtype) for name, value in after.items()}
        # The scale is a variable of the optimizer and, so that the loss can be multiplied by it, a
        # parameter without a gradient: both get the new value.
        if layout.scale is not None:
            after[SCALE] = kept[layout.scale]
        return after, layout.optimizer.tree(kept)
