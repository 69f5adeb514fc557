"""Reductions of observed tensors on the device, and how the host reads their results.

The form of the statistics decides their cost. All tensors of a loop body are cut into rows of one width
and packed into one array; one reduction over it yields a few numbers per row, and the host merges the
rows of a tensor. So a step pays for one or two kernels, however many tensors it observes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tailrace.devices import devices
from tailrace.taps import gpu_kernels

ROW = 1024
"""Values per row of the packed array on a CPU: short rows suit its caches."""

LONG_ROW, JOINED = 4096, 256
"""Values per row on an accelerator, and the number of rows it merges before the host reads them.

Counts of a million values are still exact in float32. Without this merge, 72 activations of GPT-2 small
leave 35 MB every ten steps, and merging them on the host takes as long as the steps themselves."""

SUMS, SHORT = 8, 4096
"""The number of parallel sums on a CPU, and the tensor size from which they are used."""

LARGE = 1 << 18
"""The tensor size from which a separate kernel pays on an accelerator."""

TOGETHER, ALONE = 8, 1 << 23
"""The number of tensors that one kernel reads, and the size from which each has its own."""

HUGE, SHRINK = 1e24, 2.0**-60
"""The sum of squares from which values are made smaller before they are squared again, and by what."""

FACTORS = 128
"""Values per row of the matrix that is multiplied by zeros."""

LANES, SHARE = 4096, 256
"""The number of parallel copies of a histogram, and the number of values per copy that pays.

