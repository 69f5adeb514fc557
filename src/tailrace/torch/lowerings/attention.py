"""Attention: the form that runs, by shapes, dtypes and device.

`F.scaled_dot_product_attention`, and with it `nn.MultiheadAttention` and PyTorch's transformer layers,
are implemented here. cuDNN's fused kernel never writes the scores to memory. If it does not apply, long
sequences are computed in blocks of queries, whose scores are recomputed in the backward pass; short
ones directly. Fully masked rows are 0, as in PyTorch. A mask whose values are known while tracing is
recognised where it is causal, or hides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.devices import devices
from tailrace.jaxprs.internals import Tracer

BLOCK = 512
"""The queries per block."""

LONG = 2048 * 2048
"""The number of scores per head from which attention is computed in blocks."""

PADDED = 10**7
"""The number of scores of all heads from which an odd number of rows is padded for cuDNN's kernel,
whose backward pass refuses it: measured on an H200, 30 to 100 million take 0.2 to 0.5 of the plain
form's time, and 2 to 4 million 1.2 to 1.6."""


def attend(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    attn_mask: TensorLike = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    next_key: Callable[[], jax.Array],
) -> Any:
    """Attention of arrays [..., heads, rows, features]; dropout draws from `next_key()`."""
    if is_causal and attn_mask is not None:
        raise RuntimeError(
            "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    attn_mask, is_causal = _recognised(attn_mask, is_causal, query.shape[-2], key.shape[-2])
    # Before the form is chosen: none of them has PyTorch's rule for rows without keys.
    mask, nothing = _opened(attn_mask)
    if not dropout_p and fits_fused(query, key, value, mask, is_causal):
        out = _fused(query, key, value, mask, is_causal, scale)
    else:
        # cuDNN's kernel shares keys among heads itself; the others need them repeated.
        if enable_gqa:
            key, value = (_repeated(part, query.shape[-3]) for part in (key, value))
        drop = _dropping(dropout_p, next_key()) if dropout_p else _kept
        rows, columns = query.shape[-2], key.shape[-2]
        # Not with dropout, whose one key would give every block the same mask.
        in_blocks = not dropout_p and rows * columns >= LONG and rows % BLOCK == 0
        form = _blockwise if in_blocks else _plain
        out = form(query, key, value, mask, is_causal, scale, drop)
    return out if nothing is None else jnp.where(nothing, 0, out).astype(out.dtype)


def fits_fused(
    query: TensorLike, key: TensorLike, value: TensorLike, mask: TensorLike, is_causal: bool
) -> bool:
    """Whether cuDNN's kernel supports these: on a GPU, in 16 bits, with few enough features."""
    rows, features = query.shape[-2:]
    return (
        devices.available()[0].platform == "gpu"
        and query.ndim == key.ndim == value.ndim == 4
        and query.dtype in (jnp.float16, jnp.bfloat16)
        and query.dtype == key.dtype == value.dtype
        and features % 8 == 0
        and features <= 128
        and value.shape[-1] == features
        and (not is_causal or rows == key.shape[-2])
        and (mask is None or mask.ndim == 4)
        and (_is_even(query, key) or (mask is None and _is_worth_padding(query, key)))
    )


def _is_even(query: TensorLike, key: TensorLike) -> bool:
    return query.shape[-2] % 2 == 0 and key.shape[-2] % 2 == 0


def _is_worth_padding(query: TensorLike, key: TensorLike) -> bool:
    batch, heads, rows, _ = query.shape
    return batch * heads * rows * key.shape[-2] >= PADDED


def _recognised(mask: TensorLike, is_causal: bool, rows: int, columns: int) -> tuple[Any, bool]:
    """The mask and whether it is causal: one that is known and hides nothing is none, and one that
    hides what is later is causality."""
    if mask is None or is_causal or isinstance(mask, Tracer):
        return mask, is_causal
    held = np.asarray(mask)
    if held.dtype == bool:
        seen = held
    else:
        # A number so low that nothing is left of a score next to it.
        low = held <= (-6e4 if held.dtype == np.float16 else -1e9)
        if not ((held == 0) | low).all():
            return mask, False
        seen = ~low
    if seen.all():
        return None, False
    if seen.shape[-2:] == (rows, columns) and (seen == np.tri(rows, columns, dtype=bool)).all():
        return None, True
    return mask, False


def _fused(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    mask: TensorLike,
    is_causal: bool,
    scale: float,
) -> Any:
    # JAX has rows before heads, PyTorch heads before rows.
    query, key, value = (jnp.swapaxes(part, 1, 2) for part in (query, key, value))
    boolean = mask is not None and mask.dtype == bool
    batch, rows, columns = query.shape[0], query.shape[1], key.shape[1]
    lengths: dict[str, Any] = {}
    if rows % 2 or columns % 2:
        query, key, value = map(_padded, (query, key, value))
        # Causality alone hides the keys that were added.
        if not is_causal:
            lengths = {
                "query_seq_lengths": jnp.full(batch, rows, jnp.int32),
                "key_value_seq_lengths": jnp.full(batch, columns, jnp.int32),
            }
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=None if mask is None or boolean else mask.astype(query.dtype),
        mask=mask if boolean else None,
        scale=scale,
        is_causal=is_causal,
        implementation="cudnn",
        **lengths,
    )
    return jnp.swapaxes(out[:, :rows], 1, 2)


