"""Reading and replacing some values in the buffers of devices, without moving the rest."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

Patches = Mapping[tuple[int, int], Mapping[int, Any]]
"""For a replica and a device, flat values by their offset in the device's part of a buffer."""


def patched(buffer: jax.Array, patches: Patches, each: bool) -> jax.Array:
    """A buffer [replica,] device, ... with other values in some places.

    Only the parts of devices with such values are written; the others are reused.

    Args:
        buffer: an array that is sharded over the devices.
        patches: the new values. A buffer that all replicas share counts as replica 0's.
        each: whether the buffer differs per replica.
    """
    parts = []
    for shard in buffer.addressable_shards:
        starts = [index.start or 0 for index in shard.index]
        replica, device = (starts[0], starts[1]) if each else (0, starts[0])
        part = shard.data
        # A device without changes keeps its array: nothing is read, copied or sent for it.
        if changes := patches.get((replica, device)):
            part = _written(part, jax.device_put(dict(changes), shard.device))
        parts.append(part)
    return jax.make_array_from_single_device_arrays(buffer.shape, buffer.sharding, parts)


Places = tuple[tuple[int, tuple[int, ...]], ...]
"""The offset and shape of each array in a flat buffer."""


def cut_out(flat: jax.Array | np.ndarray, places: Places) -> list[Any]:
    """The arrays in a flat buffer, on its device or, if it is a NumPy array, on the host."""
    if isinstance(flat, np.ndarray):
        return [flat[first : first + math.prod(shape)].reshape(shape) for first, shape in places]
    return _cut_out(flat, places)


@functools.partial(jax.jit, static_argnums=1)
def _cut_out(flat: jax.Array, places: Places) -> list[Any]:
    return [
        lax.slice_in_dim(flat, first, first + math.prod(shape)).reshape(shape)
        for first, shape in places
    ]


@jax.jit
def _written(part: jax.Array, values: dict[int, Any]) -> jax.Array:
    flat = part.reshape(-1)
    # Keys of a dict are constants of the compiled function: one compilation for each set of places,
    # and one call for all values of a part.
    for place, value in values.items():
        flat = lax.dynamic_update_slice(flat, value.astype(flat.dtype), (place,))
    return flat.reshape(part.shape)
