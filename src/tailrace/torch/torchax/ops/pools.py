"""Pooling: averages, whose windows may reach over the border, and windows at random places."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as functional

from tailrace.base.array_like import ShapeLike, TensorLike

aten = torch.ops.aten


def _of_each(number: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """One number for each dim, as PyTorch's functions take them."""
    given = (number,) if isinstance(number, int) else tuple(number)
    return given * dims if len(given) == 1 else given


def _windows(size: int, window: int, stride: int, padding: int, ceil_mode: bool) -> np.ndarray:
    """Where the windows along one dim begin, by PyTorch's rule."""
    left = size + 2 * padding - window
    count = (-(-left // stride) if ceil_mode else left // stride) + 1
    # The last one begins inside, or in the padding before.
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1
    return np.arange(count) * stride - padding


def _average(
    x: TensorLike,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    dims: int,
) -> Any:
    """Averages; what of a window reaches over the padding does not count."""
    kernel, pads = _of_each(kernel_size, dims), _of_each(padding, dims)
    strides = _of_each(stride, dims) if stride else kernel
    lead = x.ndim - dims
    counts: Any = 1
    widths = []
    for dim, (window, step, pad) in enumerate(zip(kernel, strides, pads, strict=True)):
        size = x.shape[lead + dim]
        starts = _windows(size, window, step, pad, ceil_mode)
        ends = np.minimum(starts + window, size + pad)
        widths.append((pad, max(0, int(starts[-1]) + window - size)))
        if not count_include_pad:
            starts, ends = np.maximum(starts, 0), np.minimum(ends, size)
        shape = [1] * dims
        shape[dim] = len(starts)
        counts = counts * (ends - starts).reshape(shape)
    sums = jax.lax.reduce_window(
        x,
        np.zeros((), x.dtype),
        jax.lax.add,
        (1,) * lead + kernel,
        (1,) * lead + strides,
        [(0, 0)] * lead + widths,
    )
    divisor = jnp.asarray(counts if divisor_override is None else divisor_override, jnp.float32)
    return (sums / divisor).astype(x.dtype)


def _widest(
    x: TensorLike,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Any, Any]:
    """The maxima over windows with gaps, and their places; the first of several gets the gradient."""
    dims = len(kernel)
    sizes = x.shape[x.ndim - dims :]
    places, inside = np.zeros((), int), np.ones((), bool)
    for dim, (size, window, gap) in enumerate(zip(sizes, kernel, dilation, strict=True)):
        reach = gap * (window - 1) + 1
        starts = _windows(size, reach, strides[dim], pads[dim], ceil_mode)
        found = starts[:, None] + np.arange(window) * gap
        shape = [1] * (2 * dims)
        shape[dim], shape[dims + dim] = found.shape
        found = found.reshape(shape)
        inside = inside & (found >= 0) & (found < size)
        places = places + found.clip(0, size - 1) * math.prod(sizes[dim + 1 :])
    outputs = places.shape[:dims]
    places, inside = places.reshape(*outputs, -1), inside.reshape(*outputs, -1)
    entries = x.reshape(*x.shape[: x.ndim - dims], -1)[..., places]
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    entries = jnp.where(inside, entries, lowest)
    chosen = jnp.argmax(entries, -1, keepdims=True)
    values = jnp.take_along_axis(entries, chosen, -1)[..., 0]
    spots = jnp.broadcast_to(jnp.asarray(places), entries.shape)
    return values, jnp.take_along_axis(spots, chosen, -1)[..., 0]


def _dilated_of(theirs: Callable[..., Any], *, dims: int, indices: bool) -> Callable[..., Any]:
    """Max pooling; that with gaps in its windows has no gradient in JAX, and is written out."""

    def run(
        x: TensorLike,
        kernel_size: Sequence[int],
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = indices,
    ) -> Any:
        gaps = _of_each(dilation, dims)
        if set(gaps) == {1}:
            rest = () if indices else (return_indices,)
            return theirs(x, kernel_size, stride, padding, dilation, ceil_mode, *rest)
        kernel = _of_each(kernel_size, dims)
        strides = _of_each(stride, dims) if stride else kernel
        found = _widest(x, kernel, strides, _of_each(padding, dims), gaps, ceil_mode)
        return found if return_indices else found[0]

    return run


def _starts(sample: TensorLike, size: int, outputs: int, window: int) -> Any:
    """Where the windows along one dim begin, by PyTorch's rule, from a number in [0, 1)."""
    step = (size - window) / max(1, outputs - 1)
    places = jnp.arange(outputs, dtype=sample.dtype)
    found = jnp.floor((places + sample) * step) - jnp.floor(sample * step)
    return found.astype(jnp.int32).at[-1].set(size - window)


def _pooled(
    x: TensorLike,
    samples: TensorLike,
    windows: Sequence[int],
    outputs: Sequence[int],
    order: Sequence[int],
) -> tuple[Any, Any]:
    """The maxima of one plane, and their places in it; `order` names the sample of each dim."""
    dims = len(windows)
    places: Any = 0
    for dim, (window, count) in enumerate(zip(windows, outputs, strict=True)):
        starts = _starts(samples[order[dim]], x.shape[dim], count, window)
        shape = [1] * (2 * dims)
        shape[dim], shape[dims + dim] = count, window
        inside = (starts[:, None] + jnp.arange(window)).reshape(shape)
        places = places + inside * math.prod(x.shape[dim + 1 :])
    places = places.reshape(*outputs, -1)
    values = x.ravel()[places]
    chosen = jnp.argmax(values, -1, keepdims=True)
    values, places = (jnp.take_along_axis(part, chosen, -1)[..., 0] for part in (values, places))
    return values, places


def _fractional(order: Sequence[int]) -> Callable[..., Any]:
    def run(
        x: TensorLike,
        kernel_size: Sequence[int],
        output_size: ShapeLike,
        random_samples: TensorLike,
    ) -> tuple[Any, Any]:
        dims = len(order)
        planes = x.reshape(-1, *x.shape[x.ndim - dims :])
        plane = functools.partial(
            _pooled, windows=tuple(kernel_size), outputs=tuple(output_size), order=order
        )
        found = jax.vmap(plane)(planes, random_samples.reshape(len(planes), dims))
        lead = x.shape[: x.ndim - dims]
        values, places = (part.reshape(*lead, *output_size) for part in found)
        return values, places

    return run


DILATED: dict[Any, Callable[..., Any]] = {
    aten.max_pool2d_with_indices: functools.partial(_dilated_of, dims=2, indices=True),
    aten.max_pool3d_with_indices: functools.partial(_dilated_of, dims=3, indices=True),
    functional.max_pool2d: functools.partial(_dilated_of, dims=2, indices=False),
}
"""Max pooling, by operation: given torchax's lowering."""

POOLS: dict[Any, Callable[..., Any]] = {
    aten.avg_pool1d: functools.partial(_average, dims=1),
    aten.avg_pool2d: functools.partial(_average, dims=2),
    aten.avg_pool3d: functools.partial(_average, dims=3),
    # PyTorch's samples are those of (width, height), and of (time, height, width).
    aten.fractional_max_pool2d.default: _fractional((1, 0)),
    aten.fractional_max_pool3d.default: _fractional((0, 1, 2)),
}
"""By operation."""
