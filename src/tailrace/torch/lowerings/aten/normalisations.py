"""Normalisation over a layer, groups of channels, or a batch; statistics in 32 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings.promotion import as_dtype, wide
from tailrace.torch.lowerings.table import lowering
from tailrace.torch.torchax.ops.layers import normalised

aten = torch.ops.aten


def layer_normalised(
    x: TensorLike, dims: int, weight: TensorLike, bias: TensorLike, eps: float
) -> tuple[Any, Any, Any]:
    """The last dims normalised; their mean, and the inverse of their deviation."""
    held = wide(x.dtype)
    full = as_dtype(x, held)
    axes = tuple(range(x.ndim - dims, x.ndim))
    mean = jnp.mean(full, axes, keepdims=True)
    away = full - mean
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(away), axes, keepdims=True) + eps)
    out = away * scale
    out = out if weight is None else out * as_dtype(weight, held)
    out = out if bias is None else out + as_dtype(bias, held)
    return out.astype(x.dtype), mean, scale


@lowering(aten.native_layer_norm.default)
def native_layer_norm(
    x: TensorLike, shape: Sequence[int], weight: TensorLike, bias: TensorLike, eps: float
) -> tuple[Any, Any, Any]:
    """The last dims normalised; mean and inverse deviation."""
    out, mean, scale = layer_normalised(x, len(shape), weight, bias, eps)
    kept = x.dtype if weight is None or weight.dtype == x.dtype else mean.dtype
    return out, mean.astype(kept), scale.astype(kept)


@lowering(aten.native_group_norm.default)
def native_group_norm(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Any, Any, Any]:
    """Groups of channels normalised; mean and inverse deviation of each."""
    held = wide(x.dtype)
    grouped = as_dtype(x, held).reshape(N, group, -1)
    mean = jnp.mean(grouped, 2, keepdims=True)
    away = grouped - mean
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(away), 2, keepdims=True) + eps)
    out = (away * scale).reshape(x.shape)
    shape = (1, C, *(1,) * (x.ndim - 2))
    out = out if weight is None else out * as_dtype(weight, held).reshape(shape)
    out = out if bias is None else out + as_dtype(bias, held).reshape(shape)
    kept = x.dtype if weight is None or weight.dtype == x.dtype else held
    return out.astype(x.dtype), mean[:, :, 0].astype(kept), scale[:, :, 0].astype(kept)


def _batch_normalised(
    x: TensorLike, weight: TensorLike, bias: TensorLike, eps: float
) -> tuple[Any, Any, Any]:
    """By the batch's own statistics; mean and biased variance of each channel."""
    held = wide(x.dtype)
    factor = None if weight is None else as_dtype(weight, held)
    out, mean, var = normalised(as_dtype(x, held), factor, eps)
    if bias is not None:
        out = out + as_dtype(bias, held).reshape((1, -1) + (1,) * (x.ndim - 2))
    return out.astype(x.dtype), mean, var


def _by_running(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike,
    mean: TensorLike,
    var: TensorLike,
    eps: float,
) -> Any:
    """By statistics of before."""
    held = wide(x.dtype)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    scale = jax.lax.rsqrt(as_dtype(var, held) + eps)
    scale = scale if weight is None else scale * as_dtype(weight, held)
    out = (as_dtype(x, held) - as_dtype(mean, held).reshape(shape)) * scale.reshape(shape)
    if bias is not None:
        out = out + as_dtype(bias, held).reshape(shape)
    return out.astype(x.dtype)


def _advanced(old: TensorLike, value: TensorLike, momentum: float) -> Any:
    """A running statistic, moved towards that of this batch; it carries no gradient."""
    held = wide(old.dtype)
    new = as_dtype(old, held) * (1 - momentum) + as_dtype(value, held) * momentum
    return jax.lax.stop_gradient(new.astype(old.dtype))


@lowering(aten._native_batch_norm_legit_functional.default)
def batch_norm(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike,
    running_mean: TensorLike,
    running_var: TensorLike,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any, Any, Any]:
    """Channels normalised over the batch; statistics of the batch, and the running ones after it."""
    if not training:
        out = _by_running(x, weight, bias, running_mean, running_var, eps)
        empty = jnp.zeros((0,), wide(x.dtype))
        return out, empty, empty, running_mean, running_var
    out, mean, var = _batch_normalised(x, weight, bias, eps)
    count = math.prod(x.shape) // x.shape[1]
    # PyTorch normalises by the biased variance and keeps the unbiased one.
    unbiased = var * (count / max(1, count - 1))
    return (
        out,
        mean,
        jax.lax.rsqrt(var + eps),
        _advanced(running_mean, mean, momentum),
        _advanced(running_var, unbiased, momentum),
    )


@lowering(aten._native_batch_norm_legit.default)
def batch_norm_in_place(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike,
    running_mean: TensorLike,
    running_var: TensorLike,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any]:
    """The same without the running statistics, which a functional graph does not write."""
    return batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@lowering(aten._native_batch_norm_legit.no_stats)
def batch_norm_alone(
    x: TensorLike, weight: TensorLike, bias: TensorLike, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """By the batch's own statistics, which are not kept."""
    out, mean, var = _batch_normalised(x, weight, bias, eps)
    return out, mean, jax.lax.rsqrt(var + eps)


@lowering(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike,
    running_mean: TensorLike,
    running_var: TensorLike,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any]:
    """By the running statistics."""
    empty = jnp.zeros((0,), wide(x.dtype))
    return _by_running(x, weight, bias, running_mean, running_var, eps), empty, empty


@lowering(aten._fused_rms_norm.default)
def rms_norm(
    x: TensorLike, shape: Sequence[int], weight: TensorLike, eps: float | None
) -> tuple[Any, Any]:
    """The last dims divided by the root of their mean square; and its inverse."""
    held = wide(x.dtype)
    full = as_dtype(x, held)
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(full), axes, keepdims=True) + eps)
    out = full * scale
    out = out if weight is None else out * as_dtype(weight, held)
    return out.astype(x.dtype), scale