On a GPU, atomic additions of values with the same exponent hit one address and are serialized. 124
million values on an H200: 33.7 ms in one histogram, 2.5 ms in 1024 copies, 1.5 ms in 4096."""

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
"""One record of statistics: of the finite values; the counts of NaN and Inf; the fraction of zeros."""

NUM_BINS = 258
SUBNORMAL, INF_BIN, NAN_BIN, ZERO_BIN = 0, 255, 256, 257
"""Bins of a histogram: 1..254 are binary exponents (biased by 127), the others special values."""


def norm(value: jax.Array) -> jax.Array:
    """The Euclidean norm of all values, computed in float32."""
    wide = _wide(value)
    # Not a dot product: on a CPU it sums sequentially and is off by a percent at 10 million values.
    return jnp.sqrt(_unfinished(_total(wide * wide)))


def all_finite(values: Sequence[jax.Array]) -> jax.Array:
    """Whether all values of several tensors are finite.

    Zero times a value is zero, or NaN if the value is not finite, and summing that is the fastest test:
    on a CPU as a matrix product, which its libraries do best.
    """
    if devices.platform() == "cpu":
        zero = sum(_zero_or_nan(jnp.ravel(_wide(value))) for value in values)
    else:
        parts: list[jax.Array] = []
        for _, flats, whole in _alike(values, gpu_kernels.FINITENESS):
            if whole:
                parts.append(gpu_kernels.row_zeros(flats))
                continue
            zeros = _wide(flats[0]) * 0
            # One kernel for all small ones; a large one, concatenated, would be read unaligned. XLA
            # sums that where it computes the tensor.
            parts.append(zeros if zeros.size < LARGE else zeros.sum(keepdims=True))
        # Behind a barrier, or XLA would sum each of the parts in a kernel of its own.
        zero = _unfinished(lax.optimization_barrier(jnp.concatenate(parts)).sum())
    return jnp.isfinite(zero)


def _unfinished(value: jax.Array) -> jax.Array:
    """A number that does not leave a loop on an accelerator as it is: one operation must follow.

    A row that is ready is copied to its place, and XLA makes that copy asynchronous. For the sake of
    one asynchronous operation it schedules the whole loop in another way, and temporary arrays have
    other addresses: GPT-2 small takes 1 % longer on an H200, where fewer of them are in the cache.
    """
    return value if devices.platform() == "cpu" else lax.optimization_barrier(value)


def _zero_or_nan(flat: jax.Array) -> jax.Array:
    """Zero if all values are finite, else NaN."""
    even = flat.size - flat.size % FACTORS
    rest = (flat[even:] * 0).sum()
    if not even:
        return rest
    # Behind a barrier, or the compiler would fold the product with known zeros.
    zeros = lax.optimization_barrier(jnp.zeros(FACTORS, flat.dtype))
    return (flat[:even].reshape(-1, FACTORS) @ zeros).sum() + rest


def _total(value: jax.Array) -> jax.Array:
    """The sum of all values.

    On a CPU, XLA reduces to a scalar one value at a time, on one core. Eight parallel sums take a
    third of the time.
    """
    if devices.platform() != "cpu" or value.size < SHORT:
        return value.sum()
    flat, even = jnp.ravel(value), value.size - value.size % SUMS
    total = flat[:even].reshape(SUMS, -1).sum(axis=1).sum()
    return total if even == value.size else total + flat[even:].sum()


def histogram(value: jax.Array) -> jax.Array:
    """Counts by binary exponent, without a logarithm: the exponent is read from the bits."""
    return histograms([value])[0]


def histograms(values: Sequence[jax.Array]) -> list[jax.Array]:
    """The histogram of each of several tensors."""
    found: dict[int, jax.Array] = {}
    for numbers, flats, whole in _alike(values, gpu_kernels.HISTOGRAM):
        counts = gpu_kernels.histograms(flats, NUM_BINS) if whole else [_scattered(flats[0])]
        found.update(zip(numbers, counts, strict=True))
    return [found[number] for number in range(len(values))]


def _scattered(flat: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.int32)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    index = jnp.where((exponent == 255) & (mantissa != 0), NAN_BIN, exponent)
    index = jnp.where((exponent == 0) & (mantissa == 0), ZERO_BIN, index)
    lanes = 1 if devices.platform() == "cpu" else max(1, min(LANES, index.size // SHARE))
    if lanes > 1:  # neighbouring values count in different copies, at neighbouring addresses
        index = index * lanes + jnp.arange(index.size, dtype=jnp.int32) % lanes
    counts = jnp.zeros(NUM_BINS * lanes, jnp.int32).at[index].add(1, mode="promise_in_bounds")
    return counts.reshape(NUM_BINS, lanes).sum(axis=1, dtype=jnp.int32)


# -- statistics ---------------------------------------------------------------------------------


def pack_statistics(values: Sequence[jax.Array]) -> jax.Array:
    """Partial statistics of several tensors: [rows, 8], the rows of each tensor in turn."""
    if devices.platform() != "cpu":
        some = any(value.size for value in values)
        return jnp.stack(_joined(values), axis=1) if some else jnp.zeros((0, 8), jnp.float32)
    rows = jnp.concatenate([padded_rows(value, ROW) for value in values])
    lengths = jnp.asarray(np.concatenate([row_lengths(value.size) for value in values]))
    # Materialized once; XLA would otherwise fuse the packing into each reduction: half the time.
    rows = lax.optimization_barrier(rows)
    first = rows[:, :1]
    shift = jnp.where(jnp.isfinite(first), first, 0)
    # On a CPU, testing each value for finiteness costs more than everything else together. A finite
    # sum of squares proves that all values are finite.
    quick = quick_statistics(rows, lengths, shift)
    fine = jnp.isfinite(quick[:, 1]).all()
    return lax.cond(
        fine,
        lambda: quick,
        lambda: jnp.stack(careful_statistics(rows, lengths, any_finite(rows)), axis=1),
    )


def _joined(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Partial statistics on an accelerator: eight arrays with one number per returned row.

    A large tensor is reduced in place by its own kernel (`gpu_kernels`): packing would copy it. Small
    tensors, and ends of large tensors that fill no row, are packed. Then the rows of all tensors are
    merged at once.
    """
    found: list[Any] = [None]  # the statistics of each block: packed rows first, then large tensors
    counts = [np.zeros(0, np.int32)]  # of each block: how many values each row has
    packed: list[jax.Array] = []
    order: list[list[tuple[int, int, int]]] = [[] for _ in values]  # (block, first row, rows)
    for group, flats, whole in _alike(values, gpu_kernels.STATISTICS):
        size = flats[0].size
        own = _lengths(size, LONG_ROW)
        # A kernel of ours reads an end that fills no row; a slice for XLA's would be a copy.
        large = len(own) if whole else size // LONG_ROW if size >= LARGE else 0
        if large:
            for place, number in enumerate(group):
                order[number].append((len(found), place * large, large))
            counts.append(np.tile(own[:large], len(group)))
            found.append(
                list(gpu_kernels.row_statistics(flats, LONG_ROW).T)
                if whole
                else _row_statistics(_wide(flats[0][: large * LONG_ROW]), own[:large])
            )
        if large < len(own):  # a tensor without a kernel is a group of its own
            order[group[0]].append((0, len(counts[0]), len(own) - large))
            packed.append(padded_rows(flats[0][large * LONG_ROW :], LONG_ROW))
            counts[0] = np.concatenate([counts[0], own[large:]])
    if packed:
        found[0] = _row_statistics(jnp.concatenate(packed), counts[0])
    found = [columns for columns in found if columns is not None]
    index = _groups(order, np.cumsum([0, *map(len, counts)]))
    columns = [
        jnp.concatenate([*column, jnp.zeros(1, column[0].dtype)])
        for column in zip(*found, strict=True)
    ]
    sizes = np.append(np.concatenate(counts), 0)[index]
    return _join([column[index] for column in columns], jnp.asarray(sizes))


