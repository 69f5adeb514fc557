"""Floats by their bits, and where their squares leave the range of their format."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Limits(NamedTuple):
    """From where on the squares of numbers leave the range of their format, and what brings them back.

    Attributes:
        small: below it, differences of neighbours have no square.
        large: from there on, sums of squares may be infinite.
        up: brings small values into the middle of the range; a power of two, so nothing is rounded.
        down: the same for large ones.
        tiny: a sum of squares from which it has lost no digits.
        norm: the same for sums of any number of squares.
    """

    small: float
    large: float
    up: float
    down: float
    tiny: float
    norm: float

    def factor(self, size: jax.Array) -> jax.Array:
        """What rows are multiplied by whose largest magnitude is `size`."""
        one = jnp.where(size < self.small, self.up, 1.0)
        return jnp.where(size >= self.large, self.down, one).astype(size.dtype)


LIMITS = {
    4: Limits(2.0**-40, 2.0**40, 2.0**86, 2.0**-80, 2.0**-90, 2.0**-60),
    8: Limits(2.0**-300, 2.0**300, 2.0**600, 2.0**-600, 2.0**-700, 2.0**-600),
}
"""By the bytes of a number: float32 and float64.

Sums of scaled rows leave the device as they are. A *negative* sum of squares says that they are scaled,
and the extremes of the row by which factor: ordinary rows need no column for that."""


def info_of(value: jax.Array) -> Any:
    """What floats of this dtype can hold; NumPy's types say too little of it."""
    return jnp.finfo(value.dtype)


def limits_of(wide: jax.Array) -> Limits:
    """The limits of their format."""
    return LIMITS[wide.dtype.itemsize]


def bits_of(wide: jax.Array) -> jax.Array:
    """The bits of floats as integers: comparisons of those know subnormal numbers, also on a CPU."""
    return lax.bitcast_convert_type(wide, jnp.int32 if wide.dtype.itemsize == 4 else jnp.int64)


def magnitude_bits(wide: jax.Array) -> jax.Array:
    """Integers in the order of the magnitudes of floats; NaN is the largest."""
    bits = bits_of(wide)
    most: int = jnp.iinfo(bits.dtype).max
    return bits & most


def ordered_bits(bits: jax.Array) -> jax.Array:
    """Integers in the order of the floats that have these bits; its own inverse."""
    most = jnp.iinfo(bits.dtype)
    return bits ^ ((bits >> (most.bits - 1)) & most.max)


def scaled_by(wide: jax.Array, factor: jax.Array) -> jax.Array:
    """Values times a power of two. A CPU takes subnormal numbers for zero: integers give theirs."""
    info = info_of(wide)
    size = magnitude_bits(wide)
    up = limits_of(wide).up
    unit = float(info.smallest_subnormal) * up
    small = jnp.where(bits_of(wide) < 0, -unit, unit).astype(wide.dtype) * size.astype(wide.dtype)
    return jnp.where((size < 1 << info.nmant) & (factor == up), small, wide * factor)


def as_wide(value: jax.Array) -> jax.Array:
    """Numbers as float32, or float64; of complex ones their magnitudes."""
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        size = jnp.abs(value)
        # A finite number may have a magnitude that its format has not.
        value = jnp.where(jnp.isfinite(value), jnp.minimum(size, float(info_of(size).max)), size)
    return value if value.dtype == jnp.float64 else value.astype(jnp.float32)
