"""Automatic loss scaling: adapts the scale to the gradients, so that they fit in 16 bits.

The loss is multiplied by `loss_scaling` times a factor that starts at 1. After each step the factor is
doubled, or halved if too many gradients are close to the largest number of their dtype. It is a
parameter of the program, because both the loss and the optimizer need it; the module does not see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from tailrace.base.array_like import TensorLike

FACTOR = "lossScaleUpdateFactor"
"""The name of the factor among the parameters of a program."""

_EDGE = 0.0625
"""The fraction of the largest number of its dtype from which a gradient counts as large."""

_SHARE = 1e-7
"""The fraction of large gradients above which the factor is halved."""

_MOST = 2.0**15
"""The largest loss scale: the largest power of two in 16 bits."""


def next_factor(gradients: Mapping[str, Any], factor: TensorLike, loss_scaling: TensorLike) -> Any:
    """The factor for the next step, from the gradients of the scaled loss in this one."""
    counts = [_large(gradient) for gradient in gradients.values()]
    large = sum(counts, jnp.float32(0))
    total = float(sum(gradient.size for gradient in gradients.values()))
    wanted = jnp.where(large > _SHARE * total, factor / 2, factor * 2)
    # The limit is on the whole scale, of which the factor is a part.
    return jnp.minimum(wanted, _MOST / loss_scaling)


def _large(gradient: TensorLike) -> Any:
    edge = float(jnp.finfo(gradient.dtype).max) * _EDGE
    return jnp.sum(~(jnp.abs(gradient) <= edge), dtype=jnp.float32)  # NaN counts too
