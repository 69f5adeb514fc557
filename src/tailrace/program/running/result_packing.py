"""Small results packed into one array: copying one number to the host costs as much as thousands.

loss f32[100], out f32[32,10], grad f32[10], step s32[]   ──▶   f32[430], s32[1]
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import DTypeLike
from tailrace.base.trees import Tree
from tailrace.devices import devices

MOST_BYTES = 4 << 20
"""Larger arrays stay separate: their copies take longer than the fixed cost."""


@dataclasses.dataclass(frozen=True, eq=False)
class FirstRows:
    """The first rows of a larger array; `np.asarray` waits for the array.

    Attributes:
        whole: the array, on the device.
        count: the number of rows.
        axis: the dim of the rows.
    """

    whole: Any
    count: int
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of those rows."""
        shape = self.whole.shape
        return (*shape[: self.axis], self.count, *shape[self.axis + 1 :])

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.whole.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype."""
        return self.whole.dtype

    def on_device(self) -> Any:
        """Those rows as an array on the device."""
        return jax.lax.slice_in_dim(jnp.asarray(self.whole), 0, self.count, axis=self.axis)

    def __array__(self, dtype: DTypeLike = None, copy: bool | None = None) -> np.ndarray:
        whole = self.whole
        large = isinstance(whole, jax.Array) and whole.nbytes > MOST_BYTES
        if large and self.count < whole.shape[self.axis] and devices.platform() != "cpu":
            # Cut on the device, so that only computed rows are transferred.
            found = np.asarray(jax.lax.slice_in_dim(whole, 0, self.count, axis=self.axis))
        else:
            rows = (slice(None),) * self.axis + (slice(0, self.count),)
            found = np.asarray(whole)[rows]
            if 2 * self.count <= whole.shape[self.axis]:
                # A view would keep all of the array alive: an execution of one step returns room for
                # hundreds.
                found = found.copy()
        return np.array(found, dtype=dtype) if copy else np.asarray(found, dtype=dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """An array inside a larger one; `np.asarray` waits for the larger one.

    Attributes:
        whole: the larger one, flat.
        start: the offset of this one.
        shape: its shape.
    """

    whole: Any
    start: int
    shape: tuple[int, ...]

    def __array__(self, dtype: DTypeLike = None, copy: bool | None = None) -> np.ndarray:
        whole = np.asarray(self.whole)
        found = whole[self.start : self.start + math.prod(self.shape)].reshape(self.shape)
        return np.array(found, dtype=dtype) if copy else np.asarray(found, dtype=dtype)


class Packing:
    """The layout of a tree's leaves in a few arrays, one per dtype."""

    def __init__(self) -> None:
        self._structure: Any = None
        self._places: list[tuple[int, int | None, tuple[int, ...]]] = []

    def pack(self, tree: Tree) -> list[Any]:
        """Pack a tree of traced values into arrays."""
        leaves, self._structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
        self._places = []
        arrays: list[list[Any]] = []
        sizes: list[int] = []
        shared: dict[Any, int] = {}
        for leaf in leaves:
            if not _is_small(leaf):
                self._places.append((len(arrays), None, leaf.shape))
                arrays.append([leaf])
                sizes.append(0)
                continue
            # By dtype, without conversion: what is unpacked has the bits that were packed.
            number = shared.setdefault(leaf.dtype, len(arrays))
            if number == len(arrays):
                arrays.append([])
                sizes.append(0)
            self._places.append((number, sizes[number], leaf.shape))
            arrays[number].append(leaf)
            sizes[number] += leaf.size
        alone = {number for number, start, _ in self._places if start is None}
        return [
            parts[0] if number in alone else jnp.concatenate([part.ravel() for part in parts])
            for number, parts in enumerate(arrays)
        ]

    def unpack(self, arrays: list[Any]) -> Tree:
        """The tree, from the arrays that the program returned; does not wait for them."""
        leaves = [
            arrays[number] if start is None else Packed(arrays[number], start, shape)
            for number, start, shape in self._places
        ]
        return jax.tree.unflatten(self._structure, leaves)


def on_device(leaf: object) -> Any:
    """An emitted leaf as an array on the device."""
    return leaf.on_device() if isinstance(leaf, FirstRows) else leaf


def start_copying(tree: Tree, most_bytes: int | None = None) -> None:
    """Start copying the leaves of a tree to the host, in parallel.

    Args:
        tree: the results of a program.
        most_bytes: larger ones are left out: of those, only some rows may be read.
    """
    if devices.platform() == "cpu":
        return
    wholes = (_stored(leaf) for leaf in jax.tree.leaves(tree))
    # Once for each array: many leaves are parts of one.
    for array in {id(array): array for array in wholes}.values():
        if most_bytes is None or (_is_plain(array) and array.nbytes <= most_bytes):
            array.copy_to_host_async()


def _stored(leaf: object) -> Any:
    """The array on the device that a leaf is a part of."""
    while isinstance(leaf, Packed | FirstRows):
        leaf = leaf.whole
    return leaf


def _is_small(leaf: jax.Array) -> bool:
    # Random keys cannot be concatenated with anything.
    return _is_plain(leaf) and leaf.size * leaf.dtype.itemsize <= MOST_BYTES


def _is_plain(leaf: object) -> bool:
    """Whether it is an array of numbers on a device: not of random keys, and not on the host."""
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
