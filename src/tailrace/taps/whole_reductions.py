"""Reductions of tensors that are sharded over devices.

On one device tensors are flat and packed, so that few kernels read them. Flat or packed, a sharded
tensor would have to be gathered. Here each one is reduced as it is: every device reads its part, and a
few numbers of each tensor cross the devices.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.trees import Tree
from tailrace.taps.bit_digests import bit_digest, whole_digests
from tailrace.taps.float_bits import (
    as_wide,
    bits_of,
    limits_of,
    magnitude_bits,
    ordered_bits,
    scaled_by,
)
from tailrace.taps.reductions import NUM_BINS, bins_of, histogram, largest_size, norm


def whole_statistics(values: Sequence[jax.Array]) -> jax.Array:
    """Statistics of several tensors, one row of `pack_statistics` each; of an empty one, none."""
    rows = [_row(as_wide(value)) for value in values if value.size]
    return jnp.stack(rows) if rows else jnp.zeros((0, 8), jnp.float32)


def _row(wide: jax.Array) -> jax.Array:
    finite = jnp.isfinite(wide)
    order, far = ordered_bits(bits_of(wide)), bits_of(jnp.asarray(jnp.inf, wide.dtype))
    near = ordered_bits(bits_of(jnp.asarray(-jnp.inf, wide.dtype)))
    ends = jnp.where(finite, order, far).min(), jnp.where(finite, order, near).max()
    low, high = (lax.bitcast_convert_type(ordered_bits(end), wide.dtype) for end in ends)
    factor = limits_of(wide).factor(largest_size(low, high))
    scaled = jnp.where(finite, scaled_by(wide, factor), 0)
    # Around the mean: one row is as long as the tensor, and squares of large numbers would lose
    # the digits of their differences.
    count = finite.sum(dtype=wide.dtype)
    shift = scaled.sum() / jnp.maximum(count, 1) / factor
    moved = jnp.where(finite, scaled - scaled_by(shift, factor), 0)
    squares = (moved * moved).sum()
    # By bits: a CPU takes subnormal numbers for zero.
    zeros = (magnitude_bits(wide) == 0).sum(dtype=wide.dtype)
    counts = [test(wide).sum(dtype=wide.dtype) for test in (jnp.isnan, jnp.isinf)]
    squares = jnp.where(factor == 1, squares, -squares)
    return jnp.stack([moved.sum(), squares, low, high, *counts, zeros, shift])


def whole_all_finite(values: Sequence[jax.Array]) -> jax.Array:
    """Whether all values of several tensors are finite."""
    zeros = [(as_wide(value) * 0).sum() for value in values]
    return jnp.isfinite(functools.reduce(jnp.add, zeros))


def whole_histogram(value: jax.Array) -> jax.Array:
    """The counts of a tensor's values by binary exponent."""
    counts = jnp.zeros(NUM_BINS, jnp.int32)
    return counts.at[bins_of(value)].add(1, mode="promise_in_bounds")


def _whole_digest(value: jax.Array) -> jax.Array:
    return whole_digests([value], ["bits"])[0]


_WHOLE: dict[Any, Callable[[jax.Array], Tree]] = {
    norm: functools.partial(norm, whole=True),
    histogram: whole_histogram,
    bit_digest: _whole_digest,
}


def whole_form(reduce: Callable[[jax.Array], Tree]) -> Callable[[jax.Array], Tree]:
    """A reduction of a tap for sharded tensors; a function of the user's is used as it is."""
    return _WHOLE.get(reduce, reduce)