class _Alike(NamedTuple):
    """Tensors of one size and dtype.

    Attributes:
        numbers: their places among all.
        flats: the tensors themselves, flat.
        whole: whether a kernel of ours reads them together; otherwise there is only one.
    """

    numbers: list[int]
    flats: list[jax.Array]
    whole: bool


def _alike(values: Sequence[jax.Array], kernel: str) -> list[_Alike]:
    """The tensors in groups that a kernel reads together.

    Only small ones, which it reads in the time that it takes to start; and few, as the first of a group
    stays in memory until the last one is there.
    """
    groups: list[_Alike] = []
    begun: dict[Hashable, _Alike] = {}
    for number, value in enumerate(values):
        whole = value.size >= LARGE and gpu_kernels.usable(value, kernel)
        group = begun.get(form := (value.size, value.dtype))
        if group is None or len(group.numbers) == TOGETHER:
            groups.append(group := _Alike([], [], whole))
        group.numbers.append(number)
        group.flats.append(jnp.ravel(value))
        if whole and value.size < ALONE:
            begun[form] = group
    return groups


def _row_statistics(values: jax.Array, counts: np.ndarray) -> list[jax.Array]:
    """Statistics of rows of LONG_ROW values by XLA's reductions, each as it is fastest there."""
    rows = values.reshape(-1, LONG_ROW)
    shift = jnp.where(jnp.isfinite(rows[:, :1]), rows[:, :1], 0)
    return careful_statistics(rows, jnp.asarray(counts), shift)


def _groups(order: list[list[tuple[int, int, int]]], starts: np.ndarray) -> np.ndarray:
    """The rows that each returned row merges; the index after the last row is an empty row.

    Args:
        order: for each tensor its parts: (block, first row in it, rows).
        starts: where each block starts among all rows, and where the last one ends.
    """
    groups: list[np.ndarray] = []
    for parts in order:
        rows = [np.arange(first, first + count) + starts[block] for block, first, count in parts]
        missing = -sum(map(len, rows)) % JOINED
        groups.append(np.concatenate([*rows, np.full(missing, starts[-1])]).reshape(-1, JOINED))
    return np.concatenate(groups).astype(np.int32)


def _join(columns: Sequence[jax.Array], sizes: jax.Array) -> list[jax.Array]:
    """One row for each group of rows: [groups, rows] to [groups].

    The new shift is the mean of the group: deviations from it are small, so that float32 is enough.
    """
    total, squares, low, high, nan, inf, zero, shift = columns
    count = sizes.astype(total.dtype) - nan - inf
    # A row may have no finite value at all: its sums are 0 then, and must not become NaN.
    some = jnp.maximum(count, 1)
    mean = shift + total / some
    # Not squares - total**2 / some: a GPU's division is off by a bit, which equal values would show.
    # Large ones by a power of 2 smaller: their products would be infinite.
    small = jnp.where(squares > HUGE, SHRINK, 1.0).astype(total.dtype)
    part = total * small
    spread = jnp.maximum(squares * small * small * some - part * part, 0) / some / small / small
    spread = jnp.where(jnp.isnan(spread), jnp.inf, spread)  # both squares were too large
    whole = jnp.maximum(count.sum(axis=1, keepdims=True), 1)
    middle = (mean * (count / whole)).sum(axis=1, keepdims=True)
    moved = jnp.where(count > 0, mean - middle, 0)
    return [
        (count * moved).sum(axis=1),
        (spread + count * moved * moved).sum(axis=1),
        jnp.where(sizes > 0, low, jnp.inf).min(axis=1),
        jnp.where(sizes > 0, high, -jnp.inf).max(axis=1),
        nan.sum(axis=1),
        inf.sum(axis=1),
        zero.sum(axis=1),
        middle[:, 0],
    ]


