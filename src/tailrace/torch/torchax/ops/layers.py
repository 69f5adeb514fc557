"""Layers that replace torchax's: normalisation, embeddings, pooling.

Each takes and returns tensors of the traced forward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch.nn.functional as functional

from tailrace.base.array_like import ShapeLike, TensorLike
from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.torch.tracing.watch import Watch


def _batch_norm(
    watch: Watch,
    input: TensorLike,
    running_mean: TensorLike,
    running_var: TensorLike,
    weight: TensorLike = None,
    bias: TensorLike = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Batch normalisation that also updates the running statistics, as PyTorch's does."""
    x = input.jax()
    if not x.size:  # an empty batch has no statistics
        return watch.tensor(x)
    shape = (1, -1, *(1,) * (x.ndim - 2))
    # Statistics of many values: PyTorch computes them in 32 bits too.
    wide = x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x
    if training:
        count = x.size // x.shape[1]
        if count < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {input.shape}"
            )
        factor = None if weight is None else weight.jax().astype(wide.dtype)
        out, mean, var = normalised(wide, factor, eps)
        if running_mean is not None:
            # PyTorch normalises by the biased variance and keeps the unbiased one.
            unbiased = var * (count / (count - 1))
            _advance(running_mean, mean, momentum)
            _advance(running_var, unbiased, momentum)
    else:
        mean, var = running_mean.jax().astype(wide.dtype), running_var.jax().astype(wide.dtype)
        scale = jax.lax.rsqrt(var + eps)
        if weight is not None:
            scale = scale * weight.jax().astype(wide.dtype)
        out = (wide - mean.reshape(shape)) * scale.reshape(shape)
    if bias is not None:
        out = out + bias.jax().astype(wide.dtype).reshape(shape)
    return watch.tensor(out.astype(x.dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def normalised(x: TensorLike, weight: TensorLike, eps: float) -> tuple[Any, Any, Any]:
    """Channels at dimension 1, normalised and multiplied by `weight`; their mean and variance."""
    axes = (0, *range(2, x.ndim))
    mean = x.mean(axes, keepdims=True)
    # From differences: the mean of squares less the square of the mean cancels where the mean is large.
    var = jnp.square(x - mean).mean(axes, keepdims=True)
    scale = jax.lax.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight.reshape(mean.shape)
    return (x - mean) * scale, mean.ravel(), var.ravel()


@normalised.defjvp
def _normalised_jvp(eps: float, given: Any, tangents: Any) -> Any:
    """The derivative of the whole: JAX's, through mean and variance, has twice as many sums."""
    (x, weight), (step, weight_step) = given, tangents
    out, mean, var = normalised.fun(x, weight, eps)
    axes = (0, *range(2, x.ndim))
    shape = (1, -1, *(1,) * (x.ndim - 2))
    centred = x - mean.reshape(shape)
    inverse = jax.lax.rsqrt(var + eps)
    scale = inverse if weight is None else inverse * weight
    moved = step.mean(axes)
    spread = (centred * step).mean(axes)
    # Multiplied per channel, not per element: the backward pass then adds up `g` and `centred * g`,
    # which are also the gradients of bias and weight.
    along = -scale * inverse * inverse * spread
    if weight is not None:
        along = along + inverse * weight_step
    change = step * scale.reshape(shape) + (-scale * moved).reshape(shape)
    change = change + centred * along.reshape(shape)
    return (out, mean, var), (change, moved, 2 * spread)


def _instance_norm(
    watch: Watch,
    input: TensorLike,
    running_mean: TensorLike = None,
    running_var: TensorLike = None,
    weight: TensorLike = None,
    bias: TensorLike = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalise each row by its statistics; running ones are updated by their mean over the rows."""
    if not use_input_stats:
        return _batch_norm(watch, input, running_mean, running_var, weight, bias, False, 0, eps)
    x = input.jax()
    count = x[0, 0].size
    if count < 2:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {input.shape}"
        )
    axes = tuple(range(2, x.ndim))
    wide = x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x
    mean = wide.mean(axes, keepdims=True)
    var = jnp.square(wide - mean).mean(axes, keepdims=True)
    if running_mean is not None:
        _advance(running_mean, mean.mean((0, *axes)), momentum)
        _advance(running_var, var.mean((0, *axes)) * (count / (count - 1)), momentum)
    out = (wide - mean) * jax.lax.rsqrt(var + eps)
    shape = (1, -1, *(1,) * len(axes))
    if weight is not None:
        out = out * weight.jax().astype(wide.dtype).reshape(shape)
    if bias is not None:
        out = out + bias.jax().astype(wide.dtype).reshape(shape)
    return watch.tensor(out.astype(x.dtype))


def _advance(state: Tree, value: TensorLike, momentum: Any) -> None:
    """Move a running statistic towards that of this batch; the share of it may be a tensor."""
    old = state.jax()
    momentum = momentum.jax().astype(old.dtype) if hasattr(momentum, "jax") else momentum
    new = old * (1 - momentum) + value.astype(old.dtype) * momentum
    # Running statistics carry no gradient from batch to batch.
    state.apply_jax_(lambda _: jax.lax.stop_gradient(new))


def _embedding(
    watch: Watch,
    input: TensorLike,
    weight: TensorLike,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """An embedding, optionally with gradients divided by the frequency of a row."""
    if max_norm is not None:
        raise ProgramError(
            f"embedding has no max_norm here: it would change the weights during the forward pass. "
            f"Received: max_norm={max_norm}. Normalise the rows that are looked up instead, such as "
            f"by F.normalize, or the weights between steps."
        )
    # The plain lookup is torchax's.
    if not scale_grad_by_freq:
        return NotImplemented
    plain: Any = functional.embedding(input, weight, padding_idx)
    index, rows = input.jax(), plain.jax()
    # How often the row of each entry is looked up in this batch.
    times = jnp.zeros(weight.shape[0], rows.dtype).at[index].add(1)[index][..., None]
    scaled = rows / times
    # The rows unchanged, with the gradient of the scaled ones.
    return watch.tensor(jax.lax.stop_gradient(rows) + (scaled - jax.lax.stop_gradient(scaled)))


def _embedding_bag(
    watch: Watch,
    input: TensorLike,
    weight: TensorLike,
    offsets: TensorLike = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: TensorLike = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Of bags that are the rows of a matrix, or that begin at offsets."""
    if max_norm is not None or scale_grad_by_freq:
        raise NotImplementedError(
            "embedding_bag has no lowering for max_norm and scale_grad_by_freq"
        )
    index = input.jax()
    if offsets is None:
        bags = jnp.repeat(jnp.arange(index.shape[0]), index.shape[1])
        count = index.shape[0]
    else:
        starts = offsets.jax()
        starts = starts[:-1] if include_last_offset else starts
        count = starts.shape[0]
        # The bag of each entry: the last one that starts at or before it.
        bags = jnp.searchsorted(starts, jnp.arange(index.size), side="right") - 1
    index = index.ravel()
    kept = (
        jnp.ones(index.shape, bool) if padding_idx is None else index != padding_idx % len(weight)
    )
    rows = weight.jax()[index]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.jax().ravel()[:, None]
    if mode == "max":
        # Padding never wins; a bag of nothing else is 0, as in PyTorch.
        rows = jnp.where(kept[:, None], rows, -jnp.inf)
        out = jax.ops.segment_max(rows, bags, count)
        return watch.tensor(jnp.where(jnp.isneginf(out), 0, out))
    out = jax.ops.segment_sum(jnp.where(kept[:, None], rows, 0), bags, count)
    if mode == "mean":
        counts = jax.ops.segment_sum(kept.astype(out.dtype), bags, count)
        out = out / jnp.maximum(counts, 1)[:, None]
    return watch.tensor(out)


def _adaptive_max_pool(
    watch: Watch,
    input: TensorLike,
    output_size: ShapeLike,
    return_indices: bool = False,
    *,
    dims: int,
) -> Any:
    """Maxima over windows that divide each of the last dims as evenly as possible.

    Of several, the first counts, for the gradient and the index: the last dim is reduced first.
    """
    x = input.jax()
    spatial = x.shape[x.ndim - dims :]
    places = jnp.broadcast_to(jnp.arange(math.prod(spatial)).reshape(spatial), x.shape)
    sizes = output_size if isinstance(output_size, tuple | list) else (output_size,) * dims
    for axis, size in reversed([*zip(range(x.ndim - dims, x.ndim), sizes, strict=True)]):
        length = x.shape[axis]
        count = length if size is None else size
        parts = []
        for i in range(count):
            # PyTorch's windows: floor of the start, ceiling of the end, so neighbours may overlap.
            limits = (i * length // count, -(-(i + 1) * length // count))
            window, where = (jax.lax.slice_in_dim(part, *limits, axis=axis) for part in (x, places))
            first = jnp.argmax(window, axis, keepdims=True)
            parts.append([jnp.take_along_axis(part, first, axis) for part in (window, where)])
        x, places = (jnp.concatenate(part, axis) for part in zip(*parts, strict=True))
    return (watch.tensor(x), watch.tensor(places)) if return_indices else watch.tensor(x)


def _with_indices(
    watch: Watch,
    input: TensorLike,
    output_size: ShapeLike,
    return_indices: bool = False,
    *,
    dims: int,
) -> Any:
    return _adaptive_max_pool(watch, input, output_size, True, dims=dims)


LAYERS: dict[Any, Callable[..., Any]] = {
    functional.adaptive_max_pool1d: functools.partial(_adaptive_max_pool, dims=1),
    functional.adaptive_max_pool2d: functools.partial(_adaptive_max_pool, dims=2),
    functional.adaptive_max_pool3d: functools.partial(_adaptive_max_pool, dims=3),
    functional.adaptive_max_pool1d_with_indices: functools.partial(_with_indices, dims=1),
    functional.adaptive_max_pool2d_with_indices: functools.partial(_with_indices, dims=2),
    functional.adaptive_max_pool3d_with_indices: functools.partial(_with_indices, dims=3),
    functional.batch_norm: _batch_norm,
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
    functional.instance_norm: _instance_norm,
}
"""The replaced layers of PyTorch, and their replacements."""