def _padded(part: TensorLike) -> Any:
    """With rows of 0 up to a multiple of 8."""
    return jnp.pad(part, ((0, 0), (0, -part.shape[1] % 8), (0, 0), (0, 0)))


def _plain(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    mask: TensorLike,
    is_causal: bool,
    scale: float,
    drop: Callable[[TensorLike], TensorLike],
    first: int | jax.Array = 0,
) -> Any:
    """Scores, softmax and sum of 16-bit values in 32 bits; `first` is the index of the first row."""
    # At least 32 bits, and 64 where the query has them.
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("...le,...se->...ls", query, key, preferred_element_type=wide) * scale
    if is_causal:
        rows = first + jnp.arange(query.shape[-2])
        scores = jnp.where(rows[:, None] >= jnp.arange(key.shape[-2]), scores, -jnp.inf)
    if mask is not None:
        boolean = mask.dtype == bool
        scores = jnp.where(mask, scores, -jnp.inf) if boolean else scores + mask.astype(wide)
    shares = drop(jax.nn.softmax(scores, -1))
    out = jnp.einsum(
        "...ls,...se->...le", shares.astype(value.dtype), value, preferred_element_type=wide
    )
    return out.astype(query.dtype)


def _blockwise(
    query: TensorLike,
    key: object,
    value: object,
    mask: TensorLike,
    is_causal: bool,
    scale: float,
    drop: Callable[[TensorLike], TensorLike],
) -> Any:
    """Some queries at a time: their scores exist only while their block is computed."""
    count = query.shape[-2] // BLOCK

    # The scores of a block are not kept for the backward pass, which is the point of computing in
    # blocks.
    @jax.checkpoint
    def block(number: jax.Array) -> Any:
        first = number * BLOCK
        some = jax.lax.dynamic_slice_in_dim(query, first, BLOCK, -2)
        part = mask
        # A mask that is broadcast over rows is the same for all blocks.
        if mask is not None and mask.ndim >= 2 and mask.shape[-2] > 1:
            part = jax.lax.dynamic_slice_in_dim(mask, first, BLOCK, -2)
        return _plain(some, key, value, part, is_causal, scale, drop, first)

    out = jnp.moveaxis(jax.lax.map(block, jnp.arange(count)), 0, -3)
    return out.reshape(*out.shape[:-3], count * BLOCK, out.shape[-1])


def _opened(mask: TensorLike) -> tuple[Any, Any]:
    """The mask with fully masked rows opened, whose softmax would be NaN, and flags of those rows."""
    if mask is None:
        return None, None
    shut = ~mask if mask.dtype == bool else jnp.isneginf(mask)
    nothing = shut.all(-1, keepdims=True)
    return mask | nothing if mask.dtype == bool else jnp.where(nothing, 0, mask), nothing


def _repeated(part: TensorLike, heads: int) -> Any:
    return jnp.repeat(part, heads // part.shape[-3], axis=-3)


def _kept(shares: TensorLike) -> Any:
    return shares


def _dropping(rate: float, key: jax.Array) -> Callable[[Any], Any]:
    def drop(shares: TensorLike) -> Any:
        if rate >= 1:
            return jnp.zeros_like(shares)
        stays = jax.random.bernoulli(key, 1 - rate, shares.shape)
        return jnp.where(stays, shares / (1 - rate), 0)

    return drop
