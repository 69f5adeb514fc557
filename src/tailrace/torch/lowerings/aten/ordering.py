"""Order: sorts, the largest few, running sums, places among sorted values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.lowerings.promotion import (
    as_dtype,
    default_int,
    is_complex,
    is_float,
    is_inexact,
    wide,
)
from tailrace.torch.lowerings.table import lowering
from tailrace.torch.torchax.ops import compositions

aten = torch.ops.aten


def _order(x: TensorLike, dim: int, descending: bool) -> Any:
    """The numbers of entries in order; equal ones stay as they are, and NaN is the largest."""
    key = jax.lax.stop_gradient(x)
    if key.dtype == bool:
        key = key.astype(jnp.int32)
    if not descending:
        return jnp.argsort(key, dim, stable=True)
    # Turned around before and after: the order of equal ones is not.
    size = key.shape[dim]
    found = jnp.argsort(jnp.flip(key, dim), dim, stable=True)
    return size - 1 - jnp.flip(found, dim)


def _sorted(x: TensorLike, dim: int, descending: bool) -> tuple[Any, Any]:
    if not x.ndim:
        return x, jnp.zeros((), default_int())
    order = _order(x, dim, descending)
    return jnp.take_along_axis(x, order, dim), order.astype(default_int())


@lowering(aten.sort.default)
def sort(x: TensorLike, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """In order, and the numbers that entries had."""
    return _sorted(x, dim, descending)


@lowering(aten.sort.stable)
def sort_stable(
    x: TensorLike, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Any, Any]:
    """In order, equal ones as they were."""
    return _sorted(x, dim, descending)


@lowering(aten.argsort.default)
def argsort(x: TensorLike, dim: int = -1, descending: bool = False) -> Any:
    """The numbers of entries in order."""
    return _sorted(x, dim, descending)[1]


@lowering(aten.argsort.stable)
def argsort_stable(x: TensorLike, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    """The numbers of entries in order, equal ones as they were."""
    return _sorted(x, dim, descending)[1]


@lowering(aten.topk.default)
def topk(
    x: TensorLike, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Any, Any]:
    """The largest, or smallest, few along a dim, and their numbers."""
    if not x.ndim:
        return (x, jnp.zeros((), default_int())) if k else (x.reshape(-1)[:0], jnp.zeros((0,), int))
    key = jnp.moveaxis(jax.lax.stop_gradient(x), dim, -1)
    if not largest:
        key = -key if is_float(key.dtype) else ~key
    _, index = jax.lax.top_k(key, k)
    index = jnp.moveaxis(index, -1, dim)
    return jnp.take_along_axis(x, index, dim), index.astype(default_int())


@lowering(aten.kthvalue.default)
def kthvalue(x: TensorLike, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """The k-th smallest along a dim, and its number."""
    values, index = _sorted(x, dim, False)
    if not x.ndim:
        return values, index
    found = [jax.lax.index_in_dim(part, k - 1, dim, keepdims=keepdim) for part in (values, index)]
    return found[0], found[1]


@lowering(aten.median.dim)
def median(x: TensorLike, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower one in the middle along a dim, and its number; NaN if there is one."""
    if not x.ndim:
        return x, jnp.zeros((), default_int())
    values, index = kthvalue(x, (x.shape[dim] + 1) // 2, dim, True)
    if is_float(x.dtype):
        first = jnp.argmax(x != x, dim, keepdims=True).astype(default_int())
        missing = jnp.any(x != x, dim, keepdims=True)
        values = jnp.where(missing, jnp.take_along_axis(x, first, dim), values)
        index = jnp.where(missing, first, index)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


@lowering(aten.median.default)
def median_of_all(x: TensorLike) -> Any:
    """The lower one in the middle."""
    return median(x.reshape(-1), 0)[0]


@lowering(aten.nanmedian.dim)
def nanmedian(x: TensorLike, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower one in the middle of the numbers along a dim, and its place."""
    if not x.ndim or not is_float(x.dtype):
        return median(x, dim, keepdim)
    values, index = _sorted(x, dim, False)  # NaN comes last
    count = (x == x).sum(dim, keepdims=True)
    middle = jnp.maximum((count + 1) // 2 - 1, 0)
    values, index = (jnp.take_along_axis(part, middle, dim) for part in (values, index))
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


@lowering(aten.nanmedian.default)
def nanmedian_of_all(x: TensorLike) -> Any:
    """The lower one in the middle of all numbers."""
    return nanmedian(x.reshape(-1), 0)[0]


def _running(x: TensorLike, dim: int, dtype: torch.dtype | None, add: Any) -> Any:
    if dtype is not None:
        wanted = dtype_on_device(dtype)
    else:
        wanted = x.dtype if is_inexact(x.dtype) else default_int()
    full = as_dtype(as_dtype(x, wanted), wide(wanted))
    return (add(full, dim) if x.ndim else full).astype(wanted)


@lowering(aten.cumsum.default)
def cumsum(x: TensorLike, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """A running sum."""
    return _running(x, dim, dtype, jnp.cumsum)


@lowering(aten.cumprod.default)
def cumprod(x: TensorLike, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """A running product."""
    return _running(x, dim, dtype, jnp.cumprod)


@lowering(aten.logcumsumexp.default)
def logcumsumexp(x: TensorLike, dim: int) -> Any:
    """The logarithm of a running sum of exponentials."""
    if not x.ndim:
        return x
    full = as_dtype(x, wide(x.dtype))
    if is_complex(x.dtype):
        return jnp.log(jnp.cumsum(jnp.exp(full), dim))
    return jax.lax.cumlogsumexp(full, dim % x.ndim).astype(x.dtype)


def _extremes(x: TensorLike, dim: int, largest: bool) -> tuple[Any, Any]:
    """A running extreme, the last of equal ones, and its number; NaN wins and stays."""
    if not x.ndim:
        return x, jnp.zeros((), default_int())
    dim = dim % x.ndim
    key = jax.lax.stop_gradient(x)
    key = key.astype(jnp.int32) if key.dtype == bool else key

    def later(one: Any, other: Any) -> Any:
        (a, i), (b, j) = one, other
        wins = (b >= a if largest else b <= a) | (b != b)
        wins = wins & ~((a != a) & (b == b))
        return jnp.where(wins, b, a), jnp.where(wins, j, i)

    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
    _, index = jax.lax.associative_scan(later, (key, places), axis=dim)
    return jnp.take_along_axis(x, index, dim), index.astype(default_int())


@lowering(aten.cummax.default)
def cummax(x: TensorLike, dim: int) -> tuple[Any, Any]:
    """A running maximum, and its number."""
    return _extremes(x, dim, True)


@lowering(aten.cummin.default)
def cummin(x: TensorLike, dim: int) -> tuple[Any, Any]:
    """A running minimum, and its number."""
    return _extremes(x, dim, False)


@lowering(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    ordered: TensorLike,
    values: TensorLike,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: TensorLike = None,
) -> Any:
    """Where values go among sorted ones."""
    plain = compositions.COMPOSITIONS[aten.searchsorted]
    return plain(ordered, values, right=right, side=side, sorter=sorter).astype(default_int())


@lowering(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    values: TensorLike, boundaries: TensorLike, *, out_int32: bool = False, right: bool = False
) -> Any:
    """Between which boundaries values are."""
    return searchsorted(boundaries, values, right=right)


@lowering(aten.histc.default)
def histc(x: TensorLike, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """How many entries are in each part of a range, by default that of the entries."""
    full = as_dtype(x, wide(x.dtype)).ravel()
    low, high = (jnp.min(full), jnp.max(full)) if min == max else (min, max)
    equal = jnp.asarray(low == high)
    low, high = jnp.where(equal, low - 1, low), jnp.where(equal, high + 1, high)
    place = jnp.floor((full - low) / (high - low) * bins).astype(jnp.int32)
    place = jnp.where(full == high, bins - 1, place)
    inside = (full >= low) & (full <= high)
    counts = jnp.zeros(bins, jnp.int32).at[jnp.where(inside, place, bins)].add(1, mode="drop")
    return counts.astype(x.dtype)