def any_finite(rows: jax.Array) -> jax.Array:
    """A finite value of each row: the first, if it is finite, or the smallest; 0 if there is none."""
    low = jnp.where(jnp.isfinite(rows), rows, jnp.inf).min(axis=1, keepdims=True)
    first = rows[:, :1]
    return jnp.where(jnp.isfinite(first), first, jnp.where(jnp.isfinite(low), low, 0))


def quick_statistics(rows: jax.Array, lengths: jax.Array, shift: jax.Array) -> jax.Array:
    """Statistics of rows that hold finite values only. Padding repeats a row's first value."""
    moved = rows - shift
    return jnp.stack(
        [
            moved.sum(axis=1),
            (moved * moved).sum(axis=1),
            rows.min(axis=1),
            rows.max(axis=1),
            jnp.zeros(len(rows), rows.dtype),
            jnp.zeros(len(rows), rows.dtype),
            # Zeros are counted by arithmetic, which a CPU does faster than comparisons.
            (1 - jnp.sign(jnp.abs(rows))).sum(axis=1)
            - jnp.where(rows[:, 0] == 0, rows.shape[1] - lengths, 0).astype(rows.dtype),
            shift[:, 0],
        ],
        axis=1,
    )


def careful_statistics(rows: jax.Array, lengths: jax.Array, shift: jax.Array) -> list[jax.Array]:
    """Statistics of any rows: eight arrays with one number per row.

    Padding repeats a row's first value: only counts must exclude it.
    """
    finite = jnp.isfinite(rows)
    moved = jnp.where(finite, rows - shift, 0)
    missing = (rows.shape[1] - lengths).astype(rows.dtype)

    def count(found: jax.Array) -> jax.Array:
        return found.sum(axis=1, dtype=rows.dtype) - jnp.where(found[:, 0], missing, 0)

    return [
        moved.sum(axis=1),
        (moved * moved).sum(axis=1),
        jnp.where(finite, rows, jnp.inf).min(axis=1),
        jnp.where(finite, rows, -jnp.inf).max(axis=1),
        count(jnp.isnan(rows)),
        count(jnp.isinf(rows)),
        count(rows == 0),
        shift[:, 0],
    ]


def padded_rows(value: jax.Array, width: int) -> jax.Array:
    """A tensor as rows of `width` values, as wide floats."""
    flat = jnp.ravel(_wide(value))
    missing = -flat.size % width
    if missing:
        # The last row is padded with its first value, which is neutral after the shift.
        fill = jnp.broadcast_to(flat[flat.size - flat.size % width], (missing,))
        flat = jnp.concatenate([flat, fill])
    return flat.reshape(-1, width)


def row_width() -> int:
    """The number of values per row that the host reads on this platform."""
    return ROW if devices.platform() == "cpu" else LONG_ROW * JOINED


def row_lengths(size: int) -> np.ndarray:
    """The number of values in each row of a tensor of `size` values, without padding."""
    return _lengths(size, row_width())


def _lengths(size: int, width: int) -> np.ndarray:
    whole, rest = divmod(size, width)
    return np.array([width] * whole + [rest] * (rest > 0), np.int32)


def _wide(value: jax.Array) -> jax.Array:
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = jnp.abs(value)
    return value.astype(
        jnp.promote_types(jnp.float32, value.dtype) if _is64(value) else jnp.float32
    )


def _is64(value: jax.Array) -> bool:
    return value.dtype == jnp.float64


def merge_statistics(partial: np.ndarray, size: int) -> np.ndarray:
    """Statistics of a tensor of `size` values, from its rows: [..., rows, 8] to [...]."""
    # Make each quantity contiguous: the sums below would otherwise stride over every eighth number.
    parts = np.ascontiguousarray(np.moveaxis(partial, -1, 0)).astype(np.float64)
    total, squares, low, high, nan, inf, zero, shift = parts
    lengths = row_lengths(size).astype(np.float64)
    # All of this in float64: sums over many rows would lose digits in float32.
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


class StatsKey(tuple[tuple[Hashable, int], ...]):
    """The key of packed statistics: (key, size) of each tensor in the pack."""

    __slots__ = ()

    def parts(self) -> list[tuple[Hashable, int, slice]]:
        """Each tensor in the pack: key, size, rows."""
        found: list[tuple[Hashable, int, slice]] = []
        start = 0
        for key, size in self:
            rows = len(row_lengths(size))
            found.append((key, size, slice(start, start + rows)))
            start += rows
        return found
