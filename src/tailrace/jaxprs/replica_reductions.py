"""Sums and means over replicas: their dtypes and their computation.

A mean is never larger than the largest of its values, but the sum it is computed from may overflow: two
float16 values of 40,000 have a mean but no sum. So a mean is summed in at least 32 bits, as in
`jnp.mean`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.spans.scopes import REPLICAS


def reduced_dtype(dtype: Any, mean: bool) -> Any:
    """The dtype of a sum or mean over replicas, by the rules of `jax.numpy`.

    >>> [str(reduced_dtype(jnp.dtype(d), mean=True)) for d in ("float16", "int8", "bool")]
    ['float16', 'float32', 'float32']
    >>> [str(reduced_dtype(jnp.dtype(d), mean=False)) for d in ("float16", "int8", "bool")]
    ['float16', 'int8', 'int32']
    """
    if mean:
        return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else dtype


def reduced(value: jax.Array, axis: str | None, mean: bool) -> jax.Array:
    """The sum or mean of `value` over the replicas of a mesh axis; `axis` is None for one replica."""
    dtype = reduced_dtype(value.dtype, mean)
    if axis is None:
        return value.astype(dtype)
    with jax.named_scope(REPLICAS):
        # A sum has the dtype of its values, as in `jnp.sum`: overflow there is the caller's choice.
        if not mean:
            return lax.psum(value.astype(dtype), axis)
        narrow = dtype.itemsize < 4
        return lax.pmean(value.astype(jnp.float32 if narrow else dtype), axis).astype(dtype)
