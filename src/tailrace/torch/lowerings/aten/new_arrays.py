"""New arrays: of one number, of a sequence, without values; and casts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.lowerings.promotion import as_dtype, common_dtype, default_float, default_int
from tailrace.torch.lowerings.table import lowering

aten = torch.ops.aten


def _dtype_of(value: complex) -> np.dtype:
    return common_dtype(value)


def _filled(size: Sequence[int], value: complex, dtype: torch.dtype | None, otherwise: Any) -> Any:
    wanted = otherwise if dtype is None else dtype_on_device(dtype)
    return jnp.full(tuple(size), as_dtype(value, wanted), wanted)


@lowering(aten.full.default)
def full(size: Sequence[int], value: complex, *, dtype: torch.dtype | None = None) -> Any:
    """One number everywhere."""
    return _filled(size, value, dtype, _dtype_of(value))


@lowering(aten.full_like.default)
def full_like(x: TensorLike, value: complex, *, dtype: torch.dtype | None = None) -> Any:
    """One number in the shape of an array."""
    return _filled(x.shape, value, dtype, x.dtype)


@lowering(aten.new_full.default)
def new_full(
    x: TensorLike, size: Sequence[int], value: complex, *, dtype: torch.dtype | None = None
) -> Any:
    """One number in the dtype of an array."""
    return _filled(size, value, dtype, x.dtype)


@lowering(aten.zeros.default, aten.empty.memory_format)
def zeros(size: Sequence[int], *, dtype: torch.dtype | None = None) -> Any:
    """0; also for memory that has no values yet."""
    return _filled(size, 0, dtype, default_float())


@lowering(aten.empty_strided.default, aten.empty_permuted.default)
def empty_strided(
    size: Sequence[int], order: Sequence[int], *, dtype: torch.dtype | None = None
) -> Any:
    """0; the order in memory is not ours."""
    return _filled(size, 0, dtype, default_float())


@lowering(aten.ones.default)
def ones(size: Sequence[int], *, dtype: torch.dtype | None = None) -> Any:
    """1 everywhere."""
    return _filled(size, 1, dtype, default_float())


@lowering(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(x: TensorLike, *, dtype: torch.dtype | None = None) -> Any:
    """0 in the shape of an array."""
    return _filled(x.shape, 0, dtype, x.dtype)


@lowering(aten.ones_like.default)
def ones_like(x: TensorLike, *, dtype: torch.dtype | None = None) -> Any:
    """1 in the shape of an array."""
    return _filled(x.shape, 1, dtype, x.dtype)


@lowering(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(x: TensorLike, size: Sequence[int], *, dtype: torch.dtype | None = None) -> Any:
    """0 in the dtype of an array."""
    return _filled(size, 0, dtype, x.dtype)


@lowering(aten.new_ones.default)
def new_ones(x: TensorLike, size: Sequence[int], *, dtype: torch.dtype | None = None) -> Any:
    """1 in the dtype of an array."""
    return _filled(size, 1, dtype, x.dtype)


@lowering(aten.new_empty_strided.default)
def new_empty_strided(
    x: TensorLike, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None
) -> Any:
    """0 in the dtype of an array."""
    return _filled(size, 0, dtype, x.dtype)


@lowering(aten.scalar_tensor.default)
def scalar_tensor(value: complex, *, dtype: torch.dtype | None = None) -> Any:
    """A number as an array without dims, of floats unless it is said otherwise."""
    return _filled((), value, dtype, default_float())


@lowering(aten.fill.Scalar)
def fill(x: TensorLike, value: complex) -> Any:
    """One number in the shape and dtype of an array."""
    return _filled(x.shape, value, None, x.dtype)


@lowering(aten.fill.Tensor)
def fill_with(x: TensorLike, value: TensorLike) -> Any:
    """The entry of one array in the shape and dtype of another."""
    return jnp.broadcast_to(as_dtype(value, x.dtype), x.shape)


def _steps(start: float, end: float, step: float, dtype: torch.dtype | None) -> Any:
    if dtype == torch.int64:
        start, end, step = int(start), int(end), int(step)
    numbers = (start, end, step)
    whole = all(isinstance(number, int) for number in numbers)
    wanted = (
        (default_int() if whole else default_float()) if dtype is None else dtype_on_device(dtype)
    )
    count = max(0, math.ceil((end - start) / step))
    if not jnp.issubdtype(wanted, jnp.inexact):
        start, step, whole = int(start), int(step), True
    if jnp.issubdtype(wanted, jnp.integer) and step:
        return jnp.arange(start, start + count * step, step, wanted)
    # As PyTorch: each number by itself, in 64 bits, and only then in the dtype.
    kind = np.int64 if whole else np.float64
    return jnp.asarray((start + np.arange(count, dtype=kind) * kind(step)).astype(wanted))


@lowering(aten.arange.start_step)
def arange(start: float, end: float, step: float = 1, *, dtype: torch.dtype | None = None) -> Any:
    """Numbers by a step."""
    return _steps(start, end, step, dtype)


@lowering(aten.arange.start)
def arange_from(start: float, end: float, *, dtype: torch.dtype | None = None) -> Any:
    """Numbers by a step of 1."""
    return _steps(start, end, 1, dtype)


@lowering(aten.arange.default)
def arange_to(end: float, *, dtype: torch.dtype | None = None) -> Any:
    """Numbers from 0 by a step of 1."""
    return _steps(0, end, 1, dtype)


@lowering(aten.linspace.default)
def linspace(start: float, end: float, steps: int, *, dtype: torch.dtype | None = None) -> Any:
    """A number of numbers between two."""
    wanted = default_float() if dtype is None else dtype_on_device(dtype)
    return jnp.asarray(np.linspace(start, end, steps).astype(wanted))


@lowering(aten.eye.default)
def eye(n: int, *, dtype: torch.dtype | None = None) -> Any:
    """1 on a diagonal."""
    return jnp.eye(n, dtype=default_float() if dtype is None else dtype_on_device(dtype))


@lowering(aten.eye.m)
def eye_of(n: int, m: int, *, dtype: torch.dtype | None = None) -> Any:
    """1 on a diagonal of a rectangle."""
    return jnp.eye(n, m, dtype=default_float() if dtype is None else dtype_on_device(dtype))


@lowering(aten.tril_indices.default)
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = None) -> Any:
    """The places on and below a diagonal."""
    found = np.stack(np.tril_indices(row, offset, col))
    return jnp.asarray(found.astype(default_int() if dtype is None else dtype_on_device(dtype)))


@lowering(aten.triu_indices.default)
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = None) -> Any:
    """The places on and above a diagonal."""
    found = np.stack(np.triu_indices(row, offset, col))
    return jnp.asarray(found.astype(default_int() if dtype is None else dtype_on_device(dtype)))


@lowering(aten._to_copy.default, torch.ops.prims.convert_element_type.default)
def to_copy(x: TensorLike, dtype: torch.dtype | None = None, *, non_blocking: bool = False) -> Any:
    """In another dtype."""
    return x if dtype is None else as_dtype(x, dtype_on_device(dtype))


@lowering(aten.copy.default)
def copy(x: TensorLike, source: TensorLike, non_blocking: bool = False) -> Any:
    """The values of one array in the shape and dtype of another."""
    return jnp.broadcast_to(as_dtype(source, x.dtype), x.shape)
