"""What is computed from an observed tensor on the device, and how the host reads it.

How the statistics are written decides their price. All tensors of a loop body are cut into rows of
one width and packed into one array; one reduction over it yields a few numbers a row, and the host
merges the rows of a tensor. So a step pays for one or two kernels, however many tensors it shows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tailrace.devices import devices

ROWS = {"cpu": 1024}
LONG_ROW = 4096
"""Values in a row of the packed array. Short rows suit the caches of a CPU; elsewhere fewer rows
leave less to bring to the host and to merge there."""

SUMS, SHORT = 8, 4096
"""How many sums a CPU makes beside each other, of tensors with at least so many values."""

LARGE = 1 << 18
"""Values of a tensor that is worth a kernel of its own on an accelerator."""

FACTORS = 128
"""Values in a row of the matrix that is multiplied by noughts."""

LANES, SHARE = 4096, 256
"""How many copies of a histogram are counted side by side, and how many values each copy is worth.

On a GPU, values with one exponent are added to one address, one after the other. 124 million values
on an H200: 33.7 ms in one histogram, 2.5 ms in 1024 copies, 1.5 ms in 4096."""

STATS = np.dtype(
    [
        ("mean", np.float64),
        ("std", np.float64),
        ("min", np.float64),
        ("max", np.float64),
        ("nan", np.int64),
        ("inf", np.int64),
        ("zero", np.float64),
    ]
)
"""One record of statistics: over the finite values; NaN and Inf counted; the share of zeros."""

NUM_BINS = 258
SUBNORMAL, INF_BIN, NAN_BIN, ZERO_BIN = 0, 255, 256, 257
"""Bins of a histogram: 1..254 are binary exponents (biased by 127), the others special values."""


def norm(value: Any) -> Any:
    """The Euclidean norm of all values, computed in float32."""
    wide = _wide(value)
    # Not a dot product: on a CPU that adds one by one, and loses a percent over 10 million values.
    return jnp.sqrt(_total(wide * wide))


def all_finite(values: Sequence[Any]) -> Any:
    """Whether all values of several tensors are finite.

    Nought times a value is nought, or NaN if the value is not finite; and nothing is faster than
    adding that up: on a CPU as a product of matrices, which is what its libraries do best.
    """
    if devices.platform() == "cpu":
        nought = sum(_nought(jnp.ravel(_wide(value))) for value in values)
    else:  # one kernel for all that are small; joined to others, a large one would be read unaligned
        flat = [jnp.ravel(_wide(value)) for value in values]
        small = [value for value in flat if value.size < LARGE]
        parts = [value for value in flat if value.size >= LARGE]
        parts += [jnp.concatenate(small)] if small else []
        nought = sum((part * 0).sum() for part in parts)
    return jnp.isfinite(nought)


def _nought(flat: Any) -> Any:
    """Nought if all values are finite, else NaN."""
    even = flat.size - flat.size % FACTORS
    rest = (flat[even:] * 0).sum()
    if not even:
        return rest
    noughts = lax.optimization_barrier(jnp.zeros(FACTORS, flat.dtype))  # no compiler may know them
    return (flat[:even].reshape(-1, FACTORS) @ noughts).sum() + rest


def _total(value: Any) -> Any:
    """The sum of all values.

    On a CPU, XLA adds up to a single number one value at a time, on one core. Eight sums beside each
    other take a third of the time.
    """
    if devices.platform() != "cpu" or value.size < SHORT:
        return value.sum()
    flat, even = jnp.ravel(value), value.size - value.size % SUMS
    total = flat[:even].reshape(SUMS, -1).sum(axis=1).sum()
    return total if even == value.size else total + flat[even:].sum()


def histogram(value: Any) -> Any:
    """Counts by binary exponent, without a logarithm: the exponent is read from the bits."""
    bits = lax.bitcast_convert_type(jnp.ravel(value).astype(jnp.float32), jnp.int32)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    index = jnp.where((exponent == 255) & (mantissa != 0), NAN_BIN, exponent)
    index = jnp.where((exponent == 0) & (mantissa == 0), ZERO_BIN, index)
    lanes = 1 if devices.platform() == "cpu" else max(1, min(LANES, index.size // SHARE))
    if lanes > 1:  # neighbours count in copies of their own, at neighbouring addresses
        index = index * lanes + jnp.arange(index.size, dtype=jnp.int32) % lanes
    counts = jnp.zeros(NUM_BINS * lanes, jnp.int32).at[index].add(1, mode="promise_in_bounds")
    return counts.reshape(NUM_BINS, lanes).sum(axis=1, dtype=jnp.int32)


# -- statistics ---------------------------------------------------------------------------------


def pack_statistics(values: Sequence[Any]) -> Any:
    """Partial statistics of several tensors: [rows, 8], the rows of each tensor in turn."""
    rows = jnp.concatenate([_rows(value) for value in values])
    lengths = jnp.asarray(np.concatenate([row_lengths(value.size) for value in values]))
    if devices.platform() == "cpu":
        # Packed once, not again inside each reduction: half the time.
        rows = lax.optimization_barrier(rows)
    first = rows[:, :1]
    shift = jnp.where(jnp.isfinite(first), first, 0)
    if devices.platform() != "cpu":
        return _careful(rows, lengths, shift)
    # On a CPU, telling finite values from others costs more than everything else together. A sum
    # of squares that is finite proves that there are no others.
    quick = _quick(rows, lengths, shift)
    fine = jnp.isfinite(quick[:, 1]).all()
    return lax.cond(fine, lambda: quick, lambda: _careful(rows, lengths, _any_finite(rows)))


def _any_finite(rows: Any) -> Any:
    """A finite value of each row: the first, if it is one, or the smallest; 0 where there is none."""
    low = jnp.where(jnp.isfinite(rows), rows, jnp.inf).min(axis=1, keepdims=True)
    first = rows[:, :1]
    return jnp.where(jnp.isfinite(first), first, jnp.where(jnp.isfinite(low), low, 0))


def _quick(rows: Any, lengths: Any, shift: Any) -> Any:
    """Statistics of rows that hold finite values only. Missing values equal the row's first."""
    moved = rows - shift
    return jnp.stack(
        [
            moved.sum(axis=1),
            (moved * moved).sum(axis=1),
            rows.min(axis=1),
            rows.max(axis=1),
            jnp.zeros(len(rows), rows.dtype),
            jnp.zeros(len(rows), rows.dtype),
            # Zeros, counted by arithmetic: a CPU does that faster than comparing.
            (1 - jnp.sign(jnp.abs(rows))).sum(axis=1)
            - jnp.where(rows[:, 0] == 0, rows.shape[1] - lengths, 0).astype(rows.dtype),
            shift[:, 0],
        ],
        axis=1,
    )


