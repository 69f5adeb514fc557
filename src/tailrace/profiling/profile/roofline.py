"""The measured roofline of this device: matrix products and memory bandwidth."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

_SIDES = {"cpu": (256, 512), "": (8192,)}
_LENGTHS = {"cpu": (1 << 16, 1 << 22), "": (1 << 27,)}
"""Sizes of products and arrays to try, by platform; the fastest counts, in a cache or not."""

_REPEATS, _RUNS = 10, 5


class Roofline(NamedTuple):
    """The limits of a device.

    Attributes:
        flops: FLOPs per second of a large matrix product.
        bytes: bytes per second, read and written.
    """

    flops: float
    bytes: float

    def least_seconds(self, flops: float, moved: float) -> float:
        """The shortest possible time for this many FLOPs and bytes."""
        return max(flops / self.flops, moved / self.bytes)


@functools.cache
def roofline(device: Any, dtype: str = "float32") -> Roofline:
    """Measure a device, the best of a few runs; takes a fraction of a second, once."""
    import jax
    import jax.numpy as jnp

    kind = device.platform if device.platform in _SIDES else ""
    with jax.default_device(device):
        products = [jnp.full((side, side), 1 / side, jnp.dtype(dtype)) for side in _SIDES[kind]]
        arrays = [jnp.ones((length,), jnp.float32) for length in _LENGTHS[kind]]
        flops = [2.0 * len(a) ** 3 / _seconds(lambda x, y: x @ y, a) for a in products]
        moved = [12.0 * len(b) / _seconds(lambda x, y: x * y, b) for b in arrays]
    return Roofline(max(flops), max(moved))


def _seconds(operation: Any, x: object) -> float:
    """The time of one operation: the best of a few runs of several in a row."""
    import jax

    def several(x: object) -> Any:
        return jax.lax.fori_loop(0, _REPEATS, lambda _, y: operation(x, y), x)

    run = jax.jit(several).lower(x).compile()
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        run(x).block_until_ready()
        times.append(time.perf_counter() - started)
    return min(times) / _REPEATS
