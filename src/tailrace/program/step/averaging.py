"""An average of the parameters over the steps, kept beside the optimizer's state.

It is a part of the optimizer: updated in the same place, so that whatever holds, shards, skips, saves
or splits over stages the state of an optimizer does it with the average too.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tailrace.base.trees import Tree
from tailrace.jaxprs.marks import name_values
from tailrace.program.step.precision import wide_dtype
from tailrace.program.step.update_rule import Optimizer


class AveragedState(NamedTuple):
    """The state of an optimizer whose parameters are averaged.

    Attributes:
        optimizer: the state of the optimizer.
        ema: the average, in 32 bits at least.
        rule: the state of the transformation that averages; empty for a decay.
    """

    optimizer: Any
    ema: Any
    rule: Any


def averaging(optimizer: Optimizer, ema: Any) -> Any:
    """The optimizer, with an average of the parameters in its state.

    Args:
        optimizer: an optax transformation.
        ema: the decay, or an optax transformation that is given the parameters after each step and
            returns their average.
    """
    import optax

    # Without extra arguments it takes none, and would raise.
    takes_extra = isinstance(optimizer, optax.GradientTransformationExtraArgs)
    inner: Any = optimizer
    average: Callable[[Tree, Tree, Tree], Any] = (
        (lambda after, before, own: (optax.incremental_update(after, before, 1 - ema), own))
        if isinstance(ema, float)
        else (lambda after, before, own: ema.update(after, own))
    )

    def init(params: Tree) -> AveragedState:
        wide = _wide(params)
        return AveragedState(
            inner.init(params), wide, () if isinstance(ema, float) else ema.init(wide)
        )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, own = inner.update(updates, state.optimizer, params, **extra)
        after = _wide(optax.apply_updates(params, updates))
        found, rule = average(after, state.ema, state.rule)
        found = jax.tree.map(lambda new, old: new.astype(old.dtype), found, state.ema)
        return updates, AveragedState(own, name_values("ema", found, "params"), rule)

    kind = optax.GradientTransformationExtraArgs if takes_extra else optax.GradientTransformation
    return kind(init, update)


def _wide(params: Tree) -> Tree:
    # In 16 bits an average with a decay of 0.999 would not move.
    return jax.tree.map(lambda p: p.astype(wide_dtype(p.dtype)), params)


def average_in(state: AveragedState, params: Tree) -> Any:
    """The average in a state, in the dtypes of the parameters."""
    return jax.tree.map(lambda ema, p: ema.astype(p.dtype), state.ema, params)
