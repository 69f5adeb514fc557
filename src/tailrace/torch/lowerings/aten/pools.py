"""Pools: averages and maxima over windows, of equal or nearly equal size."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings.promotion import as_dtype, default_int, is_inexact, wide, widened
from tailrace.torch.lowerings.table import lowering
from tailrace.torch.torchax.ops import compositions, pools

aten = torch.ops.aten

for _packet in (aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d):
    lowering(_packet.default)(widened(pools.POOLS[_packet]))


def _of_each(number: int | Sequence[int], dims: int) -> tuple[int, ...]:
    given = (number,) if isinstance(number, int) else tuple(number)
    return given * dims if len(given) == 1 else given


def _lowest(dtype: Any) -> Any:
    return np.asarray(-np.inf if is_inexact(dtype) else jnp.iinfo(dtype).min, dtype)


def _maxima(
    x: TensorLike,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    *,
    dims: int,
) -> tuple[Any, Any]:
    """Maxima, the first of several, and their numbers in the plane."""
    kernel, pads, gaps = (_of_each(part, dims) for part in (kernel_size, padding, dilation))
    strides = _of_each(stride, dims) if stride else kernel
    if set(gaps) != {1}:  # JAX has no gradient of windows with gaps
        dilated = pools.DILATED[getattr(aten, f"max_pool{dims}d_with_indices")](None)
        found, places = dilated(x, kernel, strides, pads, gaps, ceil_mode)
        return found, places.astype(default_int())
    lead = x.ndim - dims
    sizes = x.shape[lead:]
    widths = [(0, 0)] * lead
    for size, window, step, pad in zip(sizes, kernel, strides, pads, strict=True):
        left = size + 2 * pad - window
        count = (-(-left // step) if ceil_mode else left // step) + 1
        if ceil_mode and (count - 1) * step >= size + pad:
            count -= 1  # the last one would begin in the padding behind
        widths.append((pad, max(0, (count - 1) * step + window - size - pad)))
    windows, steps = (1,) * lead + kernel, (1,) * lead + strides
    # Where a window ends before the border, the rest is not read.
    found = jax.lax.reduce_window(x, _lowest(x.dtype), jax.lax.max, windows, steps, widths)
    places = jnp.broadcast_to(jnp.arange(math.prod(sizes), dtype=jnp.int32).reshape(sizes), x.shape)

    def larger(one: Any, other: Any) -> Any:
        (a, i), (b, j) = one, other
        wins = (b > a) | ((b != b) & (a == a)) | ((b == a) & (j < i)) | (i < 0)
        wins = wins & (j >= 0)
        return jnp.where(wins, b, a), jnp.where(wins, j, i)

    _, index = jax.lax.reduce_window(
        (jax.lax.stop_gradient(x), places),
        (_lowest(x.dtype), np.int32(-1)),
        larger,
        windows,
        steps,
        widths,
    )
    return found, index.astype(default_int())


lowering(aten.max_pool2d_with_indices.default)(functools.partial(_maxima, dims=2))
lowering(aten.max_pool3d_with_indices.default)(functools.partial(_maxima, dims=3))


def _parts(size: int, out: int) -> list[tuple[int, int]]:
    """PyTorch's windows: floor of the start, ceiling of the end, so neighbours may overlap."""
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


def _adaptive_mean(x: TensorLike, output_size: Sequence[int], *, dims: int) -> Any:
    """Means over windows that divide each of the last dims as evenly as possible."""
    dtype = x.dtype
    x = as_dtype(x, wide(dtype))
    for number, out in enumerate(output_size):
        dim = x.ndim - dims + number
        size = x.shape[dim]
        if out == size:
            continue
        if size % out == 0:
            shape = (*x.shape[:dim], out, size // out, *x.shape[dim + 1 :])
            x = x.reshape(shape).mean(dim + 1)
            continue
        parts = [
            jax.lax.slice_in_dim(x, low, high, 1, dim).mean(dim, keepdims=True)
            for low, high in _parts(size, out)
        ]
        x = jnp.concatenate(parts, dim) if parts else jax.lax.slice_in_dim(x, 0, 0, 1, dim)
    return x.astype(dtype)


lowering(aten.adaptive_avg_pool1d.default)(functools.partial(_adaptive_mean, dims=1))
lowering(aten._adaptive_avg_pool2d.default)(functools.partial(_adaptive_mean, dims=2))
lowering(aten._adaptive_avg_pool3d.default)(functools.partial(_adaptive_mean, dims=3))


def _adaptive_maxima(x: TensorLike, output_size: Sequence[int], *, dims: int) -> tuple[Any, Any]:
    """Maxima over such windows, the first of several, and their numbers in the plane."""
    spatial = x.shape[x.ndim - dims :]
    places = jnp.broadcast_to(jnp.arange(math.prod(spatial)).reshape(spatial), x.shape)
    # The last dim first: of several, the first in memory counts.
    for number, out in reversed([*enumerate(output_size)]):
        dim = x.ndim - dims + number
        found = []
        for low, high in _parts(x.shape[dim], out):
            window, where = (jax.lax.slice_in_dim(part, low, high, 1, dim) for part in (x, places))
            first = jnp.argmax(window, dim, keepdims=True)
            found.append([jnp.take_along_axis(part, first, dim) for part in (window, where)])
        x, places = (jnp.concatenate(part, dim) for part in zip(*found, strict=True))
    return x, places.astype(default_int())


lowering(aten.adaptive_max_pool2d.default)(functools.partial(_adaptive_maxima, dims=2))
lowering(aten.adaptive_max_pool3d.default)(functools.partial(_adaptive_maxima, dims=3))


def _of_array(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args)


for _overload in (aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default):
    lowering(_overload)(_of_array(pools.POOLS[_overload]))

for _overload in (aten.max_unpool2d.default, aten.max_unpool3d.default):
    lowering(_overload)(_of_array(compositions.COMPOSITIONS[_overload]))
