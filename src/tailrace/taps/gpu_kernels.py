"""Kernels for a GPU, each for large tensors: their statistics, histograms, and finiteness.

XLA makes several kernels of the seven reductions of a tensor's statistics, and each reads the tensor.
Its histogram is a scatter into thousands of copies, which are then added: 39 million bfloat16 values on
an H200 take 0.32 ms, against 0.17 here (Pallas, compiled by Triton). It tests gradients for finiteness
in the kernels of the optimizer, which then take longer.

`usable` tells which tensors they can read. Other tensors, platforms, and versions of JAX in which one
does not compile, have the reductions of `reductions`.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tailrace.base.messages import note_once
from tailrace.devices import devices
from tailrace.feeds.background import Worker
from tailrace.taps.float_bits import LIMITS

COLUMNS = 8
"""Numbers per row: sums of values and of squares, min, max, counts of NaN, Inf and 0, and the shift."""

WARPS, NARROW_WARPS = 4, 2
"""Warps of a program; and for statistics of 16-bit values, of which more fit into a thread's registers.

50 million bfloat16 values in rows of 4096 on an H200: 28.1 us with 2, 30.7 with 4; 8 take 1 to 1.3
times as long."""

MOST = 1 << 31
"""Values of a tensor: indices are 32-bit integers."""

STATISTICS, HISTOGRAM, FINITENESS = "statistics", "histogram", "finiteness"
"""The names of the kernels."""

PARTS = 4
"""The parts in which a row is read that is not plain; they need fewer registers than a whole row."""

EACH_PART = np.int32(0), np.int32(PARTS)
"""The bounds of a loop over them: 32 bits wide, also with 64-bit numbers enabled."""

SPREAD = 0.125
"""The least ratio of a row's variance to its mean square at which plain sums are accurate enough.

Below it they lose more than 3 of their 24 bits, and the row is read again."""


WIDTH = 4096
"""Values per row of a histogram, whose counts must fit into 16 bits, and of a test for finiteness."""

WINDOW, ROOM, ZEROS = 32, 512, 320
"""Exponents that are counted at a time; columns of a row of counts; the column of zeros.

