"""Sharing out the optimizer's state over replicas: each keeps, and updates, one share of it.

Replicas hold equal parameters and, after their gradients are averaged, compute equal updates. The
optimizer's state need not exist once on each of them: with R replicas each keeps 1/R of every large
leaf, flat, computes the update of that share, and the new parameters are gathered from all.

    reduced gradient ── cut ──▶ share ─┐
    share of the state ────────────────┼─ update ──▶ share of the state
    parameters ────── cut ──▶ share ───┘        └──▶ share of the parameters ── gather ──▶ parameters
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.jaxprs.marks import ambient, cross_replica_p, gather_p

LEAST = 1024
"""Leaves with fewer elements stay whole on each replica: they take no memory worth a collective."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """Arrays cut into equal flat shares, one for each replica; the last one is padded.

    Attributes:
        replicas: how many there are.
        by_sum: gather by adding up what each replica has, zeros in the place of the others' shares:
            more traffic, and the one exchange over replicas that a pipeline knows.

    >>> Shares(4).count(10)
    3
    """

    replicas: int
    by_sum: bool = False

    def count(self, size: int) -> int:
        """How many elements a share of an array of `size` elements has."""
        return -(-size // self.replicas)

    # -- in a program, on one replica -----------------------------------------------------------

    def cut(self, array: Any) -> Any:
        """This replica's share of an array that is equal on all of them."""
        count = self.count(array.size)
        replica = ambient("replica", -1, 0)
        return lax.dynamic_slice(self._flat(array), (replica * count,), (count,))

    def gather(self, share: Any, form: Any) -> Any:
        """The array of the given form again, from the shares of all replicas."""
        if not self.by_sum:
            return self.join(gather_p.bind(share, replicas=self.replicas), form)
        first = ambient("replica", -1, 0) * share.size
        alone = lax.dynamic_update_slice(
            jnp.zeros(share.size * self.replicas, share.dtype), share, (first,)
        )
        return self.join(cross_replica_p.bind(alone, mean=False), form)

    # -- anywhere -------------------------------------------------------------------------------

    def split(self, array: Any) -> Any:
        """All shares behind each other, in one dim: what `gather` joins."""
        return self._flat(jnp.asarray(array))

    def join(self, shares: Any, form: Any) -> Any:
        """The array again, from all shares."""
        flat = shares.reshape(-1)
        size = math.prod(form.shape)
        return (flat if flat.size == size else flat[:size]).reshape(form.shape)

    def form(self, form: Any) -> jax.ShapeDtypeStruct:
        """The form of a share of an array of the given form."""
        return jax.ShapeDtypeStruct((self.count(math.prod(form.shape)),), form.dtype)

    def _flat(self, array: Any) -> Any:
        flat = array.reshape(-1)
        padding = self.count(flat.size) * self.replicas - flat.size
        return jnp.pad(flat, (0, padding)) if padding else flat
