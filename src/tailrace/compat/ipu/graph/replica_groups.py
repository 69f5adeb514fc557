"""Groups of neighbouring replicas, and what they exchange.

An exchange within groups is one sum over all replicas, of an array that has a place for each group (or
for each replica): each writes into its own place, and reads that of its group.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.errors import InvalidArgumentError, IPUTypeError
from tailrace.compat.ipu.graph.state import current
from tailrace.jaxprs.marks import current_trace
from tailrace.jaxprs.replica_reductions import reduced_dtype
from tailrace.program import in_program as engine


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of neighbouring replicas: the number of groups and their size."""

    count: int
    size: int

    @classmethod
    def of(cls, size: object, what: str) -> Groups:
        """The groups of a size that an argument called `what` gives."""
        # Not a value of the program: the exchange has a shape that depends on it.
        if not isinstance(size, int) or isinstance(size, bool):
            raise IPUTypeError(
                f"{what}, a number of replicas, must be an integer. Received: {size!r}."
            )
        scope = current()
        looking = (
            scope is not None and scope.looking
        )  # how many replicas there are is not known yet
        replicas = size if looking else current_trace("An exchange between replicas").replicas
        if size < 1 or replicas % size:
            raise InvalidArgumentError(
                f"{what} must divide the number of replicas, {replicas}. Received: {size}."
            )
        return cls(replicas // size, size)

    @property
    def mine(self) -> Any:
        """The number of this replica's group."""
        return engine.replica() // self.size

    def sum(self, x: TensorLike) -> Any:
        """The sum over the group."""
        return _placed(x, self.mine, self.count)[self.mine]

    def mean(self, x: TensorLike) -> Any:
        """The mean over the group, added up in 32 bits at least."""
        dtype = reduced_dtype(x.dtype, mean=True)
        # Sums of many float16 values overflow before they are divided.
        wide = jnp.float32 if dtype.itemsize < 4 else dtype
        return (self.sum(x.astype(wide)) / self.size).astype(dtype)

    def gather(self, x: TensorLike) -> Any:
        """The values of all replicas of the group, along a new first dimension."""
        places = _placed(x, engine.replica(), self.count * self.size)
        # Cast back without loss: each place has one value, and zeros from all others.
        return lax.dynamic_slice_in_dim(places, self.mine * self.size, self.size).astype(x.dtype)


def _placed(x: TensorLike, place: TensorLike, count: int) -> Any:
    dtype = reduced_dtype(x.dtype, mean=False)
    places = jnp.zeros((count, *x.shape), dtype).at[place].set(x.astype(dtype))
    return engine.cross_replica_sum(places)
