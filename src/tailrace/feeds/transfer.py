"""Moving large arrays to an accelerator, in pieces beside each other.

One transfer of pageable memory keeps one core busy copying, which is slower than the bus. On a CPU
device there is nothing to gain: it uses arrays where they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PIECE, MOST_PIECES = 1 << 21, 16
"""Bytes of a piece on its way to a device, and how many there are at most."""


def put(array: np.ndarray, sharding: Any) -> Any:
    """An array, moved to where `sharding` says; it must not change until it has arrived."""
    pieces = min(MOST_PIECES, array.nbytes // PIECE, len(array)) if array.ndim else 1
    spread = isinstance(sharding, jax.sharding.Sharding) and len(sharding.device_set) > 1
    if pieces < 2 or spread or _on_cpu():
        return jax.device_put(array, sharding)
    return _join([jax.device_put(piece, sharding) for piece in np.array_split(array, pieces)])


@jax.jit
def _join(pieces: list[Any]) -> Any:
    return jnp.concatenate(pieces)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"
