"""Pooling over windows at random places."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.data.array_like import ShapeLike, TensorLike

aten = torch.ops.aten


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


POOLS: dict[Any, Callable[..., Any]] = {
    # PyTorch's samples are those of (width, height), and of (time, height, width).
    aten.fractional_max_pool2d.default: _fractional((1, 0)),
    aten.fractional_max_pool3d.default: _fractional((0, 1, 2)),
}
"""By operation."""
