"""The update of parameters: one rule for optax and for optimizers of other libraries."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp

from tailrace.base.spans.scopes import OPTIMIZER
from tailrace.base.trees import Tree
from tailrace.program.step import loss_scale as scaling


class Optimizer(Protocol):
    """An optax transformation, or an object with `init` and `apply`; see `TrainingStep`."""

    @property
    def init(self) -> Callable[..., Tree]:
        """Makes the state for parameters."""
        ...


def apply_rule(
    optimizer: Optimizer,
    grads: Tree,
    state: Tree,
    params: Tree,
    taken: jax.Array | None = None,
    loss: jax.Array | None = None,
) -> tuple[Any, Any, Any]:
    """The update, the new parameters and the new state of the optimizer.

    If `taken` is false, the update is zero and nothing changes. `loss` is for optimizers that need it.
    """
    if taken is None:
        return _applied(optimizer, grads, state, params, loss)

    def rule(grads: Tree, state: Tree, params: Tree) -> tuple[Any, Any, Any]:
        return _applied(optimizer, grads, state, params, loss)

    nothing = jax.tree.map(jnp.zeros_like, params)
    return scaling.unless_skipped(rule, (grads, state, params), taken, (nothing, params, state))


def _applied(
    optimizer: Optimizer, grads: Tree, state: Tree, params: Tree, loss: jax.Array | None
) -> tuple[Any, Any, Any]:
    if callable(apply := getattr(optimizer, "apply", None)):
        with jax.named_scope(OPTIMIZER):
            applied: Any = apply(grads, state, params)
            after, new_state = applied
            # Such optimizers return parameters only. Unless a tap reads the difference, XLA drops it.
            updates = jax.tree.map(jnp.subtract, after, params)
    else:
        import optax  # late: importing it takes a fifth of the time of importing JAX

        with jax.named_scope(OPTIMIZER):
            extra = {} if loss is None else {"value": loss}
            transformation = cast("optax.GradientTransformationExtraArgs", optimizer)
            updates, new_state = transformation.update(grads, state, params, **extra)
            after = optax.apply_updates(params, updates)
    return updates, after, jax.tree.map(_keep_dtype, state, new_state)


def _keep_dtype(before: Tree, after: Tree) -> Any:
    """Cast optimizer state back to its dtype: the gradients' dtype may differ."""
    return jnp.asarray(after, jnp.asarray(before).dtype)
