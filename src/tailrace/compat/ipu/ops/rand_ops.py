"""Dropout in programs of the original's kind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import ShapeLike, TensorLike
from tailrace.compat.arguments import SeedLike
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.originals.missing import missing_from
from tailrace.program.in_program import key


def dropout(
    x: TensorLike,
    rate: float = 0.5,
    noise_shape: ShapeLike = None,
    seed: SeedLike = None,
    name: str | None = None,
    **_: Any,
) -> Any:
    """Set elements to zero at random; the others grow by 1 / (1 - rate).

    The random numbers are not those of the original.

    Args:
        x: the value.
        rate: how probable it is that an element is set to zero.
        noise_shape: the shape in which elements are chosen, if not that of `x`.
        seed: two integers: the same elements each time. None: others in each step.
        name: without effect.
        **_: without effect.

    Raises:
        IPUValueError: the rate is not in [0, 1).
        ProgramError: there is no seed, and it is called outside a program.

    >>> from tailrace.compat import ipu
    >>> dropped = ipu.ops.rand_ops.dropout([1.0] * 8, rate=0.5, seed=[1, 2])
    >>> set(dropped.tolist()) <= {0.0, 2.0}
    True
    """
    del name
    if not 0 <= rate < 1:
        raise IPUValueError(f"rate must be in the range [0, 1). Received: {rate}.")
    x = as_array(x)
    # With a seed the same elements in every step, and on every replica.
    keys = key() if seed is None else jax.random.wrap_key_data(jnp.asarray(seed, jnp.uint32))
    keep = jax.random.bernoulli(keys, 1 - rate, tuple(noise_shape or x.shape))
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x)).astype(x.dtype)


__getattr__, __dir__ = missing_from(__name__)
