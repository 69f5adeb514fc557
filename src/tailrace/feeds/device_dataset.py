"""Small datasets kept entirely on the device: only the indices of each batch are transferred.

A block of elements is then one gather on the device, dispatched while the previous execution runs. The
program is the same: it receives the same stacked arrays.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.data.batch_iterator import BatchIterator
from tailrace.data.batches import Batches
from tailrace.data.dtypes import narrowed
from tailrace.devices import devices
from tailrace.devices.shardings import BatchSharding, without_mesh
from tailrace.errors import DataError
from tailrace.feeds.blocks import Blocks, batch_spec
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.feed import Block

MOST_BYTES = 1 << 30
"""Larger datasets are kept on the device only with `resident=True`."""


def resident_pays(batches: Batches) -> bool:
    """Whether keeping the arrays on the device is worth it.

    On an accelerator it saves the transfer of each block over the bus. On a CPU there is no bus, and
    the gather would take time from the cores that train.
    """
    whole = batches.drops or batches.num_examples % batches.batch_size == 0
    alone = jax.process_count() == 1  # otherwise each process has different arrays
    return alone and whole and devices.platform() != "cpu" and batches.nbytes <= MOST_BYTES


class IndexBlocks(Blocks):
    """Rows are the indices of a batch; its elements are gathered on the device.

    Args:
        batches: the dataset, whose arrays are copied to the device once.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._on_device: dict[Any, tuple[Any, ...]] = {}

    def known_spec(self) -> ElementSpec:
        """Shapes and dtypes of the elements; known without reading one."""
        batch = self._batches
        if not batch.drops and batch.num_examples % batch.batch_size:
            raise DataError("A resident dataset has batches of one size. Use drop_remainder=True.")
        return batch_spec(batch)

    def new(self, count: int, spec: ElementSpec) -> Block:
        """Rows of index 0, which always exists."""
        return [np.zeros((count, self._batches.batch_size), np.int32)]

    def read(self, source: BatchIterator, count: int, spec: ElementSpec) -> tuple[Block, int]:
        """The indices of batches."""
        indices = source.indices(count)
        return [indices], len(indices)

    def join(self, blocks: Sequence[Block], spec: ElementSpec) -> Block:
        """Indices, one after the other."""
        return [np.concatenate([block[0] for block in blocks])]

    def to_device(
        self, block: Block, sharding: jax.sharding.Sharding | BatchSharding, room: int
    ) -> tuple[Any, ...]:
        """The elements at a block of indices, padded to `room` rows."""
        (indices,) = block
        if room > len(indices):  # padded with row 0, so that one compiled gather serves all lengths
            more = np.zeros((room - len(indices), *indices.shape[1:]), indices.dtype)
            indices = np.concatenate([indices, more])
        if sharding not in self._on_device:
            # Kept for the life of the reader: programs with other shardings (evaluation) have their
            # own copy.
            self._on_device[sharding] = self._copied(sharding)
        # Of a sharded model each device takes its own rows, as it has the indices of these alone.
        where = sharding.of(indices.shape) if isinstance(sharding, BatchSharding) else sharding
        with without_mesh():
            return _gather(sharding)(self._on_device[sharding], jax.device_put(indices, where))

    def elements_of(self, block: Block) -> Block:
        """The elements at these indices."""
        return [np.asarray(leaf)[block[0]] for leaf in jax.tree.leaves(self._batches.arrays)]

    def _copied(self, sharding: jax.sharding.Sharding | BatchSharding) -> tuple[Any, ...]:
        """The arrays on the devices of a block: replicated, as any device may need any row."""
        whole: Any = sharding
        if isinstance(sharding, jax.sharding.NamedSharding | BatchSharding):
            whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        spec = batch_spec(self._batches)
        leaves = zip(jax.tree.leaves(self._batches.arrays), spec.leaves, spec.paths, strict=True)
        return tuple(
            jax.device_put(narrowed(leaf, form.dtype, path), whole) for leaf, form, path in leaves
        )


@functools.cache
def _gather(sharding: jax.sharding.Sharding | BatchSharding) -> Any:
    out = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None

    def gather(arrays: tuple[Any, ...], indices: jax.Array) -> tuple[Any, ...]:
        # Indices are always valid. The default mode would compare each of them, and fill with NaN.
        found = tuple(jnp.take(a, indices, axis=0, mode="clip") for a in arrays)
        if isinstance(sharding, BatchSharding):
            shardings = tuple(sharding.of(leaf.shape) for leaf in found)
            found = jax.lax.with_sharding_constraint(found, shardings)
        return found

    return jax.jit(gather, out_shardings=out)
