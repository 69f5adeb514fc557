"""Resizing of images: a weighted sum along each dim, whose weights are known while tracing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings.promotion import as_dtype, wide
from tailrace.torch.lowerings.table import lowering

aten = torch.ops.aten


def _step(size: int, out: int, align_corners: bool, scale: float | None) -> float:
    """The distance of two results, in entries."""
    if align_corners:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return 1 / scale if scale else size / out


def _centres(size: int, out: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """Where results are, in entries, computed in 32 bits as PyTorch does."""
    step = np.float32(_step(size, out, align_corners, scale))
    places = np.arange(out, dtype=np.float32)
    if align_corners:
        return step * places
    return step * (places + np.float32(0.5)) - np.float32(0.5)


def _linear(size: int, out: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """The share of each entry, [size], in each result, [out]; as [size, out]."""
    centre = np.maximum(_centres(size, out, align_corners, scale), 0)
    first = np.minimum(centre.astype(int), size - 1)
    share = np.clip(centre - first, 0, 1).astype(np.float32)
    weights = np.zeros((size, out), np.float32)
    np.add.at(weights, (first, np.arange(out)), 1 - share)
    np.add.at(weights, (np.minimum(first + 1, size - 1), np.arange(out)), share)
    return weights


_CUBIC = -0.75
"""The slope at the neighbours of a cubic of four entries."""


def _near(x: Any) -> Any:
    return ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1


def _far(x: Any) -> Any:
    return ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC


def _cubic(size: int, out: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """Shares of four entries, by the cubic with -0.75; beyond the border is the border."""
    centre = _centres(size, out, align_corners, scale)
    first = np.floor(centre)
    t = centre - first

    weights = np.zeros((size, out), np.float32)
    for offset, share in zip(
        (-1, 0, 1, 2), (_far(t + 1), _near(t), _near(1 - t), _far(2 - t)), strict=True
    ):
        place = np.clip(first.astype(int) + offset, 0, size - 1)
        np.add.at(weights, (place, np.arange(out)), share.astype(np.float32))
    return weights


def _sizes(
    x: TensorLike, dims: int, size: Sequence[int] | None, scales: Sequence[float | None] | None
) -> list[tuple[int, int, float | None]]:
    """(entries, results, factor) along each of the last dims."""
    given = x.shape[x.ndim - dims :]
    factors = list(scales) if scales else [None] * dims
    if size is None:
        outs = [int(n * float(factor or 1)) for n, factor in zip(given, factors, strict=True)]
    else:
        outs = list(size)
    return list(zip(given, outs, factors, strict=True))


def _weighed(x: TensorLike, weights: Sequence[np.ndarray]) -> Any:
    dtype = x.dtype
    x = as_dtype(x, wide(dtype))
    for number, weight in enumerate(weights):
        dim = x.ndim - len(weights) + number
        if weight.shape[0] == weight.shape[1] and np.array_equal(weight, np.eye(len(weight))):
            continue
        # Exact products: a weight is no place to save digits.
        found = jnp.tensordot(
            x, jnp.asarray(weight, x.dtype), ((dim,), (0,)), precision=jax.lax.Precision.HIGHEST
        )
        x = jnp.moveaxis(found, -1, dim)
    return x.astype(dtype)


def _smooth(shares: Callable[..., np.ndarray], dims: int) -> tuple[Any, Any]:
    """The form with one argument for scales, and that with one for each dim."""

    def run(
        x: TensorLike,
        size: Sequence[int] | None,
        align_corners: bool,
        scales: Sequence[float | None] | None = None,
    ) -> Any:
        along = _sizes(x, dims, size, scales)
        if size is not None:  # the size decides, and not what it was computed from
            along = [(n, out, factor if scales else None) for n, out, factor in along]
        return _weighed(x, [shares(n, out, align_corners, factor) for n, out, factor in along])

    def separately(
        x: TensorLike, size: Sequence[int], align_corners: bool, *scales: float | None, **named: Any
    ) -> Any:
        given = [*scales, *named.values()]
        return run(x, size, align_corners, given + [None] * (dims - len(given)))

    return run, separately


for _dims, _packet, _shares in (
    (1, aten.upsample_linear1d, _linear),
    (2, aten.upsample_bilinear2d, _linear),
    (3, aten.upsample_trilinear3d, _linear),
    (2, aten.upsample_bicubic2d, _cubic),
):
    _run, _separately = _smooth(_shares, _dims)
    lowering(_packet.vec)(_run)
    lowering(_packet.default)(_separately)


def _nearest(x: TensorLike, along: Sequence[tuple[int, int, float | None]], exact: bool) -> Any:
    for number, (size, out, factor) in enumerate(along):
        dim = x.ndim - len(along) + number
        if out == size and not factor:
            continue
        if out % size == 0 and (not factor or factor == out // size):
            # Its gradient is a sum, where that of a lookup would be a scatter.
            x = jnp.repeat(x, out // size, dim)
            continue
        step = np.float32(1 / factor if factor else size / out)
        places = np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0)
        index = np.minimum(np.floor(places * step).astype(int), size - 1)
        x = jnp.take(x, index, dim)
    return x


def _by_nearest(dims: int, exact: bool) -> tuple[Any, Any]:
    def run(
        x: TensorLike, size: Sequence[int] | None, scales: Sequence[float | None] | None = None
    ) -> Any:
        return _nearest(x, _sizes(x, dims, size, scales), exact)

    def separately(x: TensorLike, size: Sequence[int], *scales: float | None, **named: Any) -> Any:
        given = [*scales, *named.values()]
        return run(x, size, given + [None] * (dims - len(given)))

    return run, separately


for _dims in (1, 2, 3):
    for _name, _exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True)):
        _packet = getattr(aten, f"{_name}{_dims}d")
        _run, _separately = _by_nearest(_dims, _exact)
        lowering(_packet.vec)(_run)
        lowering(_packet.default)(_separately)


@lowering(aten.grid_sampler_2d.default)
def grid_sampler_2d(
    x: TensorLike,
    grid: TensorLike,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Any:
    """Values at the points of a grid: [batch, channels, height, width] at [batch, rows, columns, (x,
    y)]."""
    return _sampled(x, grid, interpolation_mode, padding_mode, align_corners)


@lowering(aten.grid_sampler_3d.default)
def grid_sampler_3d(
    x: TensorLike,
    grid: TensorLike,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Any:
    """The same of three dims, by points (x, y, z)."""
    return _sampled(x, grid, interpolation_mode, padding_mode, align_corners)


BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2
"""PyTorch's numbers for how points are read, and what is beyond the border."""


