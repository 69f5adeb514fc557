"""Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings.table import lowering

aten = torch.ops.aten


def _scaled(found: TensorLike, count: int, normalization: int) -> Any:
    """By PyTorch's numbers: 0 as it is, 1 by the root of the count, 2 by the count."""
    if normalization == 0:
        return found
    return found / (math.sqrt(count) if normalization == 1 else count)


@lowering(aten._fft_c2c.default)
def complex_to_complex(x: TensorLike, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    """Of complex numbers, forward or back."""
    if not dim:
        return x
    axes = tuple(dim)
    count = math.prod(x.shape[axis] for axis in axes)
    # JAX's way back divides by the count, which PyTorch asks for separately.
    found = jnp.fft.fftn(x, axes=axes) if forward else jnp.fft.ifftn(x, axes=axes, norm="forward")
    return _scaled(found, count, normalization)


@lowering(aten._fft_r2c.default)
def real_to_complex(x: TensorLike, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    """Of real numbers; half of the last dim says the rest."""
    axes = tuple(dim)
    count = math.prod(x.shape[axis] for axis in axes)
    found = jnp.fft.rfftn(x, axes=axes) if onesided else jnp.fft.fftn(x, axes=axes)
    return _scaled(found, count, normalization)


@lowering(aten._fft_c2r.default)
def complex_to_real(
    x: TensorLike, dim: Sequence[int], normalization: int, last_dim_size: int
) -> Any:
    """Back to real numbers, of half of the last dim."""
    axes = tuple(dim)
    sizes = [x.shape[axis] for axis in axes[:-1]] + [last_dim_size]
    found = jnp.fft.irfftn(x, s=sizes, axes=axes, norm="forward")
    return _scaled(found, math.prod(sizes), normalization)
