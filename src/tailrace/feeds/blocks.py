"""The two kinds of rows of a block: elements in host memory, or indices of elements on the device.

A `Reader` knows the order of elements and which of them were put back; it asks an object of this file
for everything that depends on what a row is.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tailrace.data.batch_iterator import BatchIterator
from tailrace.data.batch_recipe import BatchRecipe
from tailrace.data.dtypes import narrowed
from tailrace.devices.devices import Device
from tailrace.feeds.buffers import allocate
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.feed import Block
from tailrace.feeds.transfer import put, with_room


class Blocks(abc.ABC):
    """Makes blocks of a dataset, joins them, and transfers them."""

    @abc.abstractmethod
    def known_spec(self) -> ElementSpec | None:
        """The spec of an element, if it is known without reading one."""

    @abc.abstractmethod
    def new(self, count: int, spec: ElementSpec) -> Block:
        """A block of `count` uninitialized rows."""

    @abc.abstractmethod
    def read(self, source: BatchIterator, count: int, spec: ElementSpec) -> tuple[Block, int]:
        """Up to `count` batches of `tr.batches` at once, and their number."""

    @abc.abstractmethod
    def join(self, blocks: Sequence[Block], spec: ElementSpec) -> Block:
        """Several blocks as one."""

    @abc.abstractmethod
    def to_device(
        self, block: Block, sharding: jax.sharding.Sharding | Device, room: int
    ) -> tuple[Any, ...]:
        """The elements of a block in arrays with `room` rows; the other rows are unspecified."""

    @abc.abstractmethod
    def elements_of(self, block: Block) -> Block:
        """The elements of a block, on the host."""


class HostBlocks(Blocks):
    """Rows are elements, which are copied to the device block by block.

    Args:
        batches: the recipe, if elements come from `tr.batches`.
    """

    def __init__(self, batches: BatchRecipe | None = None) -> None:
        self._batches = batches

    def known_spec(self) -> ElementSpec | None:
        """From the arrays of `tr.batches`: a first element read alone would be copied twice."""
        return None if self._batches is None else batch_spec(self._batches)

    def new(self, count: int, spec: ElementSpec) -> Block:
        """Uninitialized arrays, in memory that is used again."""
        return [allocate((count, *leaf.shape), leaf.dtype) for leaf in spec.leaves]

    def read(self, source: BatchIterator, count: int, spec: ElementSpec) -> tuple[Block, int]:
        """Batches, stacked."""
        tree, done = source.read(count, allocate)
        leaves = zip(jax.tree.leaves(tree), spec.leaves, spec.paths, strict=True)
        # Batches have the dtypes of the arrays; a device has 64 bits only if JAX was configured for
        # them.
        return [narrowed(leaf, form.dtype, path) for leaf, form, path in leaves], done

    def join(self, blocks: Sequence[Block], spec: ElementSpec) -> Block:
        """Blocks, one after the other, in one allocation."""
        joined = self.new(sum(len(block[0]) for block in blocks), spec)
        for number, target in enumerate(joined):
            # Into memory of the pool, aligned for a CPU device; `concatenate` alone would allocate
            # its own.
            np.concatenate([block[number] for block in blocks], out=target)
        return joined

    def to_device(
        self, block: Block, sharding: jax.sharding.Sharding | Device, room: int
    ) -> tuple[Any, ...]:
        """Copies; on a CPU they alias the block, which must not be written again."""
        if isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_addressable:
            # Each process has the elements of its local replicas.
            place = jax.make_array_from_process_local_data
            return tuple(place(sharding, with_room(leaf, room)) for leaf in block)
        return tuple(put(leaf, sharding, room) for leaf in block)

    def elements_of(self, block: Block) -> Block:
        """The block itself."""
        return block


def batch_spec(batches: BatchRecipe) -> ElementSpec:
    """The spec of the batches of `tr.batches`, from its arrays."""
    size = min(batches.batch_size, batches.num_examples)
    return ElementSpec.of(
        jax.tree.map(
            # A broadcast scalar has the form of a batch and takes no memory.
            lambda a: np.broadcast_to(np.zeros((), a.dtype), (size, *a.shape[1:])),
            batches.arrays,
        )
    )
