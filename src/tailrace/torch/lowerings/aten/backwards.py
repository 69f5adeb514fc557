"""Backward passes that stand in a graph, where a module differentiates by itself: those of the
lowerings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings.aten.convolutions import convolution
from tailrace.torch.lowerings.promotion import as_dtype
from tailrace.torch.lowerings.table import LOWERINGS, lowering

aten = torch.ops.aten


def _gradients(
    function: Callable[..., Any], operands: Sequence[Any], slope: TensorLike, wanted: Sequence[bool]
) -> tuple[Any, ...]:
    """The gradients of the first result, of those operands that are wanted; None of others."""
    places = [number for number, one in enumerate(wanted) if one and operands[number] is not None]

    def run(*given: Any) -> Any:
        values = list(operands)
        for place, value in zip(places, given, strict=True):
            values[place] = value
        return function(*values)

    out, pull = jax.vjp(run, *(operands[place] for place in places))
    found = dict(zip(places, pull(as_dtype(slope, out.dtype).reshape(out.shape)), strict=True))
    return tuple(found.get(number) for number in range(len(operands)))


@lowering(aten.convolution_backward.default)
def convolution_backward(
    slope: TensorLike,
    x: TensorLike,
    weight: TensorLike,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    """Of a convolution: those of its input, window and bias."""
    rest = (stride, padding, dilation, transposed, output_padding, groups)

    def run(x: Any, weight: Any) -> Any:
        return convolution(x, weight, None, *rest)

    found = _gradients(run, (x, weight), slope, output_mask[:2])
    axes = (0, *range(2, slope.ndim))
    return (*found, slope.sum(axes) if output_mask[2] else None)


@lowering(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    slope: TensorLike,
    x: TensorLike,
    shape: Sequence[int],
    mean: TensorLike,
    rstd: TensorLike,
    weight: TensorLike,
    bias: TensorLike,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    """Of a layer normalisation: those of its input, weight and bias."""
    axes = tuple(range(x.ndim - len(shape), x.ndim))

    def run(x: Any, weight: Any, bias: Any) -> Any:
        full = x.astype(rstd.dtype)
        # The inverse deviation says which eps was used.
        eps = jax.lax.stop_gradient(1 / jnp.square(rstd) - jnp.var(full, axes, keepdims=True))
        away = full - full.mean(axes, keepdims=True)
        out = away * jax.lax.rsqrt(jnp.square(away).mean(axes, keepdims=True) + eps)
        out = out if weight is None else out * weight.astype(out.dtype)
        out = out if bias is None else out + bias.astype(out.dtype)
        return out.astype(x.dtype)

    return _gradients(run, (x, weight, bias), slope, output_mask)


@lowering(aten.native_group_norm_backward.default)
def native_group_norm_backward(
    slope: TensorLike,
    x: TensorLike,
    mean: TensorLike,
    rstd: TensorLike,
    weight: TensorLike,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    """Of a group normalisation: those of its input, weight and bias."""
    bias = None if weight is None else jnp.zeros_like(weight)
    flat = x.reshape(N, group, -1).astype(rstd.dtype)
    eps = jax.lax.stop_gradient(1 / jnp.square(rstd)[..., None] - jnp.var(flat, 2, keepdims=True))

    def run(x: Any, weight: Any, bias: Any) -> Any:
        full = x.reshape(N, group, -1).astype(rstd.dtype)
        away = full - full.mean(2, keepdims=True)
        out = away * jax.lax.rsqrt(jnp.square(away).mean(2, keepdims=True) + eps)
        out = out.reshape(N, C, -1)
        if weight is not None:
            out = out * weight.reshape(1, C, 1) + bias.reshape(1, C, 1)
        return out.reshape(x.shape).astype(x.dtype)

    return _gradients(run, (x, weight, bias), slope, output_mask)


def _of_pool(forward: torch._ops.OpOverload) -> Callable[..., Any]:
    """Of a pool of one operand, by the arguments of the pool itself."""

    def run(slope: TensorLike, x: TensorLike, *args: Any) -> Any:
        def pooled(x: Any) -> Any:
            found = LOWERINGS[forward](x, *args)
            return found[0] if isinstance(found, tuple) else found

        return _gradients(pooled, (x,), slope, (True,))[0]

    return run


lowering(aten.avg_pool2d_backward.default)(_of_pool(aten.avg_pool2d.default))


@lowering(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(
    slope: TensorLike,
    x: TensorLike,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: TensorLike,
) -> Any:
    """Of maxima: to the places that are given."""
    planes, entries = x.shape[:-2], x.shape[-2] * x.shape[-1]
    found = jnp.zeros((*planes, entries), x.dtype).reshape(-1, entries)
    rows = jnp.arange(len(found))[:, None]
    at = indices.reshape(len(found), -1)
    return found.at[rows, at].add(slope.reshape(len(found), -1)).reshape(x.shape)


@lowering(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(slope: TensorLike, x: TensorLike) -> Any:
    """Of means over windows of nearly equal size."""
    forward = LOWERINGS[aten._adaptive_avg_pool2d.default]
    return _gradients(lambda x: forward(x, slope.shape[-2:]), (x,), slope, (True,))[0]


@lowering(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    slope: TensorLike,
    indices: TensorLike,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Any:
    """Of rows of a table."""
    width = slope.shape[-1]
    at, slope = indices.reshape(-1), slope.reshape(-1, width)
    if scale_grad_by_freq:
        times = jnp.zeros(num_weights, slope.dtype).at[at].add(1)[at]
        slope = slope / times[:, None]
    slope = jnp.where((at == padding_idx)[:, None], jnp.zeros((), slope.dtype), slope)
    return jnp.zeros((num_weights, width), slope.dtype).at[at].add(slope)
