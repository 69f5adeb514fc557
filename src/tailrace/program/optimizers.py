"""Optimizers for hand-written loops: gradients averaged over replicas, or accumulated over iterations.

Both wrap an optax transformation and are themselves optax transformations:

    tr.optimizers.cross_replica(optax.adam(1e-3))
    tr.optimizers.gradient_accumulation(tr.optimizers.cross_replica(optax.adam(1e-3)), 8)

`tr.Trainer` does both by itself: it refuses `gradient_accumulation`, and `cross_replica` is a no-op in
it.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.array_like import DTypeLike
from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.jaxprs.marks import Tag, current_trace, mark, name_values
from tailrace.program.in_program import cross_replica_mean
from tailrace.program.step.accumulation import Accumulation, Reduction

if TYPE_CHECKING:
    import optax


def cross_replica(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, given the mean of the gradients over all replicas.

    Args:
        optimizer: an optax transformation.

    Raises:
        OptionError: it is not an optax transformation.
        ProgramError: its `update` is called outside of a program.

    >>> import jax, numpy as np, optax, tailrace as tr
    >>> sgd = tr.optimizers.cross_replica(optax.sgd(0.5))
    >>> def step(w):
    ...     updates, _ = sgd.update(jax.grad(lambda w: (w**2).sum())(w), sgd.init(w))
    ...     return optax.apply_updates(w, updates)
    >>> print(tr.compile(lambda w: tr.repeat(1, step, w))(np.float32([3.0, 4.0])))
    [0. 0.]
    """
    import optax

    optimizer = optax.with_extra_args_support(_checked(optimizer))

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> Any:
        current_trace("tr.optimizers.cross_replica")
        # Named as in a `tr.Trainer`: taps find the gradients under the same name.
        reduced = name_values("reduced", cross_replica_mean(grads), "params")
        return optimizer.update(reduced, state, params, **extra)

    return optax.GradientTransformationExtraArgs(optimizer.init, cast(Any, update))


def _checked(optimizer: object) -> Any:
    if not callable(getattr(optimizer, "init", None)) or not callable(
        getattr(optimizer, "update", None)
    ):
        raise OptionError(
            f"An optimizer is an optax transformation, such as optax.sgd(0.1): it has init and update. "
            f"Received: {optimizer!r}."
        )
    return optimizer


class AccumulationState(NamedTuple):
    """The state of `gradient_accumulation`.

    Attributes:
        count: microbatches accumulated so far, modulo their number.
        accumulated: the accumulators.
        inner: the state of the wrapped optimizer.
    """

    count: Any
    accumulated: Any
    inner: Any


def gradient_accumulation(
    optimizer: optax.GradientTransformation,
    microbatches: int,
    *,
    dtype: DTypeLike = None,
    reduction: Reduction | str = Reduction.MEAN,
) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, run once for every `microbatches` updates, on their accumulated gradient.

    For loops written with `tr.repeat`, whose length must be a multiple of `microbatches`. In between,
    updates are zero and the wrapped optimizer's state, with its counters, does not change.

    Args:
        optimizer: an optax transformation.
        microbatches: the number of gradients per step.
        dtype: the dtype of the accumulators; see `tr.Accumulation`.
        reduction: "sum", "mean" or "running_mean".

    Raises:
        OptionError: an argument has an invalid value.
        ProgramError: its `update` is called outside of a program.

    >>> import jax, numpy as np, optax, tailrace as tr
    >>> sgd = tr.optimizers.gradient_accumulation(optax.sgd(0.5), 4)
    >>> def step(carry):
    ...     w, state = carry
    ...     updates, state = sgd.update(jax.grad(lambda w: w**2)(w), state, w)
    ...     return optax.apply_updates(w, updates), state
    >>> program = tr.compile(lambda w: tr.repeat(4, step, (w, sgd.init(w)))[0])
    >>> print(program(np.float32(3.0)))  # one update in four iterations
    0.0
    """
    import optax

    accumulation = Accumulation(microbatches, dtype, reduction)
    optimizer = optax.with_extra_args_support(_checked(optimizer))

    def init(params: Tree) -> AccumulationState:
        params = jax.tree.map(jnp.asarray, params)
        return AccumulationState(jnp.int32(0), accumulation.zeros(params), optimizer.init(params))

    def update(grads: Tree, state: AccumulationState, params: Tree = None, **extra: Any) -> Any:
        current_trace("tr.optimizers.gradient_accumulation")
        count = mark(state.count, Tag("accumulates", payload=microbatches))
        grads = name_values("grad", grads, "params")
        total = accumulation.add(state.accumulated, grads, count)
        zeros = jax.tree.map(jnp.zeros_like, total)

        def apply(_: object) -> Any:
            gradient = name_values("accumulated", total, "params")
            updates, inner = optimizer.update(gradient, state.inner, params, **extra)
            # Both branches must return one dtype, and accumulators may be wider than the parameters.
            inner = jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), state.inner, inner)
            return jax.tree.map(lambda u, g: u.astype(g.dtype), updates, grads), zeros, inner

        def wait(_: object) -> Any:
            return jax.tree.map(jnp.zeros_like, grads), total, state.inner

        # A branch, not a select: the optimizer then runs only when a step is complete.
        updates, accumulated, inner = lax.cond(count == microbatches - 1, apply, wait, None)
        # Between steps accumulators differ between replicas; at the end of a loop, whose length is a
        # multiple of the count, they are zero on all of them.
        accumulated = mark(accumulated, Tag("equal at the end"))
        return updates, AccumulationState((count + 1) % microbatches, accumulated, inner)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))
