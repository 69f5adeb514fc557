"""Losses: classes by comparison instead of lookup, and slopes that are finite where PyTorch's are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings.promotion import as_dtype, wide
from tailrace.torch.lowerings.table import lowering

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""PyTorch's numbers for how a loss is reduced."""


def of_classes(
    logs: TensorLike,
    target: TensorLike,
    weight: TensorLike,
    reduction: int,
    ignore_index: int,
    smoothing: float = 0.0,
) -> tuple[Any, Any]:
    """The negative logarithm at the class of each row, and the sum of the rows' weights.

    Compared instead of looked up: on a GPU a lookup and its gradient are separate kernels, while a
    comparison is fused with its neighbours. A class out of range, where PyTorch raises an error, is
    NaN.
    """
    axis = min(1, logs.ndim - 1)
    classes = target.astype(jnp.int32)
    if logs.ndim == classes.ndim == 1:
        classes = classes[0]  # one row, and its class
    number = logs.shape[axis]
    shape = (-1, *(1,) * (logs.ndim - 1 - axis))
    counted = classes != ignore_index
    # -1 is no class, so an ignored row hits nothing.
    chosen = jnp.expand_dims(jnp.where(counted, classes, -1), axis)
    hit = chosen == jnp.arange(number, dtype=jnp.int32).reshape(shape)
    zero = jnp.zeros((), logs.dtype)
    loss = -jnp.where(hit, logs, zero).sum(axis)
    factors = None if weight is None else as_dtype(weight, logs.dtype).reshape(shape)
    if factors is None:
        share = counted.astype(logs.dtype)
    else:
        share = jnp.where(hit, factors, zero).sum(axis)
        loss = loss * share
    if smoothing:
        spread = -(logs if factors is None else logs * factors).sum(axis)
        spread = jnp.where(counted, spread, zero)
        loss = (1 - smoothing) * loss + smoothing / number * spread
    outside = counted & ((classes < 0) | (classes >= number))
    loss = jnp.where(outside, jnp.asarray(jnp.nan, logs.dtype), loss)
    total = share.sum()
    if reduction == NONE:
        return loss, total
    return (loss.sum() / total if reduction == MEAN else loss.sum()), total


def cross_entropy(
    x: TensorLike,
    target: TensorLike,
    weight: TensorLike,
    reduction: int,
    ignore_index: int,
    smoothing: float,
) -> Any:
    """Of logits [batch, classes, ...] and class indices."""
    full = as_dtype(x, wide(x.dtype))
    logs = jax.nn.log_softmax(full, min(1, x.ndim - 1))
    return of_classes(logs, target, weight, reduction, ignore_index, smoothing)[0].astype(x.dtype)


@lowering(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    logs: TensorLike, target: TensorLike, weight: TensorLike, reduction: int, ignore_index: int
) -> tuple[Any, Any]:
    """The negative logarithm at the class of each row, and the sum of the rows' weights."""
    loss, total = of_classes(
        as_dtype(logs, wide(logs.dtype)), target, weight, reduction, ignore_index
    )
    total = jnp.zeros_like(total) if reduction == NONE else total
    return loss.astype(logs.dtype), total.astype(logs.dtype)


def _reduced(loss: TensorLike, reduction: int) -> Any:
    return loss if reduction == NONE else loss.mean() if reduction == MEAN else loss.sum()


@jax.custom_jvp
def entropy(x: TensorLike, y: TensorLike) -> Any:
    """Of a probability; logarithms end at -100, as in PyTorch."""
    return (y - 1) * jnp.maximum(jnp.log1p(-x), -100) - y * jnp.maximum(jnp.log(x), -100)


@entropy.defjvp
def _entropy_jvp(given: TensorLike, tangents: TensorLike) -> Any:
    """PyTorch's own slope: finite at the probabilities 0 and 1, where that of the formula is not."""
    (x, y), (dx, dy) = given, tangents
    slope = (x - y) / jnp.maximum((1 - x) * x, 1e-12)
    turn = jnp.maximum(jnp.log1p(-x), -100) - jnp.maximum(jnp.log(x), -100)
    return entropy(x, y), slope * dx + turn * dy


@lowering(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    x: TensorLike, target: TensorLike, weight: TensorLike = None, reduction: int = MEAN
) -> Any:
    """Of probabilities."""
    held = wide(x.dtype)
    loss = entropy(as_dtype(x, held), as_dtype(target, held))
    if weight is not None:
        loss = loss * as_dtype(weight, held)
    return _reduced(loss, reduction).astype(x.dtype)


@lowering(aten._ctc_loss.Tensor, aten._ctc_loss.default)
def ctc_loss(
    log_probs: TensorLike,
    targets: TensorLike,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Any, Any]:
    """Of log-probabilities [time, batch, classes] and padded targets [batch, length]; and a residual of
    PyTorch's that is empty here."""
    import optax

    if targets.ndim != 2:
        raise ValueError(
            f"ctc_loss takes padded targets [batch, length]. Received: {list(targets.shape)}"
        )
    alone = log_probs.ndim == 2
    logits = jnp.swapaxes(log_probs[:, None] if alone else log_probs, 0, 1)

    def padding(lengths: Any, count: int) -> Any:
        found = jnp.atleast_1d(jnp.asarray(lengths))
        return (jnp.arange(count)[None] >= found[:, None]).astype(logits.dtype)

    unread = padding(input_lengths, logits.shape[1])
    unused = padding(target_lengths, targets.shape[1])
    # It applies a softmax, which changes no log-probabilities.
    loss = optax.ctc_loss(logits, unread, targets, unused, blank_id=blank)
    # optax has a large number, 1e5, in place of infinity: no path of this length has these labels.
    loss = jnp.where(loss > 1e4, 0 if zero_infinity else jnp.inf, loss)
    return loss[0] if alone else loss, jnp.zeros((0,), loss.dtype)
