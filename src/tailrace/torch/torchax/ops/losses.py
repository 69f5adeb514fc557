"""Losses that replace torchax's, which support less.

Each takes and returns tensors of the traced forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch.nn.functional as functional

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings.aten.losses import entropy
from tailrace.torch.tracing.watch import Watch


def _nll_loss(
    watch: Watch,
    input: TensorLike,
    target: TensorLike,
    weight: TensorLike = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Compares class indices instead of looking them up: on a GPU a lookup and its gradient are
    separate kernels, while a comparison is fused with its neighbours."""
    x, classes = input.jax(), target.jax()
    if x.ndim == classes.ndim == 1 and len(classes) == 1:
        classes = classes[0]  # one row, and its class
    axis = min(1, x.ndim - 1)
    how = _reduction(reduction, size_average, reduce)
    if not _fit_together(x, classes, weight, axis) or how not in _REDUCTIONS:
        return NotImplemented  # refused there, in PyTorch's words
    classes = classes.astype(jnp.int32)
    shape = (-1, *(1,) * (x.ndim - 1 - axis))
    counted = classes != ignore_index
    # -1 is no class, so an ignored row hits nothing.
    chosen = jnp.expand_dims(jnp.where(counted, classes, -1), axis)
    hit = chosen == jnp.arange(x.shape[axis]).reshape(shape)
    loss = -jnp.where(hit, x, 0).sum(axis)
    # An invalid class index: PyTorch would raise an error.
    loss = jnp.where(counted & ((classes < 0) | (classes >= x.shape[axis])), jnp.nan, loss)
    if weight is None:
        share = counted.astype(x.dtype)
    else:
        share = jnp.where(hit, weight.jax().astype(x.dtype).reshape(shape), 0).sum(axis)
        loss = loss * share
    return watch.tensor(loss.sum() / share.sum() if how == "mean" else _reduced(loss, how))


def _fit_together(x: TensorLike, classes: TensorLike, weight: TensorLike, axis: int) -> bool:
    """Whether there is one class for each row, and one weight for each class."""
    rows = (*x.shape[:axis], *x.shape[axis + 1 :])
    weighed = weight is None or tuple(weight.shape) == (x.shape[axis],)
    return classes.shape == rows and jnp.issubdtype(classes.dtype, jnp.integer) and weighed


def _cross_entropy(
    watch: Watch,
    input: TensorLike,
    target: TensorLike,
    weight: TensorLike = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Of classes; that of probabilities, and with smoothed labels, is torchax's."""
    if label_smoothing or jnp.issubdtype(target.jax().dtype, jnp.floating):
        return NotImplemented
    axis = min(1, input.ndim - 1)
    logs = watch.tensor(jax.nn.log_softmax(input.jax(), axis))
    return _nll_loss(watch, logs, target, weight, size_average, ignore_index, reduce, reduction)


def _gaussian_nll_loss(
    watch: Watch,
    input: TensorLike,
    target: TensorLike,
    var: TensorLike,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """Without PyTorch's check that no variance is negative, which would branch on values."""
    mean, value = input.jax(), target.jax()
    spread = jnp.asarray(var, mean.dtype) if isinstance(var, float) else var.jax()
    # One variance for all entries of a row.
    if spread.ndim < mean.ndim and spread.ndim:
        spread = spread[..., None]
    # Clamped without touching the gradient, as PyTorch does.
    spread = spread + jax.lax.stop_gradient(jnp.maximum(spread, eps) - spread)
    loss = 0.5 * (jnp.log(spread) + jnp.square(mean - value) / spread)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return watch.tensor(_reduced(loss, reduction))


def _multilabel_margin_loss(
    watch: Watch,
    input: TensorLike,
    target: TensorLike,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Targets are the classes before the first -1 of each row."""
    x, y = jnp.atleast_1d(input.jax()), jnp.atleast_1d(target.jax())
    one = x.ndim == 1
    x, y = (x[None], y[None]) if one else (x, y)
    classes = x.shape[1]
    # True up to the first -1: what follows it does not count, even if it is a class.
    real = jnp.cumprod(y >= 0, axis=1).astype(bool)
    # The index `classes` is of no class: its row is empty.
    hit = jax.nn.one_hot(jnp.where(real, y, classes), classes, dtype=bool).any(1)
    scores = jnp.take_along_axis(x, jnp.where(real, y, 0), axis=1)
    margins = jnp.maximum(0, 1 - (scores[:, :, None] - x[:, None, :]))
    counted = real[:, :, None] & ~hit[:, None, :]
    loss = jnp.where(counted, margins, 0).sum((1, 2)) / classes
    how = _reduction(reduction, size_average, reduce)
    return watch.tensor(_reduced(loss[0] if one else loss, how))


def _ctc_loss(
    watch: Watch,
    log_probs: TensorLike,
    targets: TensorLike,
    input_lengths: TensorLike,
    target_lengths: TensorLike,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """Through optax; targets are padded rows, [batch, length]."""
    import optax

    logits, labels = log_probs.jax(), targets.jax()
    if logits.ndim != 3 or labels.ndim != 2:
        raise NotImplementedError(
            f"ctc_loss takes log-probabilities [time, batch, classes] and padded targets [batch, "
            f"length]. Received: {list(logits.shape)} and {list(labels.shape)}"
        )

    def padding(lengths: TensorLike, count: int) -> Any:
        found = lengths.jax() if hasattr(lengths, "jax") else jnp.asarray(lengths)
        return (jnp.arange(count)[None] >= found[:, None]).astype(logits.dtype), found

    # optax has the batch first. It applies a softmax, which changes no log-probabilities.
    logits = jnp.swapaxes(logits, 0, 1)
    unread, _ = padding(input_lengths, logits.shape[1])
    unused, lengths = padding(target_lengths, labels.shape[1])
    loss = optax.ctc_loss(logits, unread, labels, unused, blank_id=blank)
    # optax has a large number, 1e5, in place of infinity: no path of this length has these labels.
    loss = jnp.where(loss > 1e4, 0 if zero_infinity else jnp.inf, loss)
    if reduction == "mean":
        return watch.tensor((loss / jnp.maximum(lengths, 1)).mean())
    return watch.tensor(_reduced(loss, reduction))


def _binary_cross_entropy(
    watch: Watch,
    input: TensorLike,
    target: TensorLike,
    weight: TensorLike = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Of probabilities."""
    if target.shape != input.shape:
        return NotImplemented  # refused there, in PyTorch's words
    x = input.jax()
    wide = x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x
    loss = entropy(wide, target.jax().astype(wide.dtype))
    if weight is not None:
        loss = loss * weight.jax().astype(wide.dtype)
    how = _reduction(reduction, size_average, reduce)
    return watch.tensor(_reduced(loss, how).astype(x.dtype))


def _reduction(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    """How a loss is reduced; PyTorch's older flags win, as they do there."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _reduced(loss: TensorLike, reduction: str) -> Any:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return _REDUCTIONS[reduction](loss)


_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "mean": jnp.mean,
    "sum": jnp.sum,
    "none": lambda loss: loss,
}


LOSSES: dict[Any, Callable[..., Any]] = {
    functional.binary_cross_entropy: _binary_cross_entropy,
    functional.cross_entropy: _cross_entropy,
    functional.ctc_loss: _ctc_loss,
    functional.gaussian_nll_loss: _gaussian_nll_loss,
    functional.multilabel_margin_loss: _multilabel_margin_loss,
    functional.nll_loss: _nll_loss,
}
"""The replaced losses of PyTorch, and their replacements."""
