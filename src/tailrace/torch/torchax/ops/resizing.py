"""Resizing with antialiasing, by PyTorch's own weights.

Each entry is a weighted sum along either dim. Sizes are known while tracing, and so are the weights:
PyTorch computes them, as what it makes of an identity matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.torchax.results import plainly

aten = torch.ops.aten


def _weights(
    resize: torch._ops.OpOverload, size: int, out: int, align_corners: bool, scale: float | None
) -> np.ndarray:
    """The share of each entry, [size], in each of the results, [out]; as [size, out]."""
    with plainly():
        # Two equal rows: PyTorch's result for images of one row or column is wrong.
        images = torch.eye(size, device="cpu")[None, :, None].repeat(1, 1, 2, 1)
        return resize(images, [2, out], align_corners, None, scale)[0, :, 0].numpy()


def _resized(
    x: TensorLike,
    output_size: Sequence[int] | None,
    align_corners: bool,
    *scales: Any,
    resize: torch._ops.OpOverload,
) -> Any:
    """With one scale for each dim, or one argument for both, which may take the place of the size."""
    given = scales[0] if len(scales) == 1 else scales
    factors = tuple(given or (None, None))
    sizes = x.shape[-2:]
    outs = output_size or [int(s * f) for s, f in zip(sizes, factors, strict=True)]
    if output_size is not None and len(scales) == 1:
        factors = (None, None)  # the size decides
    high, wide = (
        jnp.asarray(_weights(resize, size, out, align_corners, factor), x.dtype)
        for size, out, factor in zip(sizes, outs, factors, strict=True)
    )
    return jnp.einsum("...hw,hi,wj->...ij", x, high, wide)


RESIZING: dict[Any, Callable[..., Any]] = {
    packet: functools.partial(_resized, resize=packet.default)
    for packet in (aten._upsample_bicubic2d_aa, aten._upsample_bilinear2d_aa)
}
"""By operation."""
