"""The update of parameters: one rule for optax and for optimizers of other libraries."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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


FUNCTIONS = ("value_fn", "grad_fn", "obj_fn")
"""The extra arguments of optax that are functions of parameters: they compute the loss again."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extra:
    """What an update needs besides gradients, state and parameters; optax calls it extra arguments.

    Attributes:
        value: the loss of the step; None if it is not needed.
        names: the names of the arguments.
        value_fn: the loss of the step's batch as a function of parameters; None if it is not needed.
    """

    value: Any
    names: Sequence[str] = dataclasses.field(metadata={"static": True})
    value_fn: Callable[..., Any] | None = dataclasses.field(metadata={"static": True})

    def arguments(self, grads: Tree) -> Mapping[str, Any]:
        """The arguments by name."""
        value_fn = cast("Callable[..., Any]", self.value_fn)

        def grad_fn(params: Tree, _: object) -> Any:
            return cast("Any", jax.grad(value_fn)(params))

        known: dict[str, Any] = {
            "value": self.value,
            "grad": grads,
            "value_fn": value_fn,  # line searches
            "obj_fn": value_fn,  # estimates of the Hessian
            "grad_fn": grad_fn,  # SAM, within one step
        }
        return {name: known[name] for name in self.names}


def example_extra(names: Sequence[str], params: Tree) -> Mapping[str, Any]:
    """Arguments of the right form, to trace an update without a step."""

    def value_fn(params: Tree) -> Any:
        parts = [jnp.real(leaf).astype(jnp.float32).sum() for leaf in jax.tree.leaves(params)]
        return sum(parts, jnp.float32(0))

    return Extra(jnp.float32(0), names, value_fn).arguments(params)


def apply_rule(
    optimizer: Optimizer,
    grads: Tree,
    state: Tree,
    params: Tree,
    taken: jax.Array | None = None,
    extra: Extra | None = None,
) -> tuple[Any, Any, Any]:
    """The update, the new parameters and the new state of the optimizer.

    If `taken` is false, the update is zero and nothing changes. `extra` is for optimizers that need it.
    """
    if taken is None:
        return _applied(optimizer, grads, state, params, extra)

    def rule(grads: Tree, state: Tree, params: Tree) -> tuple[Any, Any, Any]:
        return _applied(optimizer, grads, state, params, extra)

    nothing = jax.tree.map(jnp.zeros_like, params)
    return scaling.unless_skipped(rule, (grads, state, params), taken, (nothing, params, state))


def _applied(
    optimizer: Optimizer, grads: Tree, state: Tree, params: Tree, extra: Extra | None
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
            given: Mapping[str, Any] = {} if extra is None else extra.arguments(grads)
            transformation = cast("optax.GradientTransformationExtraArgs", optimizer)
            updates, new_state = transformation.update(grads, state, params, **given)
            after = optax.apply_updates(params, updates)
    return updates, after, jax.tree.map(_keep_dtype, state, new_state)


def _keep_dtype(before: Tree, after: Tree) -> Any:
    """Cast optimizer state back to its dtype: the gradients' dtype may differ."""
    return jnp.asarray(after, jnp.asarray(before).dtype)
