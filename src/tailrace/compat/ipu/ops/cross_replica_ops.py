"""Reductions over replicas: over all of them, or within groups of neighbours."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tailrace.compat.ipu.errors import InvalidArgumentError, IPUTypeError
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.jaxprs.marks import current_trace
from tailrace.jaxprs.replica_reductions import reduced_dtype
from tailrace.program import in_program as engine


def cross_replica_sum(
    x: Any, replica_group_size: int | None = None, name: str | None = None
) -> Any:
    """The sum of `x` over replicas, on each of them.

    Args:
        x: the value.
        replica_group_size: how many neighbouring replicas are added up: with 2 of 4, replicas 0 and 1
            get their sum, and 2 and 3 theirs. None: all.
        name: without effect.
    """
    del name
    return _reduced(x, replica_group_size, mean=False)


def cross_replica_mean(
    x: Any, replica_group_size: int | None = None, name: str | None = None
) -> Any:
    """The mean of `x` over replicas, on each of them; see `cross_replica_sum`."""
    del name
    return _reduced(x, replica_group_size, mean=True)


def _reduced(x: Any, size: int | None, *, mean: bool) -> Any:
    x = as_array(x)
    if size is None:
        return engine.cross_replica_mean(x) if mean else engine.cross_replica_sum(x)
    if not isinstance(size, int) or isinstance(size, bool):
        raise IPUTypeError(
            f"replica_group_size, the second argument, is a number of replicas. Received: {size!r}. "
            f"Give the name as name=."
        )
    scope = current()
    looking = scope is not None and scope.looking  # how many replicas there are is not known yet
    replicas = size if looking else current_trace("A reduction over replicas").replicas
    if size < 1 or replicas % size:
        raise InvalidArgumentError(
            f"replica_group_size must divide the number of replicas, {replicas}. Received: {size}."
        )
    return _within_groups(x, size, replicas // size, mean)


def _within_groups(x: Any, size: int, groups: int, mean: bool) -> Any:
    """Each group adds up in a place of its own; all groups at once, over all replicas."""
    dtype = reduced_dtype(x.dtype, mean)
    wide = jnp.dtype(jnp.float32) if mean and dtype.itemsize < 4 else dtype
    group = engine.replica() // size
    places = jnp.zeros((groups, *x.shape), wide).at[group].set(x.astype(wide))
    total = engine.cross_replica_sum(places)[group]
    return (total / size if mean else total).astype(dtype)
