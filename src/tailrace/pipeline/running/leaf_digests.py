"""Digests of the state of a pipeline: each device reads the part that it holds, once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tailrace.base.trees import Tree
from tailrace.devices.devices import REPLICA, STAGE
from tailrace.pipeline.lowering.device_layout import Assembly
from tailrace.taps.bit_digests import WORDS, digest, total


def leaf_digests(
    assembly: Assembly,
    mesh: Mesh,
    results: Sequence[int],
    held: Sequence[Any],
    names: Sequence[str],
    sizes: Sequence[int | None],
) -> jax.Array:
    """The digest of each leaf, [leaves, 2]; in a program.

    Args:
        assembly: which device holds what.
        mesh: replicas x stages.
        results: for each leaf, its index among the carried values; -1 if it is not carried.
        held: the buffers of the devices, then the values that are equal on all, then those that the
            loop does not change.
        names: the names of the leaves.
        sizes: for a leaf that is sharded over replicas, its number of values; None for any other.
    """
    layout, count = assembly.held_layout, len(assembly.held_layout.buffers)
    owners = _owners(assembly)
    buffers = held[:count]
    alike = dict(zip(assembly.everywhere, held[count:], strict=False))
    outside = iter(held[count + len(alike) :])
    each = [PartitionSpec(REPLICA, STAGE) if own else PartitionSpec(STAGE) for own in layout.each]
    shared = [
        PartitionSpec(REPLICA) if number in assembly.each else PartitionSpec() for number in alike
    ]

    def part(value: jax.Array, number: int, leaf: int) -> jax.Array:
        """The part of a leaf that this replica has, at its offset in the leaf."""
        first = lax.axis_index(REPLICA) * value.size if number in assembly.each else 0
        return digest(value, names[leaf], first, sizes[leaf])

    def on_device(device: int, mine: Sequence[Any]) -> jax.Array:
        found = [jnp.zeros(WORDS, jnp.uint32)] * len(results)
        for leaf, number in enumerate(results):
            if owners.get(number) == device:
                found[leaf] = part(layout.read(device, mine, number), number, leaf)
        return jnp.stack(found)

    def one(buffers: Tree, values: Tree) -> jax.Array:
        mine = [b.reshape(form.shape) for b, form in zip(buffers, layout.buffers, strict=True)]
        # Each device digests what only it holds, and has zeros for all else. The sum over stages
        # then has all digests, and no state is moved.
        branches = [functools.partial(on_device, d) for d in range(assembly.num_devices)]
        found = lax.psum(lax.switch(lax.axis_index(STAGE), branches, mine), STAGE)
        for leaf, number in enumerate(results):
            if number in alike:
                value = values[list(alike).index(number)]
                value = value[0] if number in assembly.each else value
                found = found.at[leaf].set(part(value, number, leaf))
        # A leaf that differs per replica has a digest for each part of it. Digests of parts add up
        # to the digest of the whole (`taps/bit_digests.py`).
        all_replicas = lax.all_gather(found, REPLICA)
        own = np.array([number in assembly.each for number in results])
        return jnp.where(own[:, None], total(all_replicas), found)

    found = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(each, shared),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(list(buffers), list(alike.values()))
    for leaf, number in enumerate(results):
        if number < 0:
            found = found.at[leaf].set(digest(next(outside), names[leaf]))
    return found


def _owners(assembly: Assembly) -> dict[int, int]:
    """The device that digests each value: the first of those that hold it."""
    found: dict[int, int] = {}
    for device, slots in enumerate(assembly.held_layout.slots):
        for number in slots:
            found.setdefault(number, device)
    return found
