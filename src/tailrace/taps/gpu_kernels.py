"""Kernels for a GPU that read a large tensor once: its statistics, and its histogram.

XLA makes several kernels of the seven reductions of a tensor's statistics, and each reads the tensor.
124 million float32 values on an H200: 0.40 ms, against 0.18 ms here (Pallas, compiled by Triton), where
reading alone takes 0.14. For a single reduction it does not pay: XLA computes a gradient inside the
test for finiteness, and a kernel must have it written to memory first (GPT-2 small: 0.25 ms a step).
A histogram by XLA is a scatter into thousands of copies, which are then added: 39 million bfloat16
values take 0.32 ms, against 0.17 here.

`usable` tells which tensors they can read. Other tensors, platforms, and versions of JAX in which one
does not compile, have the reductions of `reductions`.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tailrace.devices import devices
from tailrace.feeds.background import Worker
from tailrace.messages import note_once

COLUMNS = 8
"""Numbers per row: sums of values and of squares, min, max, counts of NaN, Inf and 0, and the shift."""

WARPS = 4
"""Warps of a program; 8 take 1 to 1.3 times as long (H200, rows of 2048 to 8192)."""

MOST = 1 << 31
"""Values of a tensor: indices are 32-bit integers."""

STATISTICS, HISTOGRAM = "statistics", "histogram"
"""The names of the kernels."""

WIDTH = 4096
"""Values per row of a histogram; a count of 4096 fits into 16 bits."""

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


def row_statistics(flats: Sequence[jax.Array], width: int) -> Any:
    """Partial statistics of flat tensors: [rows, COLUMNS], one row for each `width` values.

    Args:
        flats: tensors of one size and dtype; the end of one need not fill a row.
        width: a power of 2.
    """
    return _by_rows(_statistics, flats, width, COLUMNS, jnp.float32, "tailrace_statistics")


def histogram(flat: jax.Array, bins: int) -> jax.Array:
    """Counts of a flat tensor by binary exponent, as `reductions.histogram` has them."""
    rows = _by_rows(_histogram, [flat], WIDTH, ROOM, jnp.int32, "tailrace_histogram")
    counts = rows.sum(axis=0, dtype=jnp.int32)
    return jnp.concatenate([counts[: bins - 1][::-1], counts[ZEROS : ZEROS + 1]])


def _by_rows(
    kernel: Any, flats: Sequence[jax.Array], width: int, columns: int, dtype: Any, name: str
) -> jax.Array:
    """What a kernel leaves of each `width` values of flat tensors: [rows, columns]."""
    (size,) = {flat.size for flat in flats}
    each = -(-size // width)
    rows = each * len(flats)
    pallas = _pallas()

    def run(*refs: Any) -> None:
        program = pallas.program_id(0)
        row = _row_of(refs[:-1], program // each, program % each * width, width, size)
        found = kernel(*row, all_full=size % width == 0)
        _triton().store(refs[-1].at[pallas.ds(program * columns, columns)], found)

    # One program for each row; each sees the whole tensors and the whole result. Blocks that are cut by
    # Pallas must divide the tensor; the end of the last row is masked.
    return pallas.pallas_call(
        run,
        grid=(rows,),
        in_specs=[pallas.BlockSpec(flat.shape, lambda _: (0,)) for flat in flats],
        out_specs=pallas.BlockSpec((rows * columns,), lambda _: (0,)),
        out_shape=jax.ShapeDtypeStruct((rows * columns,), dtype),
        compiler_params=_triton().CompilerParams(num_warps=WARPS),
        interpret=INTERPRET,
        name=name,
    )(*flats).reshape(rows, columns)


def _row_of(
    tensors: Sequence[Any], which: Any, start: Any, width: int, size: int
) -> tuple[Any, Any]:
    """Which values of a row of one tensor exist, and the row in float32; 0 where it has ended."""
    there = lax.broadcasted_iota(jnp.int32, (width,), 0) < size - start

    def load(tensor: Any) -> Any:
        row = _triton().load(tensor.at[_pallas().ds(start, width)], mask=there, other=0)
        return row.astype(jnp.float32)

    if len(tensors) == 1:
        return there, load(tensors[0])
    return there, lax.switch(which, [functools.partial(load, one) for one in tensors])


# -- the kernels ----------------------------------------------------------------------------------


def _statistics(there: Any, wide: Any, all_full: bool) -> Any:
    inside = None if all_full else there

    def quick() -> tuple[Any, ...]:
        moments = _moments(wide, inside)
        none = moments[-1] * 0  # a branch cannot return a constant
        return *moments, none, none, _count(_only(wide == 0, inside, False))

    def careful() -> tuple[Any, ...]:
        size_of = jnp.abs(wide)
        moments = _moments(wide, (size_of < jnp.inf) & there)
        special = (wide != wide, size_of == jnp.inf, (wide == 0) & there)
        return *moments, *map(_count, special)

    # The kernel is bound by arithmetic. A finite sum proves that all values are finite, and then
    # there is half of it to do.
    *numbers, nan, inf, zero = lax.cond(jnp.abs(_sum(wide)) < jnp.inf, quick, careful)
    numbers = [*numbers[:4], nan, inf, zero, numbers[4]]
    # A block cannot be built from numbers, but chosen: lane k takes number k.
    lane, row = lax.broadcasted_iota(jnp.int32, (COLUMNS,), 0), jnp.zeros(COLUMNS, jnp.float32)
    for place, number in enumerate(numbers):
        row = jnp.where(lane == place, number, row)
    return row


def _moments(wide: Any, valid: Any) -> tuple[Any, ...]:
    """Of the valid values: sums of distances and of their squares, min, max, and the shift.

    Distances to the mean of the row, which is in registers: then float32 is enough, whatever the mean.
    """
    low, high = jnp.min(_only(wide, valid, jnp.inf)), jnp.max(_only(wide, valid, -jnp.inf))
    count = jnp.float32(wide.size) if valid is None else _count(valid)
    # Of quotients: the sum of 4096 values above 1e35 is infinite.
    mean = _sum(_only(wide, valid, 0.0) * (1.0 / jnp.maximum(count, 1.0)))
    # A mean is rounded, and equal values would seem to differ from it.
    shift = jnp.where(low == high, low, mean)
    away = _only(wide - shift, valid, 0.0)
    return _sum(away), _sum(away * away), low, high, shift


def _only(row: Any, valid: Any, other: Any) -> Any:
    """A row with another value where it is not valid; without a mask, all of it is."""
    return row if valid is None else jnp.where(valid, row, other)


def _histogram(there: Any, wide: Any, all_full: bool) -> Any:
    bits = lax.bitcast_convert_type(wide, jnp.int32) & 0x7FFFFFFF
    infinity = 0xFF << 23
    # The bin of each value; -1 for those that are counted already.
    bins = jnp.where(bits > infinity, 256, bits >> 23)
    bins = jnp.where(bits == 0, -1, bins)
    lane = lax.broadcasted_iota(jnp.int32, (ROOM,), 0)
    zeros = _sum_int(_only(bits == 0, None if all_full else there, False))

    def window(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Count the values in the `WINDOW` bins from `top` down."""
        top, bins, row = state
        below = top - bins
        pair_of = jnp.where(bins >= 0, below >> 1, -1)
        # Two counts in one number: half as many sums. A row has fewer than 2^16 values.
        amount = jnp.left_shift(jnp.int32(1), (below & 1) << 4)
        place = lane - (256 - top)
        counted = jnp.zeros_like(row)
        for pair in range(WINDOW // 2):
            both = _sum_int(jnp.where(pair_of == pair, amount, 0))
            counted = jnp.where(place >> 1 == pair, both, counted)
        counted = jnp.where((place & 1) == 1, counted >> 16, counted & 0xFFFF)
        bins = jnp.where(below < WINDOW, -1, bins)
        return jnp.max(bins), bins, row + counted

    # Nearly always one window is enough: few values are 2^-32 of the largest of their row.
    row = jnp.where(lane == ZEROS, zeros, 0)
    state = (jnp.max(bins), bins, row)
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
    # Rows that are not full. Statistics of finite values alone are computed in another way, and far
    # exponents are counted in two windows.
    strange = np.array([3, np.nan, 0, -np.inf, 6, 3], np.float32)
    far = np.array([5, 1e-30], np.float32)
    cases = {STATISTICS: (strange, strange[[0, 2, 4]]), HISTOGRAM: (strange, far)}
    for values in cases[kernel]:
        flat = jax.device_put(values, _own_device())
        if kernel == STATISTICS:
            # The last of three tensors, of which the others are larger by 1.
            found = jax.jit(lambda x: row_statistics([x + 1, x + 1, x], 16)[2])(flat)
            strays = [int(np.isnan(values).sum()), int(np.isinf(values).sum())]
            right = np.array([0, 18, 0, 6, *strays, 1, 3])
        else:
            found, bits = jax.jit(lambda x: histogram(x, 258))(flat), np.abs(values).view(np.int32)
            bins = np.where(np.isnan(values), 256, np.where(bits == 0, 257, bits >> 23))
            right = np.bincount(bins, minlength=258)
        if not np.array_equal(found, right):
            return f"wrong results: {np.asarray(found).tolist()}"
    return ""
