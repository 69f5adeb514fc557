"""Loss scaling, so that small gradients survive float16; a step that overflows is skipped.

The loss of every microbatch is multiplied by the scale, and so are its gradients. They are accumulated
and reduced in scaled form, and divided by the scale once per step, before the optimizer gets them. If
one of them is not finite, the step changes only the scale.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnnecessaryIsInstance=false

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import Var
from tailrace.program.step.precision import wide_dtype

NAME = "loss_scale"
"""The name of the scale in the catalogue and in the history."""


class ScaleState(NamedTuple):
    """The state of loss scaling.

    Attributes:
        scale: the factor for the loss of the next step.
        streak: the number of consecutive steps without overflow since the scale changed.
    """

    scale: Any
    streak: Any


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The initial loss scale, and the rule for its changes.

    A step whose gradients are all finite is applied; after `interval` consecutive ones the scale is
    multiplied by `growth`. Any other step is skipped and multiplies the scale by `backoff`. This is
    the rule of `torch.amp.GradScaler` and, with the factors 2 and 0.5, of Keras' `LossScaleOptimizer`.

    Args:
        initial: the initial scale.
        growth: the factor after `interval` good steps; at least 1.
        backoff: the factor after a bad step; more than 0, at most 1.
        interval: the number of consecutive good steps before the scale grows.

    Raises:
        OptionError: an argument has an invalid value.

    >>> import tailrace as tr
    >>> tr.LossScale(1024.0, interval=100)
    LossScale(initial=1024.0, growth=2.0, backoff=0.5, interval=100)
    """

    initial: float = 2.0**15
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        for name, rule, holds in (
            ("initial", "a positive number that float32 can hold", _is_scale(self.initial)),
            ("growth", "at least 1", _is_number(self.growth) and self.growth >= 1),
            (
                "backoff",
                "more than 0, at most 1",
                _is_number(self.backoff) and 0 < self.backoff <= 1,
            ),
            ("interval", "a positive integer", _is_count(self.interval)),
        ):
            if not holds:
                raise OptionError(
                    f"{name} of a tr.LossScale is {rule}. Received: {name}={getattr(self, name)!r}."
                )

    @classmethod
    def of(cls, value: Any) -> LossScale | None:
        """Parse the value of `loss_scale=`: None, a number, "dynamic" or a `LossScale`."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str) and value == "dynamic":
            return cls()
        if _is_scale(value):
            # A fixed scale is the same rule with factors of one: bad steps are skipped, and nothing
            # changes.
            return cls(float(value), 1.0, 1.0, 1)
        raise OptionError(
            f"loss_scale is None, a positive number, 'dynamic' or a tr.LossScale. Received: "
            f"loss_scale={value!r}."
        )

    @property
    def is_fixed(self) -> bool:
        """Whether the scale never changes."""
        return self.growth == self.backoff == 1

    def init(self) -> ScaleState:
        """The state before the first step."""
        return ScaleState(jnp.float32(self.initial), jnp.int32(0))

    def next(self, state: ScaleState, finite: jax.Array) -> ScaleState:
        """The state after a step; `finite` says whether its gradients were."""
        streak = state.streak + 1
        due = streak == self.interval
        grown = state.scale * jnp.float32(self.growth)
        # A scale that overflowed would make every gradient bad and never come back.
        grown = jnp.where(due & jnp.isfinite(grown), grown, state.scale)
        # A scale of zero would make every later gradient 0 / 0: it stops shrinking before that.
        shrunk = jnp.maximum(state.scale * jnp.float32(self.backoff), jnp.float32(_SMALLEST))
        return ScaleState(
            jnp.where(finite, grown, shrunk), jnp.where(finite & ~due, streak, jnp.int32(0))
        )


def scaled(forward: Callable[..., Any], state: ScaleState) -> Callable[..., Any]:
    """`forward` with its first result, the loss, multiplied by the scale, in float32."""

    def run(*args: Tree) -> tuple[Any, ...]:
        loss, *rest = forward(*args)
        # In float32: a float16 loss of 2 times a scale of 65,536 would be infinite already.
        return loss.astype(jnp.float32) * state.scale, *rest

    return run


def unscaled(grads: Tree, state: ScaleState) -> Tree:
    """The gradients of the loss, from those of the scaled loss; each keeps its dtype."""

    def one(grad: jax.Array) -> Any:
        # In float32 at least: float16 cannot represent a scale of 65,536.
        wide = grad.astype(wide_dtype(grad.dtype))
        return (wide / state.scale.astype(wide.dtype)).astype(grad.dtype)

    return jax.tree.map(one, grads)


def all_finite(tree: Tree) -> jax.Array:
    """Whether all numbers of a tree are finite."""
    # Leaf by leaf: the gradients are on the devices of their stages in a pipeline, and one flag
    # each is all that has to be sent.
    flags = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return functools.reduce(jnp.logical_and, flags)


def note_collapse(scale: float) -> None:
    """Warn once that the scale is so small that it cannot be the cause of overflows."""
    if scale < _HOPELESS:
        note_once(
            f"The loss scale fell to {scale:.3g}: gradients are not finite whatever the scale is, and "
            f"these steps are skipped. Look for the first value that is not: "
            f"observe=[tr.stop_on_nonfinite('loss')], or train without loss_scale.",
            key="loss scale",
        )


def unless_skipped(
    rule: Callable[..., Any], args: Sequence[Any], taken: jax.Array, before: Tree
) -> Tree:
    """The result of `rule(*args)`; if `taken` is false, `before`, a tree of the same structure.

    Each result is selected where it is computed, so that later ones (the update, from the moments) are
    computed from the selected value. If the old value were read after the new one is computed, XLA
    would copy it before it is overwritten in place.
    """
    closed, form = jax.make_jaxpr(rule, return_shape=True)(*args)
    jaxpr = closed.jaxpr
    forms, kept = jax.tree.leaves(form), jax.tree.leaves(before)
    # Updates have the dtype of the accumulators, which may differ from that of the parameters.
    kept = [
        x if x.dtype == f.dtype else x.astype(f.dtype) for x, f in zip(kept, forms, strict=True)
    ]
    # By variable: what is computed for a result is replaced at once by the selected value, and
    # every later equation reads that.
    outputs = list(zip(jaxpr.outvars, kept, strict=True))
    old = {var: value for var, value in outputs if isinstance(var, Var)}
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
    made: set[Any] = set()
    for eqn in jaxpr.eqns:
        with internals.equation_context(eqn):
            values = internals.bind_again(eqn, [internals.value_of(known, v) for v in eqn.invars])
        for var, value in zip(eqn.outvars, values, strict=True):
            known[var] = select(taken, value, old[var]) if var in old else value
        made.update(eqn.outvars)
    results = [
        known[var]
        if isinstance(var, Var) and var in made and old[var] is value
        # A result that is an input or a literal, or a variable that is several results.
        else select(taken, jnp.asarray(internals.value_of(known, var), value.dtype), value)
        for var, value in outputs
    ]
    return jax.tree.unflatten(jax.tree.structure(form), results)


def select(taken: jax.Array, after: Tree, before: Tree) -> Tree:
    """Select one of two trees of the same structure."""
    return jax.tree.map(lambda a, b: jax.lax.select(taken, a, b), after, before)


_HOPELESS = 2.0**-24
"""The smallest positive float16: a scale below it cannot be what overflows."""

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_scale(value: Any) -> bool:
    return _is_number(value) and _SMALLEST <= float(value) <= _LARGEST


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