def _careful(rows: Any, lengths: Any, shift: Any) -> Any:
    """Statistics of any rows. Missing values equal the row's first: only counts must leave them out."""
    finite = jnp.isfinite(rows)
    moved = jnp.where(finite, rows - shift, 0)
    missing = (rows.shape[1] - lengths).astype(rows.dtype)

    def count(found: Any) -> Any:
        return found.sum(axis=1, dtype=rows.dtype) - jnp.where(found[:, 0], missing, 0)

    return jnp.stack(
        [
            moved.sum(axis=1),
            (moved * moved).sum(axis=1),
            jnp.where(finite, rows, jnp.inf).min(axis=1),
            jnp.where(finite, rows, -jnp.inf).max(axis=1),
            count(jnp.isnan(rows)),
            count(jnp.isinf(rows)),
            count(rows == 0),
            shift[:, 0],
        ],
        axis=1,
    )


def _rows(value: Any) -> Any:
    flat = jnp.ravel(_wide(value))
    width = row_width()
    missing = -flat.size % width
    if missing:
        # The last row is filled with its own first value, which is neutral after the shift.
        fill = jnp.broadcast_to(flat[flat.size - flat.size % width], (missing,))
        flat = jnp.concatenate([flat, fill])
    return flat.reshape(-1, width)


def row_width() -> int:
    """How many values a row of the packed array has here."""
    return ROWS.get(devices.platform(), LONG_ROW)


def row_lengths(size: int) -> np.ndarray:
    """How many values each row of a tensor of `size` values really has."""
    width = row_width()
    whole, rest = divmod(size, width)
    return np.array([width] * whole + [rest] * (rest > 0), np.int32)


def _wide(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = jnp.abs(value)
    return value.astype(
        jnp.promote_types(jnp.float32, value.dtype) if _is64(value) else jnp.float32
    )


def _is64(value: Any) -> bool:
    return value.dtype == jnp.float64


def merge_statistics(partial: np.ndarray, size: int) -> np.ndarray:
    """Statistics of a tensor of `size` values, from its rows: [..., rows, 8] to [...]."""
    # Each quantity contiguous: the sums below would crawl over every eighth number otherwise.
    parts = np.ascontiguousarray(np.moveaxis(partial, -1, 0)).astype(np.float64)
    total, squares, low, high, nan, inf, zero, shift = parts
    lengths = row_lengths(size).astype(np.float64)
    count = lengths - nan - inf
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = shift + np.where(count > 0, total / count, 0)
        spread = np.maximum(squares - np.where(count > 0, total**2 / count, 0), 0)
        whole = count.sum(-1)
        overall = (mean * count).sum(-1) / whole
        between = (count * (mean - overall[..., None]) ** 2).sum(-1)
        variance = (spread.sum(-1) + between) / whole
        out = np.empty(overall.shape, STATS)
        out["mean"], out["std"] = overall, np.sqrt(variance)
        out["min"] = np.where(whole > 0, low.min(-1, initial=np.inf), np.nan)
        out["max"] = np.where(whole > 0, high.max(-1, initial=-np.inf), np.nan)
        out["nan"], out["inf"] = nan.sum(-1), inf.sum(-1)
        out["zero"] = zero.sum(-1) / max(size, 1)
    return out


class StatsKey(tuple):
    """The key of packed statistics: (key, size) of each tensor in the pack."""

    __slots__ = ()

    def parts(self) -> list[tuple[Hashable, int, slice]]:
        """Each tensor in the pack: key, size, rows."""
        found, start = [], 0
        for key, size in self:
            rows = len(row_lengths(size))
            found.append((key, size, slice(start, start + rows)))
            start += rows
        return found
