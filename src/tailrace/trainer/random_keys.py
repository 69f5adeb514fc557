"""Random keys as the numbers that they are made of, and back: NumPy and files hold no keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a leaf holds typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_numbers(leaf: jax.Array) -> jax.Array:
    """A leaf without keys: their numbers, or the leaf itself.

    >>> as_numbers(jax.random.key(3, impl="threefry2x32")).tolist()
    [0, 3]
    """
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def as_keys(numbers: jax.Array | np.ndarray, generator: str) -> jax.Array:
    """Keys of a generator from their numbers."""
    return jax.random.wrap_key_data(jnp.asarray(numbers), impl=generator)


def generator_of(keys: jax.Array) -> str:
    """The name of the generator that keys belong to: the same numbers mean others to another one."""
    return str(jax.random.key_impl(keys))
