"""Transfers to the device: large arrays in chunks, short blocks into padded arrays.

One transfer of pageable memory keeps one core busy with a copy that is slower than the bus, so large
arrays are transferred in parallel chunks. A CPU device gains nothing: it uses arrays in place.

A program whose trip count is data reads arrays with room for the largest count. A shorter block is
padded where that is cheapest: on the host for a CPU, where unwritten rows cost nothing; on the device
for an accelerator, so that only real rows are transferred.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.devices import devices
from tailrace.devices.devices import Device
from tailrace.devices.shardings import BatchSharding
from tailrace.feeds.buffers import allocate

PIECE, MOST_PIECES = 1 << 21, 16
"""The bytes of a chunk, and the largest number of chunks in flight."""


def put(
    array: np.ndarray, sharding: jax.sharding.Sharding | BatchSharding | Device, room: int = 0
) -> jax.Array:
    """Transfer an array to `sharding`; it must not change until the transfer has finished."""
    if isinstance(sharding, BatchSharding):
        sharding = sharding.of(array.shape)
    if on_cpu():
        return jax.device_put(with_room(array, room), sharding)
    pieces = min(MOST_PIECES, array.nbytes // PIECE, len(array)) if array.ndim else 1
    spread = isinstance(sharding, jax.sharding.Sharding) and len(sharding.device_set) > 1
    # Over several devices, JAX already copies to each in parallel.
    if pieces < 2 or spread:
        moved = jax.device_put(array, sharding)
    else:
        # Chunks are transferred in parallel, and joined by the device in its own memory.
        moved = _join([jax.device_put(piece, sharding) for piece in np.array_split(array, pieces)])
    if not array.ndim or room <= len(array):
        return moved
    return _padded(moved, room, sharding if spread else None)


def sharding_for(
    sharding: jax.sharding.Sharding | BatchSharding | Device, shape: Sequence[int]
) -> jax.sharding.Sharding:
    """The sharding of an array of elements, from that of all of them, or from a device."""
    if isinstance(sharding, BatchSharding):
        return sharding.of(shape)
    if isinstance(sharding, jax.Device):
        return jax.sharding.SingleDeviceSharding(sharding)
    return sharding


def with_room(array: np.ndarray, room: int) -> np.ndarray:
    """An array padded to `room` rows; the added rows are uninitialized."""
    if not array.ndim or room <= len(array):
        return array
    whole = allocate((room, *array.shape[1:]), array.dtype)
    whole[: len(array)] = array
    return whole


@jax.jit
def _join(pieces: list[Any]) -> jax.Array:
    return jnp.concatenate(pieces)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _padded(array: jax.Array, room: int, sharding: jax.sharding.Sharding | None) -> jax.Array:
    # Zeros, though any values would do: a program in XLA has no uninitialized arrays.
    rows = jnp.zeros((room, *array.shape[1:]), array.dtype)
    filled = jax.lax.dynamic_update_slice_in_dim(rows, array, 0, 0)
    return filled if sharding is None else jax.lax.with_sharding_constraint(filled, sharding)


def on_cpu() -> bool:
    """Whether programs run on the host itself, where nothing is transferred."""
    return devices.platform() == "cpu"
