"""Reductions: in 32 bits for 16, of whole numbers as int64 would be, which the device has as int32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.lowerings.promotion import (
    as_dtype,
    default_float,
    default_int,
    is_complex,
    is_inexact,
    real_of,
    wide,
)
from tailrace.torch.lowerings.table import lowering
from tailrace.torch.torchax.ops import norms

aten = torch.ops.aten

Dims = Sequence[int] | int | None


def axes_of(x: TensorLike, dim: Dims) -> tuple[int, ...]:
    """Over which axes; an empty list and None are all of them."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(x.ndim))
    found = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(one % x.ndim for one in found) if x.ndim else ()


def _sum_dtype(x: TensorLike, dtype: torch.dtype | None) -> np.dtype:
    if dtype is not None:
        return dtype_on_device(dtype)
    return x.dtype if is_inexact(x.dtype) else default_int()


@lowering(aten.sum.dim_IntList)
def sum_along(
    x: TensorLike, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """A sum."""
    wanted = _sum_dtype(x, dtype)
    # `jnp.sum` adds 16-bit numbers in 32 bits by itself.
    return jnp.sum(as_dtype(x, wanted), axes_of(x, dim), keepdims=keepdim, dtype=wanted)


@lowering(aten.sum.default)
def sum_all(x: TensorLike, *, dtype: torch.dtype | None = None) -> Any:
    """The sum of all."""
    return sum_along(x, None, dtype=dtype)


@lowering(aten.nansum.default)
def nansum(
    x: TensorLike, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """A sum in which NaN counts as 0."""
    return sum_along(jnp.where(x != x, jnp.zeros((), x.dtype), x), dim, keepdim, dtype=dtype)


@lowering(aten.mean.dim)
def mean_along(
    x: TensorLike, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """A mean."""
    wanted = x.dtype if dtype is None else dtype_on_device(dtype)
    return jnp.mean(as_dtype(x, wanted), axes_of(x, dim), keepdims=keepdim)


@lowering(aten.mean.default)
def mean_all(x: TensorLike, *, dtype: torch.dtype | None = None) -> Any:
    """The mean of all."""
    return mean_along(x, None, dtype=dtype)


@lowering(aten.prod.default)
def prod_all(x: TensorLike, *, dtype: torch.dtype | None = None) -> Any:
    """The product of all."""
    wanted = _sum_dtype(x, dtype)
    return jnp.prod(as_dtype(x, wide(wanted))).astype(wanted)


@lowering(aten.prod.dim_int)
def prod_along(
    x: TensorLike, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """A product along a dim."""
    wanted = _sum_dtype(x, dtype)
    axes = axes_of(x, dim)
    return jnp.prod(as_dtype(x, wide(wanted)), axes, keepdims=keepdim).astype(wanted)


def _truth(x: TensorLike, reduce: Callable[..., Any], axes: tuple[int, ...], keepdim: bool) -> Any:
    found = reduce(x if x.dtype == bool else x != 0, axes, keepdims=keepdim)
    # Of bytes PyTorch returns bytes.
    return found.astype(x.dtype) if x.dtype == jnp.uint8 else found


@lowering(aten.any.default)
def any_of_all(x: TensorLike) -> Any:
    """Whether anything is true."""
    return _truth(x, jnp.any, axes_of(x, None), False)


@lowering(aten.any.dim)
def any_along(x: TensorLike, dim: int, keepdim: bool = False) -> Any:
    """Whether anything along a dim is true."""
    return _truth(x, jnp.any, axes_of(x, dim), keepdim)


@lowering(aten.any.dims)
def any_along_dims(x: TensorLike, dim: Sequence[int] | None = None, keepdim: bool = False) -> Any:
    """Whether anything along dims is true; no dims at all reduce nothing."""
    axes = () if dim is not None and not len(dim) else axes_of(x, dim)
    return _truth(x, jnp.any, axes, keepdim)


@lowering(aten.all.default)
def all_of_all(x: TensorLike) -> Any:
    """Whether everything is true."""
    return _truth(x, jnp.all, axes_of(x, None), False)


@lowering(aten.all.dim)
def all_along(x: TensorLike, dim: int, keepdim: bool = False) -> Any:
    """Whether everything along a dim is true."""
    return _truth(x, jnp.all, axes_of(x, dim), keepdim)


@lowering(aten.all.dims)
def all_along_dims(x: TensorLike, dim: Sequence[int] | None = None, keepdim: bool = False) -> Any:
    """Whether everything along dims is true."""
    axes = () if dim is not None and not len(dim) else axes_of(x, dim)
    return _truth(x, jnp.all, axes, keepdim)


@lowering(aten.amax.default)
def amax(x: TensorLike, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """The largest; several equal ones share the gradient."""
    return jnp.max(x, axes_of(x, dim), keepdims=keepdim)


@lowering(aten.amin.default)
def amin(x: TensorLike, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """The smallest; several equal ones share the gradient."""
    return jnp.min(x, axes_of(x, dim), keepdims=keepdim)


@lowering(aten.aminmax.default)
def aminmax(x: TensorLike, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    """Both."""
    axes = axes_of(x, dim)
    return jnp.min(x, axes, keepdims=keepdim), jnp.max(x, axes, keepdims=keepdim)


@lowering(aten.max.default)
def max_of_all(x: TensorLike) -> Any:
    """The largest of all."""
    return jnp.max(x)


@lowering(aten.min.default)
def min_of_all(x: TensorLike) -> Any:
    """The smallest of all."""
    return jnp.min(x)


def first_of(
    choose: Callable[..., Any], x: TensorLike, dim: int, keepdim: bool = False
) -> tuple[Any, Any]:
    """What is chosen along a dim, and its index; the first of several has the gradient."""
    if not x.ndim:
        return x, jnp.zeros((), default_int())
    index = choose(x.astype(jnp.int32) if x.dtype == bool else x, dim, keepdims=True)
    # A comparison and not a gather, whose gradient would be a scatter.
    hit = jax.lax.broadcasted_iota(index.dtype, x.shape, dim % x.ndim) == index
    if x.dtype == bool:
        value = jnp.any(hit & x, dim, keepdims=keepdim)
    else:
        zero = jnp.zeros((), x.dtype)
        value = jnp.where(hit, x, zero).sum(dim, keepdims=keepdim, dtype=x.dtype)
    return value, (index if keepdim else index.squeeze(dim)).astype(default_int())


@lowering(aten.max.dim)
def max_along(x: TensorLike, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The largest along a dim, and its index."""
    return first_of(jnp.argmax, x, dim, keepdim)


@lowering(aten.min.dim)
def min_along(x: TensorLike, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The smallest along a dim, and its index."""
    return first_of(jnp.argmin, x, dim, keepdim)


def _index(choose: Callable[..., Any], x: TensorLike, dim: int | None, keepdim: bool) -> Any:
    if not x.ndim:
        return jnp.zeros((), default_int())
    x = x.astype(jnp.int32) if x.dtype == bool else x
    return choose(x, dim, keepdims=keepdim).astype(default_int())


@lowering(aten.argmax.default)
def argmax(x: TensorLike, dim: int | None = None, keepdim: bool = False) -> Any:
    """The index of the largest; the first of several."""
    return _index(jnp.argmax, x, dim, keepdim)


@lowering(aten.argmin.default)
def argmin(x: TensorLike, dim: int | None = None, keepdim: bool = False) -> Any:
    """The index of the smallest; the first of several."""
    return _index(jnp.argmin, x, dim, keepdim)


def _variance(x: TensorLike, dim: Dims, correction: float | None, keepdim: bool) -> tuple[Any, Any]:
    """Variance and mean in the dtype that is computed in."""
    axes = axes_of(x, dim)
    full = as_dtype(x, wide(x.dtype))
    mean = jnp.mean(full, axes, keepdims=True)
    away = full - mean
    squares = jnp.square(away) if not is_complex(x.dtype) else jnp.real(away * jnp.conj(away))
    count = math.prod(x.shape[axis] for axis in axes)
    freedom = max(0, count - (1 if correction is None else correction))
    found = jnp.sum(squares, axes, keepdims=keepdim) / np.asarray(freedom, squares.dtype)
    return found, mean if keepdim else jnp.squeeze(mean, axes)


@lowering(aten.var.correction)
def var(
    x: TensorLike, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """The variance."""
    return _variance(x, dim, correction, keepdim)[0].astype(real_of(x.dtype))


@lowering(aten.var.dim)
def var_along(x: TensorLike, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Any:
    """The variance, by PyTorch's older arguments."""
    return var(x, dim, correction=int(unbiased), keepdim=keepdim)


@lowering(aten.var_mean.correction)
def var_mean(
    x: TensorLike, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Any, Any]:
    """Variance and mean."""
    found, mean = _variance(x, dim, correction, keepdim)
    return found.astype(real_of(x.dtype)), mean.astype(x.dtype)


@lowering(aten.std.correction)
def std(
    x: TensorLike, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """The standard deviation, with gradient 0 where it is 0."""
    return norms.root(_variance(x, dim, correction, keepdim)[0]).astype(real_of(x.dtype))


@lowering(aten.std_mean.correction)
def std_mean(
    x: TensorLike, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Any, Any]:
    """Standard deviation and mean."""
    found, mean = _variance(x, dim, correction, keepdim)
    return norms.root(found).astype(real_of(x.dtype)), mean.astype(x.dtype)


@lowering(aten.linalg_vector_norm.default)
def vector_norm(
    x: TensorLike,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """The norm over dims."""
    if not is_inexact(x.dtype):
        x = x.astype(default_float())
    return norms.vector_norm(x, ord, dim, keepdim, dtype)


@lowering(aten.logsumexp.default)
def logsumexp(x: TensorLike, dim: Sequence[int], keepdim: bool = False) -> Any:
    """The logarithm of a sum of exponentials."""
    dtype = x.dtype if is_inexact(x.dtype) else default_float()
    full = as_dtype(x, wide(dtype))
    return jax.nn.logsumexp(full, axes_of(x, dim), keepdims=keepdim).astype(dtype)


@lowering(aten._cdist_forward.default)
def cdist(x1: TensorLike, x2: TensorLike, p: float, compute_mode: int | None = None) -> Any:
    """Distances of all rows of one matrix from all rows of another."""
    return norms.each_with_each(x1, x2, p)


@lowering(aten._pdist_forward.default)
def pdist(x: TensorLike, p: float = 2) -> Any:
    """Distances of all rows of a matrix from those after them."""
    return norms.each_pair(x, p)


@lowering(aten.dist.default)
def dist(x: TensorLike, other: TensorLike, p: float = 2) -> Any:
    """The distance of two tensors."""
    return norms.apart(x, other, p)