Column 256 - k has the count of bin k, so that a window of falling exponents is a slice."""

PROBE_S = 120.0
"""Seconds within which a first, small kernel must be compiled; otherwise it is not used."""

INTERPRET = False
"""Whether the kernel runs without a GPU, in Python; for tests."""


def usable(value: Any, kernel: str = STATISTICS) -> bool:
    """Whether a kernel can read this tensor."""
    if value.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or value.size >= MOST:
        return False
    return INTERPRET or (devices.platform() == "gpu" and compiles(kernel))


def row_statistics(flats: Sequence[jax.Array], width: int) -> jax.Array:
    """Partial statistics of flat tensors: [rows, COLUMNS], one row for each `width` values.

    Args:
        flats: tensors of one size and dtype; the end of one need not fill a row.
        width: a power of 2.
    """
    warps = NARROW_WARPS if flats[0].dtype.itemsize == 2 else WARPS
    return _by_rows(_statistics, flats, width, COLUMNS, jnp.float32, STATISTICS, warps)


def histograms(flats: Sequence[jax.Array], bins: int) -> list[jax.Array]:
    """Counts of flat tensors by binary exponent, as `reductions.histogram` has them."""
    rows = _by_rows(_histogram, flats, WIDTH, ROOM, jnp.int32, HISTOGRAM)
    counts = rows.reshape(len(flats), -1, ROOM).sum(axis=1, dtype=jnp.int32)
    found = jnp.concatenate([counts[:, : bins - 1][:, ::-1], counts[:, ZEROS : ZEROS + 1]], axis=1)
    # Without a barrier XLA sums the rows of each tensor in a kernel of its own.
    return list(lax.optimization_barrier(found))


def row_zeros(flats: Sequence[jax.Array]) -> jax.Array:
    """One number for each row of flat tensors: 0 if all of its values are finite, else NaN."""
    return _by_rows(_zero, flats, WIDTH, 1, jnp.float32, FINITENESS).reshape(-1)


class _Row:
    """A row of one of several tensors, inside a kernel."""

    def __init__(self, tensors: Sequence[Any], number: Any, width: int, size: int) -> None:
        each = -(-size // width)  # the rows of a tensor
        self._tensors, self._which = tensors, number // each
        self._start, self._size = number % each * width, size
        self.width = width
        self.full = size % width == 0  # all rows are
        self.count = jnp.minimum(size - self._start, width).astype(jnp.float32)

    def whole(self) -> tuple[Any, Any]:
        """Which values exist, None if all; and the row, 0 where it has ended."""
        return self._read(self._start, self.width)

    def part(self, number: Any) -> tuple[Any, Any]:
        """The same of one of `PARTS`."""
        width = self.width // PARTS
        return self._read(self._start + number * width, width)

    def _read(self, start: Any, width: int) -> tuple[Any, Any]:
        there = lax.broadcasted_iota(jnp.int32, (width,), 0) < self._size - start

        def load(tensor: Any) -> Any:
            return _triton().load(tensor.at[_pallas().ds(start, width)], mask=there, other=0)

        loads = [functools.partial(load, one) for one in self._tensors]
        values = loads[0]() if len(loads) == 1 else lax.switch(self._which, loads)
        return None if self.full else there, values


def _by_rows(
    kernel: Callable[[_Row], Any],
    flats: Sequence[jax.Array],
    width: int,
    columns: int,
    dtype: Any,
    name: str,
    warps: int = WARPS,
) -> jax.Array:
    """What a kernel leaves of each `width` values of flat tensors: [rows, columns]."""
    (size,) = {flat.size for flat in flats}
    rows = -(-size // width) * len(flats)
    pallas = _pallas()

    def run(*refs: Any) -> None:
        program = pallas.program_id(0)
        found = jnp.broadcast_to(kernel(_Row(refs[:-1], program, width, size)), (columns,))
        _triton().store(refs[-1].at[pallas.ds(program * columns, columns)], found)

    # One program for each row; each sees the whole tensors and the whole result. Blocks that are cut by
    # Pallas must divide the tensor; the end of the last row is masked.
    return pallas.pallas_call(
        run,
        grid=(rows,),
        in_specs=[pallas.BlockSpec(flat.shape, lambda _: (0,)) for flat in flats],
        out_specs=pallas.BlockSpec((rows * columns,), lambda _: (0,)),
        out_shape=jax.ShapeDtypeStruct((rows * columns,), dtype),
        compiler_params=_triton().CompilerParams(num_warps=warps),
        interpret=INTERPRET,
        name=f"tailrace_{name}",
    )(*flats).reshape(rows, columns)


# -- the kernels ----------------------------------------------------------------------------------


def _zero(row: _Row) -> Any:
    return _sum(row.whole()[1].astype(jnp.float32) * 0)


def _statistics(row: _Row) -> Any:
    there, values = row.whole()
    wide = values.astype(jnp.float32)
    total, squares = _sum(wide), _sum(wide * wide)
    # Not of the wide ones: a GPU compares two of 16 bits at once.
    low = jnp.min(_only(values, there, jnp.inf)).astype(jnp.float32)
    high = jnp.max(_only(values, there, -jnp.inf)).astype(jnp.float32)
    zero = _count(_only(wide == 0, there, False))
    none = total * 0  # a branch cannot return a constant
    # A finite sum of squares proves that all values are finite, and nearly always it is also enough
    # for their variance. Whatever else such a row needs would be registers that all rows wait for.
    spread = total * (total / row.count) <= squares * (1 - SPREAD)
    right = (squares >= LIMITS[4].tiny) | (zero == row.count)
    numbers = lax.cond(
        (squares < jnp.inf) & spread & right,
        lambda: (total, squares, low, high, none, none, zero, none),
        lambda: _careful(row),
    )
    # A block cannot be built from numbers, but chosen: lane k takes number k.
    lane, found = lax.broadcasted_iota(jnp.int32, (COLUMNS,), 0), jnp.zeros(COLUMNS, jnp.float32)
    for place, number in enumerate(numbers):
        found = jnp.where(lane == place, number, found)
    return found


def _careful(row: _Row) -> tuple[Any, ...]:
    """Statistics of a row with values that are not finite, are large, or differ by little.

    Sums are of distances to the mean, and of their squares: then float32 is enough, whatever the mean.
    If squares leave its range, both are of scaled values, and the sum of squares is negative.
    """

    def first(number: Any, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """Count, mean, least and largest of the finite values; counts of NaN, Inf and zeros."""
        there, values = row.part(number)
        wide = values.astype(jnp.float32)
        size_of = jnp.abs(wide)
        finite = _only(size_of < jnp.inf, there, False)
        count, mean, low, high, nan, inf, zero = found
        return (
            count + _count(finite),
            # Of quotients: the sum of 4096 values above 1e35 is infinite.
            mean + _sum(jnp.where(finite, wide, 0.0) * (1.0 / row.width)),
            jnp.minimum(low, jnp.min(jnp.where(finite, wide, jnp.inf))),
            jnp.maximum(high, jnp.max(jnp.where(finite, wide, -jnp.inf))),
            nan + _count(wide != wide),
            inf + _count(size_of == jnp.inf),
            zero + _count(_only(wide == 0, there, False)),
        )

    none = row.count * 0  # a kernel cannot contain arrays
    far = none + jnp.inf
    begin = (none, none, far, -far, none, none, none)
    count, mean, low, high, nan, inf, zero = lax.fori_loop(*EACH_PART, first, begin)
    # A mean is rounded, and equal values would seem to differ from it.
    shift = jnp.where(low == high, low, mean * (row.width / jnp.maximum(count, 1.0)))
    size = jnp.where(count > 0, jnp.maximum(jnp.abs(low), jnp.abs(high)), 0.0)
    factor = LIMITS[4].factor(size)
    middle = shift * factor

    def second(number: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
        there, values = row.part(number)
        wide = values.astype(jnp.float32)
        finite = _only(jnp.abs(wide) < jnp.inf, there, False)
        away = jnp.where(finite, wide * factor - middle, 0.0)
        return found[0] + _sum(away), found[1] + _sum(away * away)

    total, squares = lax.fori_loop(*EACH_PART, second, (none, none))
    squares = jnp.where(factor == 1.0, squares, -squares)
    return total, squares, low, high, nan, inf, zero, shift


def _only(row: Any, valid: Any, other: Any) -> Any:
    """A row with another value where it is not valid; without a mask, all of it is."""
    return row if valid is None else jnp.where(valid, row, other)


def _histogram(row: _Row) -> Any:
    there, values = row.whole()
    bits = lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    infinity = 0xFF << 23
    # The bin of each value; -1 for those that are counted already.
    bins = jnp.where(bits > infinity, 256, bits >> 23)
    bins = jnp.where(bits == 0, -1, bins)
    lane = lax.broadcasted_iota(jnp.int32, (ROOM,), 0)
    zeros = _sum_int(_only(bits == 0, there, False))

    def window(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Count the values in the `WINDOW` bins from `top` down."""
        top, bins, counts = state
        below = top - bins
        pair_of = jnp.where(bins >= 0, below >> 1, -1)
        # Two counts in one number: half as many sums. A row has fewer than 2^16 values.
        amount = jnp.left_shift(jnp.int32(1), (below & 1) << 4)
        place = lane - (256 - top)
        counted = jnp.zeros_like(counts)
        for pair in range(WINDOW // 2):
            both = _sum_int(jnp.where(pair_of == pair, amount, 0))
            counted = jnp.where(place >> 1 == pair, both, counted)
        counted = jnp.where((place & 1) == 1, counted >> 16, counted & 0xFFFF)
        bins = jnp.where(below < WINDOW, -1, bins)
        return jnp.max(bins), bins, counts + counted

    # Nearly always one window is enough: few values are 2^-32 of the largest of their row.
    state = (jnp.max(bins), bins, jnp.where(lane == ZEROS, zeros, 0))
    return lax.while_loop(lambda state: state[0] >= 0, window, state)[2]


def _sum(row: Any) -> Any:
    """The sum of a row, whose threads add their values and then each other's."""
    # An interpreter on a CPU would add one value after the other, and lose digits that a GPU keeps.
    return jnp.sum(row.reshape(WARPS, -1).sum(axis=1)) if INTERPRET else jnp.sum(row)


def _sum_int(row: Any) -> Any:
    return jnp.sum(row, dtype=jnp.int32)  # also with 64-bit numbers enabled


def _count(found: Any) -> Any:
    # In float32: 4096 and more are exact, and sums of integers are not faster.
    return jnp.sum(found.astype(jnp.float32))


# -- Pallas ---------------------------------------------------------------------------------------


def _pallas() -> Any:
    from jax.experimental import pallas  # late: only a GPU needs it

    return pallas


def _triton() -> Any:
    from jax.experimental.pallas import triton

    return triton


def _own_device() -> Any:
    own = jax.process_index()
    return next(device for device in devices.available() if device.process_index == own)


@functools.cache
def compiles(kernel: str = STATISTICS) -> bool:
    """Whether a small kernel compiles and is right: Pallas is not a stable interface."""
    # In a thread: this one is tracing a program, of which the kernel would become a part.
    worker = Worker("tailrace-kernels")
    try:
        reason = worker.submit(_defect, kernel).result(PROBE_S)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        worker.stop(0)
    if reason:
        note_once(
            f"XLA's operations compute the {kernel} of large tensors, and read them several times: "
            f"Tailrace's kernel cannot be used with this JAX and GPU ({reason})."
        )
    return not reason


def _defect(kernel: str) -> str:
    """What is wrong with a kernel; empty if it is right."""
    # Rows that are not full, of the last of three tensors. Statistics of plain values are computed in
    # another way than others, and far exponents are counted in two windows.
    strange = np.array([3, np.nan, 0, -np.inf, 6, 3], np.float32)
    plain, far = np.array([3, 0, 6], np.float32), np.array([5, 2.0**-100], np.float32)
    runs: dict[str, Callable[[Sequence[jax.Array]], Any]] = {
        STATISTICS: lambda flats: row_statistics(flats, 16)[2],
        HISTOGRAM: lambda flats: histograms(flats, 258)[2],
        FINITENESS: row_zeros,
    }
    rights = {
        STATISTICS: [(strange, [0, 18, 0, 6, 1, 1, 1, 3]), (plain, [9, 45, 0, 6, 0, 0, 1, 0])],
        HISTOGRAM: [(one, _counts(one)) for one in (strange, far)],
        FINITENESS: [(strange, [0, 0, np.nan]), (plain, [0, 0, 0])],
    }
    run = jax.jit(lambda x: runs[kernel]([jnp.ones_like(x), jnp.ones_like(x), x]))
    for (values, right), dtype in itertools.product(rights[kernel], (jnp.float32, jnp.bfloat16)):
        found = run(jax.device_put(values.astype(dtype), _own_device()))
        if not np.array_equal(found, right, equal_nan=True):
            return f"wrong results in {np.dtype(dtype).name}: {np.asarray(found).tolist()}"
    return ""


def _counts(values: np.ndarray) -> np.ndarray:
    """A histogram, by NumPy."""
    bits = np.abs(values).view(np.int32)
    bins = np.where(np.isnan(values), 256, np.where(bits == 0, 257, bits >> 23))
    return np.bincount(bins, minlength=258)
