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
from tailrace.taps.float_bits import (
    as_wide,
    bits_of,
    info_of,
    limits_of,
    magnitude_bits,
    ordered_bits,
    scaled_by,
)

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

BIAS = 127


def norm(value: jax.Array, whole: bool = False) -> jax.Array:
    """The Euclidean norm of all values, computed in float32; `whole`: of a sharded tensor."""
    if jnp.iscomplexobj(value):
        value = jnp.stack([value.real, value.imag])
    wide = as_wide(value)
    # Not a dot product: on a CPU it sums sequentially and is off by a percent at 10 million values.
    total = _total(wide * wide, whole)
    if devices.platform() != "cpu":  # a branch would stop a device until the host has chosen it
        return jnp.sqrt(_unfinished(total))
    fine = (total < jnp.inf) & (total >= limits_of(wide).norm)
    return lax.cond(fine, lambda: jnp.sqrt(total), lambda: _norm_at_the_ends(wide, whole))


def _norm_at_the_ends(wide: jax.Array, whole: bool) -> jax.Array:
    """The norm of values whose squares are too large or too small; of zeros; NaN if one is."""
    largest = jnp.max(magnitude_bits(wide), initial=0)
    factor = limits_of(wide).factor(lax.bitcast_convert_type(largest, wide.dtype))
    scaled, limits, info = scaled_by(wide, factor), limits_of(wide), info_of(wide)
    found = jnp.sqrt(_total(scaled * scaled, whole))
    small = jnp.rint(found / (limits.up * float(info.smallest_subnormal))).astype(largest.dtype)
    subnormal = (factor == limits.up) & (found < limits.up * float(info.tiny))
    return jnp.where(subnormal, lax.bitcast_convert_type(small, wide.dtype), found / factor)


def all_finite(values: Sequence[jax.Array]) -> jax.Array:
    """Whether all values of several tensors are finite.

    Zero times a value is zero, or NaN if the value is not finite, and summing that is the fastest test:
    on a CPU as a matrix product, which its libraries do best.
    """
    if devices.platform() == "cpu":
        zero = sum(_zero_or_nan(jnp.ravel(as_wide(value))) for value in values)
    else:
        parts: list[jax.Array] = []
        for _, flats, whole in _alike(values, gpu_kernels.FINITENESS):
            if whole:
                parts.append(gpu_kernels.row_zeros(flats))
                continue
            zeros = as_wide(flats[0]) * 0
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


def _total(value: jax.Array, whole: bool) -> jax.Array:
    """The sum of all values; `whole`: of a sharded tensor, which must not be flattened.

    On a CPU, XLA reduces to a scalar one value at a time, on one core. Eight parallel sums take a
    third of the time.
    """
    if whole or devices.platform() != "cpu" or value.size < SHORT:
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


def bins_of(flat: jax.Array) -> jax.Array:
    """The bin of each value, from its bits: rounding to float32 could be to the next power of two."""
    if jnp.issubdtype(flat.dtype, jnp.integer) and flat.dtype.itemsize >= 4:
        unsigned = jnp.abs(flat).astype(jnp.dtype(f"uint{8 * flat.dtype.itemsize}"))
        exponent = BIAS + 8 * flat.dtype.itemsize - 1 - lax.clz(unsigned).astype(jnp.int32)
        return jnp.where(unsigned == 0, ZERO_BIN, exponent)
    wide = as_wide(flat)
    info, bits = info_of(wide), magnitude_bits(wide)
    exponent = bits >> info.nmant
    if info.bits == 64:  # exponents that float32 has not are counted at its ends
        exponent = jnp.clip(exponent - (info.maxexp - 1) + BIAS, SUBNORMAL, INF_BIN - 1)
    infinity = ((1 << info.nexp) - 1) << info.nmant
    index = jnp.where(bits == infinity, INF_BIN, jnp.where(bits > infinity, NAN_BIN, exponent))
    return jnp.where(bits == 0, ZERO_BIN, index).astype(jnp.int32)


def _scattered(flat: jax.Array) -> jax.Array:
    index = bins_of(flat)
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
    quick = quick_statistics(rows, lengths, jnp.where(jnp.isfinite(first), first, 0))
    return lax.cond(
        _ordinary(quick, lengths), lambda: quick, lambda: exact_statistics(rows, lengths)
    )


def _ordinary(quick: jax.Array, lengths: jax.Array) -> jax.Array:
    """Whether all rows are finite, and none has lost squares.

    On a CPU, testing each value costs more than everything else together. A finite sum of squares
    proves that all values are finite; of rows with a small one, the extremes tell whether it is right.
    """
    squares, low, high, zeros = quick[:, 1], quick[:, 2], quick[:, 3], quick[:, 6]
    limits, tiny = limits_of(quick), float(info_of(quick).tiny)
    size = jnp.maximum(jnp.abs(low), jnp.abs(high))
    # Subnormal numbers are equal to each other and to zero here, so their rows are not equal by that.
    right = (zeros == lengths.astype(zeros.dtype)) | ((low == high) & (size >= tiny))
    small = (squares < limits.tiny) & (size < limits.small) & ~right
    return ((squares < jnp.inf) & ~small).all()


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
                else _row_statistics(as_wide(flats[0][: large * LONG_ROW]), own[:large])
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
    low, high = jnp.where(sizes > 0, low, jnp.inf), jnp.where(sizes > 0, high, -jnp.inf)
    least, most = low.min(axis=1), high.max(axis=1)
    # In the scale of the group: products of its sums are then finite, and those of small rows vanish.
    factor = limits_of(total).factor(largest_size(least, most))[:, None]
    ratio = factor / _factors(squares, low, high)
    total, squares, shift = total * ratio, jnp.abs(squares) * ratio * ratio, shift * factor
    # A row may have no finite value at all: its sums are 0 then, and must not become NaN.
    some = jnp.maximum(count, 1)
    mean = shift + total / some
    # Not squares - total**2 / some: a GPU's division is off by a bit, which equal values would show.
    spread = jnp.maximum(squares * some - total * total, 0) / some
    spread = jnp.where(jnp.isnan(spread), jnp.inf, spread)  # XLA's sums of a row were infinite
    whole = jnp.maximum(count.sum(axis=1, keepdims=True), 1)
    middle = (mean * (count / whole)).sum(axis=1, keepdims=True)
    moved = jnp.where(count > 0, mean - middle, 0)
    squares = (spread + count * moved * moved).sum(axis=1)
    return [
        (count * moved).sum(axis=1),
        jnp.where(factor[:, 0] == 1, squares, -squares),
        least,
        most,
        nan.sum(axis=1),
        inf.sum(axis=1),
        zero.sum(axis=1),
        (middle / factor)[:, 0],
    ]


