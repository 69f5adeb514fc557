"""Optimizer state sharded over replicas: each replica holds and updates one shard.

Replicas hold equal parameters and, once their gradients are averaged, compute equal updates. So each
need not hold the whole optimizer state: with R replicas, each keeps 1/R of every large leaf, flattened,
computes the update of that shard, and the new parameters are gathered from all.

    reduced gradient ── cut ──▶ share ─┐
    share of the state ────────────────┼─ update ──▶ share of the state
    parameters ────── cut ──▶ share ───┘        └──▶ share of the parameters ── gather ──▶ parameters
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.array_like import TensorLike
from tailrace.jaxprs.marks import ambient, cross_replica_p, gather_p

LEAST = 1024
"""Leaves with fewer elements stay replicated: the memory saved is not worth a collective."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """Arrays cut into equal flat shards, one per replica; the last one is padded.

    Attributes:
        replicas: the number of replicas.
        by_sum: gather by a sum in which each replica contributes its shard and zeros elsewhere: more
            traffic, but the only exchange over replicas that a pipeline supports.

    >>> Shares(4).count(10)
    3
    """

    replicas: int
    by_sum: bool = False

    def count(self, size: int) -> int:
        """The number of elements per shard of an array of `size` elements."""
        return -(-size // self.replicas)

    # -- in a program, on one replica -----------------------------------------------------------

    def cut(self, array: jax.Array) -> Any:
        """This replica's shard of an array that is replicated."""
        count = self.count(array.size)
        replica = ambient("replica", -1, 0)
        return lax.dynamic_slice(self._flat(array), (replica * count,), (count,))

    def gather(self, share: jax.Array, form: jax.ShapeDtypeStruct) -> Any:
        """The array of the given shape, from the shards of all replicas."""
        if not self.by_sum:
            return self.join(gather_p.bind(share, replicas=self.replicas), form)
        first = ambient("replica", -1, 0) * share.size
        alone = lax.dynamic_update_slice(
            jnp.zeros(share.size * self.replicas, share.dtype), share, (first,)
        )
        # Each position is one shard's value plus zeros, so nothing is rounded.
        return self.join(cross_replica_p.bind(alone, mean=False), form)

    # -- anywhere -------------------------------------------------------------------------------

    def split(self, array: jax.Array) -> Any:
        """All shards concatenated along one dim, as `gather` would."""
        return self._flat(jnp.asarray(array))

    def join(self, shares: TensorLike, form: jax.ShapeDtypeStruct) -> Any:
        """The array, from all its shards."""
        flat = shares.reshape(-1)
        size = math.prod(form.shape)
        return (flat if flat.size == size else flat[:size]).reshape(form.shape)

    def form(self, form: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The shape of a shard of an array of the given shape."""
        return jax.ShapeDtypeStruct((self.count(math.prod(form.shape)),), form.dtype)

    def _flat(self, array: jax.Array) -> Any:
        flat = array.reshape(-1)
        padding = self.count(flat.size) * self.replicas - flat.size
        # Padding is updated like the rest and cut off by `join`: equal shards need no cases.
        return jnp.pad(flat, (0, padding)) if padding else flat
