"""Norms, deviations and distances: their gradient at 0 is 0, as in PyTorch, and not NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.torchax.ops.elementwise import absolute

_NARROW = (jnp.float16, jnp.bfloat16)

Dims: TypeAlias = "int | Sequence[int] | None"
"""Some dimensions; None for all."""


def root(x: TensorLike, power: float = 2) -> Any:
    """The root of what is not negative, with gradient 0 at 0."""
    # Replaced before the root and after it: the gradient of a root at 0 is infinite, and 0 times
    # infinite would be NaN.
    zero = x == 0
    safe = jnp.where(zero, 1, x)
    return jnp.where(zero, 0, jnp.sqrt(safe) if power == 2 else safe ** (1 / power))


def vector_norm(
    x: TensorLike,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: DTypeLike = None,
) -> Any:
    """The norm over some dimensions, or all of them."""
    if dtype is not None:
        x = x.astype(dtype_on_device(dtype))
    axes = _axes(x, dim)
    given = x.real.dtype
    size = absolute(x)
    size = size.astype(jnp.float32) if given in _NARROW else size  # as PyTorch adds up
    if ord == math.inf:
        out = size.max(axes, keepdims=keepdim)
    elif ord == -math.inf:
        out = size.min(axes, keepdims=keepdim)
    elif ord == 0:
        out = (size != 0).sum(axes, keepdims=keepdim)
    elif ord == 1:
        out = size.sum(axes, keepdims=keepdim)
    elif ord == 2:
        out = root(jnp.square(size).sum(axes, keepdims=keepdim))
    elif ord < 0:
        out = (size**ord).sum(axes, keepdims=keepdim) ** (1 / ord)
    else:
        # As in `root`: a power below 1 has an infinite gradient at 0.
        zero = size == 0
        powers = jnp.where(zero, 0, jnp.where(zero, 1, size) ** ord)
        out = root(powers.sum(axes, keepdims=keepdim), ord)
    return out.astype(given)


def deviation(
    x: TensorLike, dim: Dims = None, *, correction: TensorLike = None, keepdim: bool = False
) -> Any:
    """The standard deviation over some dimensions, or all of them."""
    axes = _axes(x, dim)
    freedom = 1 if correction is None else correction
    return root(jnp.var(x, axes, ddof=freedom, keepdims=keepdim))


def deviation_and_mean(
    x: TensorLike, dim: Dims = None, *, correction: TensorLike = None, keepdim: bool = False
) -> tuple[Any, Any]:
    """The standard deviation and the mean."""
    axes = _axes(x, dim)
    return deviation(x, dim, correction=correction, keepdim=keepdim), x.mean(axes, keepdims=keepdim)


def deviation_of_all(x: TensorLike, unbiased: bool = True) -> Any:
    """The standard deviation of all entries."""
    return deviation(x, correction=int(unbiased))


def deviation_along(x: TensorLike, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Any:
    """The standard deviation, by PyTorch's older arguments."""
    return deviation(x, dim, correction=int(unbiased), keepdim=keepdim)


def deviation_and_mean_of_all(x: TensorLike, unbiased: bool = True) -> tuple[Any, Any]:
    """Both, of all entries."""
    return deviation_and_mean(x, correction=int(unbiased))


def deviation_and_mean_along(
    x: TensorLike, dim: Dims, unbiased: bool = True, keepdim: bool = False
) -> tuple[Any, Any]:
    """Both, by PyTorch's older arguments."""
    return deviation_and_mean(x, dim, correction=int(unbiased), keepdim=keepdim)


def each_with_each(
    x1: TensorLike, x2: TensorLike, p: float = 2, compute_mode: str | None = None
) -> Any:
    """Distances of all rows of one matrix from all rows of another.

    By differences: products, which PyTorch may use, lose the digits of small distances.
    """
    return _length(x1[..., :, None, :] - x2[..., None, :, :], p)


def each_pair(x: TensorLike, p: float = 2) -> Any:
    """Distances of all rows of a matrix from those after them."""
    first, second = jnp.triu_indices(x.shape[0], 1)
    return _length(x[first] - x[second], p)


def _length(difference: TensorLike, p: float) -> Any:
    """The norm over the last dimension."""
    if p != math.inf:
        return vector_norm(difference, p, -1)
    # PyTorch gives each of several largest entries the whole gradient here, not a share of it.
    size = absolute(difference)
    # The value of the maximum, and beside it terms that are 0 and have the gradient.
    fixed = jax.lax.stop_gradient(size)
    top = fixed.max(-1, keepdims=True)
    return top[..., 0] + jnp.where(fixed == top, size - fixed, 0).sum(-1)


def apart(x: TensorLike, other: TensorLike, p: float = 2) -> Any:
    """The distance of two tensors."""
    return vector_norm(x - other, p)


def mean(x: TensorLike, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None) -> Any:
    """The mean over some dimensions, or all of them, in the dtype that is asked for."""
    x = x if dtype is None else x.astype(dtype_on_device(dtype))
    return x.mean(_axes(x, dim), keepdims=keepdim)


def _axes(x: TensorLike, dim: Dims) -> tuple[int, ...] | int | None:
    """Over which axes; none are named for all, and a number has none."""
    # PyTorch takes an empty list for all dimensions, NumPy for none.
    axes = tuple(dim) if isinstance(dim, Sequence) else dim
    return None if axes == () or x.ndim == 0 else axes