def largest_size(low: jax.Array, high: jax.Array) -> jax.Array:
    """The largest magnitude between two extremes; 0 if there are no values."""
    return jnp.where(low <= high, jnp.maximum(jnp.abs(low), jnp.abs(high)), 0)


def _factors(squares: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """What rows were multiplied by."""
    limits = limits_of(squares)
    scaled = jnp.where(largest_size(low, high) < 1, limits.up, limits.down)
    return jnp.where(squares < 0, scaled, 1.0).astype(squares.dtype)


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
            _zeros(rows, lengths),
            shift[:, 0],
        ],
        axis=1,
    )


def _zeros(rows: jax.Array, lengths: jax.Array) -> jax.Array:
    """The number of zeros in each row, without its padding; subnormal numbers are not zero."""
    size = magnitude_bits(rows)
    # Not size == 0: LLVM would compare floats instead, and a CPU that takes subnormal numbers for zero.
    most = jnp.iinfo(size.dtype)
    other = lax.shift_right_logical(size + most.max, jnp.full_like(size, most.bits - 1))
    return lengths.astype(rows.dtype) - _without_padding(other == 1, lengths, rows.dtype)


def exact_statistics(rows: jax.Array, lengths: jax.Array) -> jax.Array:
    """Statistics of rows of any values, over the whole range of their format; on a CPU."""
    finite = jnp.isfinite(rows)
    order, far = ordered_bits(bits_of(rows)), bits_of(jnp.asarray(jnp.inf, rows.dtype))
    low = jnp.where(finite, order, far).min(axis=1, keepdims=True)
    high = jnp.where(finite, order, ordered_bits(bits_of(jnp.asarray(-jnp.inf, rows.dtype)))).max(
        axis=1, keepdims=True
    )
    low, high = (lax.bitcast_convert_type(ordered_bits(end), rows.dtype) for end in (low, high))
    # A finite value of each row: the first, or the smallest; 0 if there is none.
    shift = jnp.where(finite[:, :1], rows[:, :1], jnp.where(jnp.isfinite(low), low, 0))
    factor = limits_of(rows).factor(largest_size(low, high))
    moved = jnp.where(finite, scaled_by(rows, factor) - scaled_by(shift, factor), 0)
    squares = (moved * moved).sum(axis=1)
    return jnp.stack(
        [
            moved.sum(axis=1),
            jnp.where(factor[:, 0] == 1, squares, -squares),
            low[:, 0],
            high[:, 0],
            *_strange(rows, lengths),
            _zeros(rows, lengths),
            shift[:, 0],
        ],
        axis=1,
    )


def careful_statistics(rows: jax.Array, lengths: jax.Array, shift: jax.Array) -> list[jax.Array]:
    """Statistics of any rows, by XLA on an accelerator: eight arrays with one number per row.

    Each reduction reads the rows as they are: the largest value is not known yet, so nothing is scaled.
    Padding repeats a row's first value: only counts must exclude it.
    """
    finite = jnp.isfinite(rows)
    moved = jnp.where(finite, rows - shift, 0)
    return [
        moved.sum(axis=1),
        (moved * moved).sum(axis=1),
        jnp.where(finite, rows, jnp.inf).min(axis=1),
        jnp.where(finite, rows, -jnp.inf).max(axis=1),
        *_strange(rows, lengths),
        _without_padding(rows == 0, lengths, rows.dtype),
        shift[:, 0],
    ]


def _strange(rows: jax.Array, lengths: jax.Array) -> list[jax.Array]:
    """The numbers of NaN and of Inf in each row."""
    return [_without_padding(test(rows), lengths, rows.dtype) for test in (jnp.isnan, jnp.isinf)]


def _without_padding(found: jax.Array, lengths: jax.Array, dtype: Any) -> jax.Array:
    missing = (found.shape[1] - lengths).astype(dtype)
    return found.sum(axis=1, dtype=dtype) - jnp.where(found[:, 0], missing, 0)


def padded_rows(value: jax.Array, width: int) -> jax.Array:
    """A tensor as rows of `width` values, as wide floats."""
    flat = jnp.ravel(as_wide(value))
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


class StatsKey(tuple[tuple[Any, ...], ...]):
    """The key of packed statistics: (key, size) of each tensor; of sharded ones (key, size, rows)."""

    __slots__ = ()

    def parts(self) -> list[tuple[Hashable, int, slice]]:
        """Each tensor in the pack: key, size, rows."""
        found: list[tuple[Hashable, int, slice]] = []
        start = 0
        for key, size, *rows in self:
            end = start + (rows[0] if rows else len(row_lengths(size)))
            found.append((key, size, slice(start, end)))
            start = end
        return found
