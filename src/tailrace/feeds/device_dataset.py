"""Small datasets kept entirely on the device: only the indices of each batch are transferred.

A block of elements is then one gather on the device, dispatched while the previous execution runs. The
program is the same: it receives the same stacked arrays.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.data.batches import Batches
from tailrace.devices import devices
from tailrace.errors import DataError
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.reader import Block, Reader, batch_spec

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


class ResidentReader(Reader):
    """A reader whose blocks are indices on the host and elements on the device."""

    def __init__(self, dataset: Batches, epoch: int | None = None) -> None:
        super().__init__(dataset, epoch)
        self._batches = dataset
        self._on_device: dict[Any, tuple[Any, ...]] = {}

    def spec(self) -> ElementSpec:
        """Shapes and dtypes of the elements; known without reading one."""
        if self._spec is None:
            batch = self._batches
            if not batch.drops and batch.num_examples % batch.batch_size:
                raise DataError(
                    "A resident dataset has batches of one size. Use drop_remainder=True."
                )
            self._spec = batch_spec(batch)
        return self._spec

    def to_device(self, block: Block, sharding: Any, room: int) -> tuple[Any, ...]:
        """The elements at a block of indices, padded to `room` rows."""
        (indices,) = block
        if room > len(indices):  # padded with row 0, so that one compiled gather serves all lengths
            more = np.zeros((room - len(indices), *indices.shape[1:]), indices.dtype)
            indices = np.concatenate([indices, more])
        arrays = self._on_device.get(sharding)
        if arrays is None:
            whole: Any = sharding
            if isinstance(sharding, jax.sharding.NamedSharding):
                whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
            leaves = jax.tree.leaves(self._batches.arrays)
            arrays = tuple(
                jax.device_put(leaf.astype(s.dtype, copy=False), whole)
                for leaf, s in zip(leaves, self.spec().leaves, strict=True)
            )
            self._on_device[sharding] = arrays
        return _gather(sharding)(arrays, jax.device_put(indices, sharding))

    def elements_of(self, block: Block) -> Block:
        """The elements at these indices."""
        return [np.asarray(leaf)[block[0]] for leaf in jax.tree.leaves(self._batches.arrays)]

    def _read_on(self, count: int, before: Sequence[Block]) -> tuple[Block, BaseException | None]:
        indices = self._source.indices(count)  # pyright: ignore[reportAttributeAccessIssue]
        return self._join([*before, [indices]]), None

    def _new_block(self, count: int) -> Block:
        return [np.zeros((count, self._batches.batch_size), np.int32)]

    def _join(self, blocks: list[Block]) -> Block:
        return [np.concatenate([block[0] for block in blocks])]


@functools.cache
def _gather(sharding: Any) -> Any:
    out = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None

    def gather(arrays: tuple[Any, ...], indices: Any) -> tuple[Any, ...]:
        return tuple(jnp.take(a, indices, axis=0, mode="clip") for a in arrays)

    return jax.jit(gather, out_shardings=out)
