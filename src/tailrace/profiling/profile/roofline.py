"""The measured roofline of this device: matrix products and memory bandwidth."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import jax

    from tailrace.devices.devices import Device

_SIDES = {"cpu": (256, 512), "": (8192,)}
_LENGTHS = {"cpu": (1 << 16, 1 << 22), "": (1 << 27,)}
"""Sizes of products and arrays to try, by platform; the fastest counts, in a cache or not."""

_REPEATS, _RUNS = 10, 5
"""Operations per run, so that the dispatch hardly counts, and runs, of which the fastest counts."""


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
def roofline(device: Device, dtype: str = "float32") -> Roofline:
    """Measure a device, the best of a few runs; takes a fraction of a second, once."""
    import jax
    import jax.numpy as jnp

    kind = device.platform if device.platform in _SIDES else ""
    with jax.default_device(device):
        # Filled with 1 / side, a product equals its operands: repeated, it neither overflows nor
        # decays to denormal numbers, which are slow on a CPU.
        products = [jnp.full((side, side), 1 / side, jnp.dtype(dtype)) for side in _SIDES[kind]]
        arrays = [jnp.ones((length,), jnp.float32) for length in _LENGTHS[kind]]
        # A product of n x n matrices takes 2 n^3 FLOPs; x * y moves three float32 values per element.
        flops = [2.0 * len(a) ** 3 / _seconds(lambda x, y: x @ y, a) for a in products]
        moved = [12.0 * len(b) / _seconds(lambda x, y: x * y, b) for b in arrays]
    return Roofline(max(flops), max(moved))


def _seconds(operation: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> float:
    """The time of one operation: the best of a few runs of several in a row."""
    import jax

    def several(x: jax.Array) -> jax.Array:
        # Each takes the result of the one before it, so XLA can neither drop nor overlap them.
        return jax.lax.fori_loop(0, _REPEATS, lambda _, y: operation(x, y), x)

    run = jax.jit(several).lower(x).compile()
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        run(x).block_until_ready()
        times.append(time.perf_counter() - started)
    return min(times) / _REPEATS
