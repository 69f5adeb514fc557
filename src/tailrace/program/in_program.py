"""Functions to call inside a program: random keys, counters, reductions over replicas."""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator

import jax
import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.jaxprs.array_trees import check_arrays
from tailrace.jaxprs.marks import ambient, cross_replica_p, current_trace

_training: contextvars.ContextVar[bool] = contextvars.ContextVar("tailrace_training", default=False)


def training() -> bool:
    """Whether a training step is being traced: a Python bool, to choose what a model computes.

    True while the loss of a training step is traced; False in `evaluate`, `predict` and everywhere
    else. With it, a loss function with dropout needs no second version for evaluation.

    >>> import tailrace as tr
    >>> tr.training()
    False
    """
    return _training.get()


@contextlib.contextmanager
def tracing_training(wanted: bool = True) -> Generator[None]:
    """A context for tracing a training step (or, with False, anything else inside one)."""
    token = _training.set(wanted)
    try:
        yield
    finally:
        _training.reset(token)


def key() -> jax.Array:
    """A random key for this call, in this step, of this microbatch, on this replica.

    It is derived from the program's seed, the step, the microbatch, the replica and the index of the
    call, so it does not depend on the schedule, and a recomputation gets the same key. Inside a `vmap`
    or a `scan` of the model the key does not vary: fold the index in with
    `jax.random.fold_in`.

    Raises:
        ProgramError: it is called outside of a program.

    Example:
        >>> import jax, tailrace as tr
        >>> program = tr.compile(lambda: jax.random.normal(tr.key()), seed=1)
        >>> first, second = program(), program()
        >>> bool(first == second)
        False
    """
    trace = current_trace("tr.key()")
    # Noted for `evaluate`, which warns of a loss that draws keys outside of training.
    trace.draws_keys = True
    # The number of the call in the trace, not of the run: a loop traces its body once.
    return ambient("key", next(trace.calls), trace.loops)


def step() -> jax.Array:
    """The index of the current step, from 0, as an int32 scalar.

    Raises:
        ProgramError: it is called outside of a program.

    Example:
        >>> import tailrace as tr
        >>> print(tr.compile(lambda x: tr.repeat(4, lambda x: x + tr.step(), x))(0))
        6
    """
    trace = current_trace("tr.step()")
    return ambient("step", -1, trace.loops)


def microbatch() -> jax.Array:
    """The index of the microbatch in its step, from 0, as an int32 scalar.

    Raises:
        ProgramError: it is called outside of a program.

    Example:
        >>> import tailrace as tr
        >>> inner = lambda x: tr.repeat(3, lambda x: x + tr.microbatch(), x)
        >>> print(tr.compile(lambda x: tr.repeat(2, inner, x))(0))
        6
    """
    trace = current_trace("tr.microbatch()")
    return ambient("microbatch", -1, trace.loops)


def replica() -> jax.Array:
    """The index of this replica, from 0, as an int32 scalar.

    Raises:
        ProgramError: it is called outside of a program.

    Example:
        >>> import tailrace as tr
        >>> print(tr.compile(lambda: tr.replica(), replicas=1)())
        0
    """
    current_trace("tr.replica()")
    return ambient("replica", -1, 0)


def cross_replica_mean(values: Tree) -> Tree:
    """The mean of `values` (a tree) over all replicas, on each of them.

    Raises:
        ProgramError: it is called outside of a program, or with something that is not an array.

    Example:
        >>> import tailrace as tr
        >>> print(tr.compile(lambda x: tr.cross_replica_mean(x), replicas=1)(3.0))
        3.0
    """
    return _cross_replica(values, "tr.cross_replica_mean", mean=True)


def cross_replica_sum(values: Tree) -> Tree:
    """The sum of `values` (a tree) over all replicas, on each of them.

    Raises:
        ProgramError: it is called outside of a program, or with something that is not an array.

    Example:
        >>> import tailrace as tr
        >>> print(tr.compile(lambda x: tr.cross_replica_sum(x), replicas=1)(3.0))
        3.0
    """
    return _cross_replica(values, "tr.cross_replica_sum", mean=False)


def _cross_replica(values: Tree, caller: str, *, mean: bool) -> Tree:
    current_trace(caller)
    check_arrays(f"{caller} takes", values)
    return jax.tree.map(lambda x: cross_replica_p.bind(jnp.asarray(x), mean=mean), values)
