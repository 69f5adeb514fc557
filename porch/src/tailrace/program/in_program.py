"""What a function may ask for while it runs inside a program: keys, counters, other replicas."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.jaxprs.marks import ambient, cross_replica_p, current_trace

_training: contextvars.ContextVar[bool] = contextvars.ContextVar("tailrace_training", default=False)


def training() -> bool:
    """Whether a training step is being traced: a Python bool, to choose what a model computes.

    True while the loss of a training step is traced; False in `evaluate`, `predict` and everywhere
    else. A loss function with dropout asks it, and needs no second function for evaluation.

    >>> training()
    False
    """
    return _training.get()


@contextlib.contextmanager
def tracing_training(wanted: bool = True) -> Iterator[None]:
    """While a training step (or, with False, anything else inside one) is traced."""
    token = _training.set(wanted)
    try:
        yield
    finally:
        _training.reset(token)


def key() -> jax.Array:
    """A random key for this call, in this step, of this microbatch, on this replica.

    It is folded from the seed of the program, the step, the microbatch, the replica and the number
    of the call, so it is the same whatever the schedule, and a recomputation gets it again. Inside
    a `vmap` or a `scan` of the model the key does not vary: fold the index in with
    `jax.random.fold_in`.
    """
    trace = current_trace("tr.key()")
    trace.draws_keys = True
    return ambient("key", next(trace.calls), trace.loops)


def step() -> jax.Array:
    """The number of the step that is computed, from 0, as an int32 scalar."""
    trace = current_trace("tr.step()")
    return ambient("step", -1, trace.loops)


def microbatch() -> jax.Array:
    """The number of the microbatch in its step, from 0, as an int32 scalar."""
    trace = current_trace("tr.microbatch()")
    return ambient("microbatch", -1, trace.loops)


def replica() -> jax.Array:
    """The number of the replica that computes, from 0, as an int32 scalar."""
    current_trace("tr.replica()")
    return ambient("replica", -1, 0)


def cross_replica_mean(values: Any) -> Any:
    """The mean of `values` (a tree) over all replicas, on each of them."""
    return _cross_replica(values, "tr.cross_replica_mean", mean=True)


def cross_replica_sum(values: Any) -> Any:
    """The sum of `values` (a tree) over all replicas, on each of them."""
    return _cross_replica(values, "tr.cross_replica_sum", mean=False)


def _cross_replica(values: Any, caller: str, *, mean: bool) -> Any:
    current_trace(caller)
    return jax.tree.map(lambda x: cross_replica_p.bind(jnp.asarray(x), mean=mean), values)
