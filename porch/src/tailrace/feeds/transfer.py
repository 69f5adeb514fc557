"""Moving arrays to the device: large ones in pieces, short ones into arrays with room for more.

One transfer of pageable memory keeps one core busy copying, which is slower than the bus: so large
arrays cross it in pieces beside each other. On a CPU device there is nothing to gain: it uses arrays
where they are.

A program whose number of passes is data reads arrays with room for the most that it can make. A
shorter block is copied into such an array where that is cheapest: on the host for a CPU, where rows
that nobody writes cost nothing; on the device for an accelerator, so that only real rows travel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.devices import devices
from tailrace.feeds.buffers import allocate

PIECE, MOST_PIECES = 1 << 21, 16
"""Bytes of a piece on its way to a device, and how many there are at most."""


def put(array: np.ndarray, sharding: Any, room: int = 0) -> Any:
    """An array, moved to where `sharding` says; it must not change until it has arrived."""
    if _on_cpu():
        return jax.device_put(with_room(array, room), sharding)
    pieces = min(MOST_PIECES, array.nbytes // PIECE, len(array)) if array.ndim else 1
    spread = isinstance(sharding, jax.sharding.Sharding) and len(sharding.device_set) > 1
    if pieces < 2 or spread:
        moved = jax.device_put(array, sharding)
    else:
        moved = _join([jax.device_put(piece, sharding) for piece in np.array_split(array, pieces)])
    if not array.ndim or room <= len(array):
        return moved
    return _padded(moved, room, sharding if spread else None)


def with_room(array: np.ndarray, room: int) -> np.ndarray:
    """The rows of an array in front of others, up to `room` in all, that hold anything."""
    if not array.ndim or room <= len(array):
        return array
    whole = allocate((room, *array.shape[1:]), array.dtype)
    whole[: len(array)] = array
    return whole


@jax.jit
def _join(pieces: list[Any]) -> Any:
    return jnp.concatenate(pieces)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _padded(array: Any, room: int, sharding: Any) -> Any:
    rows = jnp.zeros((room, *array.shape[1:]), array.dtype)
    filled = jax.lax.dynamic_update_slice_in_dim(rows, array, 0, 0)
    return filled if sharding is None else jax.lax.with_sharding_constraint(filled, sharding)


def _on_cpu() -> bool:
    return devices.platform() == "cpu"
