"""Copying large arrays, on the host and to an accelerator, in pieces beside each other.

One copy of pageable memory keeps one core busy, which is slower than memory and slower than the bus.
On a CPU device nothing is gained: its arrays are used where they are, and its cores train.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PIECE, MOST_PIECES = 1 << 21, 16
"""Bytes of a piece on its way to a device, and how many there are at most."""
SHARED_FROM, THREADS = 1 << 20, 4
"""Arrays of so many bytes are copied on the host by so many threads."""


def put(array: np.ndarray, sharding: Any) -> Any:
    """An array, moved to where `sharding` says; it must not change until it has arrived."""
    pieces = min(MOST_PIECES, array.nbytes // PIECE, len(array)) if array.ndim else 1
    spread = isinstance(sharding, jax.sharding.Sharding) and len(sharding.device_set) > 1
    if pieces < 2 or spread or _on_cpu():
        return jax.device_put(array, sharding)
    return _join([jax.device_put(piece, sharding) for piece in np.array_split(array, pieces)])


def copy_into(target: np.ndarray, source: Any) -> None:
    """Copy an array; it is copied when this returns."""
    alone = target.nbytes < SHARED_FROM or len(target) < THREADS
    if alone or _on_cpu() or type(source) is not np.ndarray:
        target[...] = source  # narrows 64 bits on the way, without a second copy
        return
    pairs = zip(np.array_split(target, THREADS), np.array_split(source, THREADS), strict=True)
    for copying in [_threads().submit(np.copyto, *pair, casting="unsafe") for pair in pairs]:
        copying.result()


@jax.jit
def _join(pieces: list[Any]) -> Any:
    return jnp.concatenate(pieces)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "tailrace-copy")


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"
