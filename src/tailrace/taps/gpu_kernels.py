"""A kernel for a GPU that reads a large tensor once and leaves its statistics.

XLA makes several kernels of the seven reductions of a tensor's statistics, and each reads the tensor.
124 million float32 values on an H200: 0.40 ms, against 0.18 ms here (Pallas, compiled by Triton), where
reading alone takes 0.14. For a single reduction it does not pay: XLA computes a gradient inside the
test for finiteness, and a kernel must have it written to memory first (GPT-2 small: 0.25 ms a step).

`usable` tells which tensors it can read. Other tensors, platforms, and versions of JAX in which it does
not compile, have the reductions of `reductions`.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
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

PROBE_S = 120.0
"""Seconds within which a first, small kernel must be compiled; otherwise it is not used."""

INTERPRET = False
"""Whether the kernel runs without a GPU, in Python; for tests."""


def usable(value: Any) -> bool:
    """Whether the kernel can read this tensor."""
    if value.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or value.size >= MOST:
        return False
    return INTERPRET or (devices.platform() == "gpu" and compiles())


def row_statistics(flat: jax.Array, width: int) -> Any:
    """Partial statistics of a flat tensor: [rows, COLUMNS], one row for each `width` values.

    Args:
        flat: the tensor; its end need not fill a row.
        width: a power of 2.
    """
    rows = -(-flat.size // width)
    pallas = _pallas()
    # One program for each row; each sees the whole tensor and the whole result. Blocks that are cut by
    # Pallas must divide the tensor; the kernel masks the end of the last row itself.
    return pallas.pallas_call(
        functools.partial(_statistics, width=width, size=flat.size),
        grid=(rows,),
        in_specs=[pallas.BlockSpec(flat.shape, lambda _: (0,))],
        out_specs=pallas.BlockSpec((rows * COLUMNS,), lambda _: (0,)),
        out_shape=jax.ShapeDtypeStruct((rows * COLUMNS,), jnp.float32),
        compiler_params=_triton().CompilerParams(num_warps=WARPS),
        interpret=INTERPRET,
        name="tailrace_statistics",
    )(flat).reshape(rows, COLUMNS)


# -- the kernel ---------------------------------------------------------------------------------


def _statistics(values: Any, found: Any, *, width: int, size: int) -> None:
    triton, slice_of, program = _triton(), _pallas().ds, _pallas().program_id(0)
    start = program * width
    there = lax.broadcasted_iota(jnp.int32, (width,), 0) < size - start
    wide = triton.load(values.at[slice_of(start, width)], mask=there, other=0).astype(jnp.float32)
    first = triton.load(values.at[start]).astype(jnp.float32)
    # As in `careful_statistics`: sums of distances to a value of the row, so that float32 is enough.
    shift = jnp.where(jnp.abs(first) < jnp.inf, first, 0.0)
    size_of = jnp.abs(wide)
    finite = (size_of < jnp.inf) & there
    moved = jnp.where(finite, wide - shift, 0.0)
    numbers = [
        jnp.sum(moved),
        jnp.sum(moved * moved),
        jnp.min(jnp.where(finite, wide, jnp.inf)),
        jnp.max(jnp.where(finite, wide, -jnp.inf)),
        _count(wide != wide),
        _count(size_of == jnp.inf),
        _count((wide == 0) & there),
        shift,
    ]
    # A block cannot be built from numbers, but chosen: lane k takes number k.
    lane, row = lax.broadcasted_iota(jnp.int32, (COLUMNS,), 0), jnp.zeros(COLUMNS, jnp.float32)
    for place, number in enumerate(numbers):
        row = jnp.where(lane == place, number, row)
    triton.store(found.at[slice_of(program * COLUMNS, COLUMNS)], row)


def _count(found: Any) -> Any:
    # In float32: 4096 and more are exact, and sums of integers are not faster.
    return jnp.sum(jnp.where(found, 1.0, 0.0))


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
def compiles() -> bool:
    """Whether a small kernel compiles and is right: Pallas is not a stable interface."""
    # In a thread: this one is tracing a program, of which the kernel would become a part.
    worker = Worker("tailrace-kernels")
    try:
        reason = worker.submit(_defect).result(PROBE_S)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        worker.stop(0)
    if reason:
        note_once(
            f"Statistics of large tensors are computed by XLA's reductions, which read them several "
            f"times: Tailrace's kernel cannot be used with this JAX and GPU ({reason})."
        )
    return not reason


def _defect() -> str:
    """What is wrong with the kernel; empty if it is right."""
    # Every case in one row: a shift, a NaN, an infinity, a zero, and a tensor that does not fill it.
    flat = jax.device_put(np.array([3, np.nan, 0, -np.inf, 5], np.float32), _own_device())
    row = np.asarray(jax.jit(lambda x: row_statistics(x, 16))(flat))[0].tolist()
    return "" if row == [-1, 13, 0, 5, 1, 1, 1, 3] else f"wrong results: {row}"
