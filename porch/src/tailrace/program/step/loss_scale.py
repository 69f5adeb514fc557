"""Scaling the loss, so that small gradients survive float16; a step that overflows is skipped.

The loss of every microbatch is multiplied by the scale, and its gradients are too. They are accumulated
and reduced as they are, divided by the scale once a step, and then the optimizer gets them. If one of
them is not finite, the step changes nothing but the scale.
"""

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

from tailrace.errors import OptionError
from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import Var
from tailrace.messages import note_once

NAME = "loss_scale"
"""What the scale is called in the catalogue and in the history."""


class ScaleState(NamedTuple):
    """What scaling carries from step to step.

    Attributes:
        scale: what the loss of the next step is multiplied by.
        streak: how many steps in a row were taken since the scale changed.
    """

    scale: Any
    streak: Any


@dataclasses.dataclass(frozen=True)
class LossScale:
    """How the loss is scaled, and how the scale changes.

    A step whose gradients are all finite is taken; after `interval` of those in a row the scale is
    multiplied by `growth`. Any other step is skipped and multiplies it by `backoff`. The rule is that
    of `torch.amp.GradScaler` and, with the factors 2 and 0.5, of Keras' `LossScaleOptimizer`.

    Args:
        initial: the scale at first.
        growth: at least 1.
        backoff: more than 0, at most 1.
        interval: how many steps in a row.

    >>> LossScale(1024.0, interval=100)
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
        """What `loss_scale=` was given: None, a number, "dynamic" or a `LossScale`."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str) and value == "dynamic":
            return cls()
        if _is_scale(value):
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

    def next(self, state: ScaleState, finite: Any) -> ScaleState:
        """The state after a step whose gradients were finite, or not."""
        streak = state.streak + 1
        due = streak == self.interval
        grown = state.scale * jnp.float32(self.growth)
        grown = jnp.where(due & jnp.isfinite(grown), grown, state.scale)
        # Zero would make every later gradient 0 / 0: a scale that shrank so far stays where it is.
        shrunk = jnp.maximum(state.scale * jnp.float32(self.backoff), jnp.float32(_SMALLEST))
        return ScaleState(
            jnp.where(finite, grown, shrunk), jnp.where(finite & ~due, streak, jnp.int32(0))
        )


def scaled(forward: Callable[..., Any], state: ScaleState) -> Callable[..., Any]:
    """A function whose first result, a loss, is multiplied by the scale, in float32."""

    def run(*args: Any) -> tuple[Any, ...]:
        loss, *rest = forward(*args)
        return loss.astype(jnp.float32) * state.scale, *rest

    return run


def unscaled(grads: Any, state: ScaleState) -> Any:
    """Gradients of a loss, from those of the scaled one; each keeps its dtype."""

    def one(grad: Any) -> Any:
        # In float32 at least: float16 has no room for a scale of 65,536.
        wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
        return (wide / state.scale.astype(wide.dtype)).astype(grad.dtype)

    return jax.tree.map(one, grads)


def all_finite(tree: Any) -> Any:
    """Whether all numbers of a tree are finite."""
    flags = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return functools.reduce(jnp.logical_and, flags)


def note_collapse(scale: float) -> None:
    """Say once that a scale has shrunk so far that it cannot be the reason any more."""
    if scale < _HOPELESS:
        note_once(
            f"The loss scale fell to {scale:.3g}: gradients are not finite whatever the scale is, and "
            f"these steps are skipped. Look for the first value that is not: "
            f"observe=[tr.stop_on_nonfinite('loss')], or train without loss_scale.",
            key="loss scale",
        )


def unless_skipped(rule: Callable[..., Any], args: Sequence[Any], taken: Any, before: Any) -> Any:
    """What `rule(*args)` returns; where `taken` is false, `before`, a tree of the same form.

    A result is selected where it is made, so that what follows from it (the update, from the moments)
    is computed from the selected one. If the old one were read as well, it would be copied before it
    is overwritten.
    """
    closed, form = jax.make_jaxpr(rule, return_shape=True)(*args)
    jaxpr = closed.jaxpr
    forms, kept = jax.tree.leaves(form), jax.tree.leaves(before)
    # Updates have the dtype of the accumulators, which need not be that of the parameters.
    kept = [
        x if x.dtype == f.dtype else x.astype(f.dtype) for x, f in zip(kept, forms, strict=True)
    ]
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
        # An input or a literal that is a result, or one variable that is several.
        else select(taken, jnp.asarray(internals.value_of(known, var), value.dtype), value)
        for var, value in outputs
    ]
    return jax.tree.unflatten(jax.tree.structure(form), results)


def select(taken: Any, after: Any, before: Any) -> Any:
    """One of two trees of the same form."""
    return jax.tree.map(lambda a, b: jax.lax.select(taken, a, b), after, before)


_HOPELESS = 2.0**-24
"""The smallest number of float16: what overflows below it is no overflow."""

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_scale(value: Any) -> bool:
    return _is_number(value) and _SMALLEST <= float(value) <= _LARGEST


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
