"""Convolutions of any number of dims, and patches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings.promotion import as_dtype
from tailrace.torch.lowerings.table import lowering
from tailrace.torch.torchax.ops import compositions

aten = torch.ops.aten


@lowering(aten.convolution.default)
def convolution(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """A convolution, or a transposed one, of [batch, channels, *dims] or of one row of a batch."""
    dims = weight.ndim - 2
    alone = x.ndim == dims + 1
    x = x[None] if alone else x
    # PyTorch takes one number for all dims.
    stride, padding, dilation, output_padding = (
        tuple(part) * dims if len(part) == 1 else tuple(part)
        for part in (stride, padding, dilation, output_padding)
    )
    if transposed:
        out = _transposed(x, weight, stride, padding, dilation, output_padding, groups)
    else:
        out = jax.lax.conv_general_dilated(
            x,
            weight,
            stride,
            [(pad, pad) for pad in padding],
            rhs_dilation=dilation,
            dimension_numbers=_layout(dims),
            feature_group_count=groups,
        )
    if bias is not None:
        out = out + bias.reshape((1, -1) + (1,) * dims)
    return out[0] if alone else out


def _layout(dims: int) -> jax.lax.ConvDimensionNumbers:
    order = tuple(range(dims + 2))
    return jax.lax.ConvDimensionNumbers(order, order, order)


def _transposed(
    x: TensorLike,
    weight: TensorLike,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """A convolution of what is spread by the stride, with the window turned around."""
    dims = weight.ndim - 2
    spans = [gap * (size - 1) for gap, size in zip(dilation, weight.shape[2:], strict=True)]
    widths = [
        (span - pad, span - pad + more)
        for span, pad, more in zip(spans, padding, output_padding, strict=True)
    ]
    # [in, out / groups, ...] as [out, in / groups, ...].
    inner = weight.shape[0] // groups
    parts = weight.reshape(groups, inner, *weight.shape[1:])
    parts = jnp.swapaxes(parts, 1, 2).reshape(-1, inner, *weight.shape[2:])
    parts = jnp.flip(parts, tuple(range(2, 2 + dims)))
    return jax.lax.conv_general_dilated(
        x,
        parts,
        (1,) * dims,
        widths,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=_layout(dims),
        feature_group_count=groups,
    )


@lowering(aten.col2im.default)
def col2im(
    x: TensorLike,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """Patches added up to an image."""
    plain = compositions.COMPOSITIONS[aten.col2im.default]
    return plain(x, output_size, kernel_size, dilation, padding, stride)


@lowering(aten.im2col.default)
def im2col(
    x: TensorLike,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """The patches of an image, as columns."""
    alone = x.ndim == 3
    x = x[None] if alone else x
    x = jnp.pad(x, [(0, 0), (0, 0), *[(pad, pad) for pad in padding]])
    counts = [
        (size - gap * (window - 1) - 1) // step + 1
        for size, gap, window, step in zip(x.shape[2:], dilation, kernel_size, stride, strict=True)
    ]
    parts = []
    for place in itertools.product(*map(range, kernel_size)):
        first = [number * gap for number, gap in zip(place, dilation, strict=True)]
        rows, columns = (
            slice(start, start + (n - 1) * step + 1, step)
            for start, n, step in zip(first, counts, stride, strict=True)
        )
        parts.append(x[:, :, rows, columns])
    found = jnp.stack(parts, 2).reshape(len(x), x.shape[1] * len(parts), int(np.prod(counts)))
    found = as_dtype(found, x.dtype)
    return found[0] if alone else found