def _sampled(x: TensorLike, grid: TensorLike, mode: int, padding: int, aligned: bool) -> Any:
    dtype, held = x.dtype, wide(x.dtype)
    x, grid = as_dtype(x, held), as_dtype(grid, held)
    sizes = x.shape[2:]
    # The last coordinate is that of the first dim.
    places = []
    for number, size in enumerate(sizes):
        given = grid[..., len(sizes) - 1 - number]
        place = (given + 1) / 2 * (size - 1) if aligned else ((given + 1) * size - 1) / 2
        places.append(place if mode == BICUBIC else _within(place, size, padding, aligned))
    if mode == NEAREST:
        taps = [[(jnp.round(jax.lax.stop_gradient(place)), None)] for place in places]
    elif mode == BILINEAR:
        taps = [_two(place) for place in places]
    else:
        taps = [_four(place) for place in places]
    total: Any = 0
    for chosen in itertools.product(*taps):
        spots, share = [], None
        inside: Any = True
        for (spot, weight), size in zip(chosen, sizes, strict=True):
            if mode == BICUBIC:
                spot = _within(spot, size, padding, aligned)
            inside = inside & (spot >= 0) & (spot <= size - 1)
            # What is no number reads the first entry.
            spot = jnp.where(spot == spot, spot, 0)
            spots.append(jnp.clip(spot, 0, size - 1).astype(jnp.int32))
            if weight is not None:
                share = weight if share is None else share * weight
        # Channels last while reading: rows of a batch have points of their own.
        read = jax.vmap(lambda image, *at: image[(slice(None), *at)])(x, *spots)
        read = jnp.where(inside[:, None], read, jnp.zeros((), held))
        total = total + (read if share is None else read * share[:, None])
    return total.astype(dtype)


def _within(place: TensorLike, size: int, padding: int, aligned: bool) -> Any:
    """A place by what is beyond the border."""
    if padding == ZEROS:
        return place
    if padding == REFLECTION:
        low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
        span = high - low
        if span <= 0:
            return jnp.zeros_like(place)
        away = jnp.abs(place - low)
        flips = jnp.floor(away / span)
        rest = away - flips * span
        place = jnp.where(flips % 2 == 0, rest + low, span - rest + low)
    inside = (place > 0) & (place < size - 1)
    return jnp.where(inside, place, jax.lax.stop_gradient(jnp.clip(place, 0, size - 1)))


def _two(place: TensorLike) -> list[tuple[Any, Any]]:
    first = jax.lax.stop_gradient(jnp.floor(place))
    return [(first, first + 1 - place), (first + 1, place - first)]


def _four(place: TensorLike) -> list[tuple[Any, Any]]:
    first = jax.lax.stop_gradient(jnp.floor(place))
    t = place - first
    shares = (_far(t + 1), _near(t), _near(1 - t), _far(2 - t))
    return [(first + offset, share) for offset, share in zip((-1, 0, 1, 2), shares, strict=True)]
