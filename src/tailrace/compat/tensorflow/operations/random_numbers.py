"""Random numbers: `tf.random.*`. They are other numbers than TensorFlow's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from tailrace.base.array_like import DTypeLike, ShapeLike, TensorLike
from tailrace.compat.arguments import SeedLike
from tailrace.compat.ipu.graph.named_variables import set_initial_seed
from tailrace.compat.ipu.graph.state import prepared
from tailrace.compat.tensorflow.dtypes import narrowed
from tailrace.compat.tensorflow.operations.shapes import shape_of
from tailrace.compat.tensorflow.operations.table import operation

_made: dict[str, Any] = {}
# The seed of the first generator, which is made when it is first needed.
_first: list[int] = [0]


def next_seed(seed: SeedLike = None) -> Any:
    """A seed for one draw: the one given, or the next of the process; programs carry it on."""
    if seed is not None:
        return seed
    # Made outside of a program that is being traced, because it is a variable.
    return prepared(_made, "seed", lambda: keras.random.SeedGenerator(_first[0]))


def set_seed(seed: int) -> None:
    """Draw from this seed from now on; Keras' layers too.

    Args:
        seed: the seed.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.random.set_seed(1)
    >>> first = tf.random.normal([2]).tolist()
    >>> tf.random.set_seed(1)
    >>> tf.random.normal([2]).tolist() == first
    True
    """
    _first[0] = int(seed)
    set_initial_seed(seed)
    # The generator is a variable of programs: a new one, so that each draws from the beginning.
    _made.clear()
    keras.utils.set_random_seed(int(seed))


@operation("random.normal", draws=True)
def normal(
    shape: ShapeLike,
    mean: TensorLike = 0.0,
    stddev: TensorLike = 1.0,
    dtype: DTypeLike = "float32",
    seed: SeedLike = None,
) -> Any:
    """Numbers of a normal distribution."""
    drawn = keras.random.normal(shape_of(shape), dtype=str(narrowed(dtype)), seed=next_seed(seed))
    return drawn * jnp.asarray(stddev, drawn.dtype) + jnp.asarray(mean, drawn.dtype)


@operation("random.truncated_normal", draws=True)
def truncated_normal(
    shape: ShapeLike,
    mean: TensorLike = 0.0,
    stddev: TensorLike = 1.0,
    dtype: DTypeLike = "float32",
    seed: SeedLike = None,
) -> Any:
    """Numbers of a normal distribution, at most two deviations from its mean."""
    drawn = keras.random.truncated_normal(
        shape_of(shape), dtype=str(narrowed(dtype)), seed=next_seed(seed)
    )
    return drawn * jnp.asarray(stddev, drawn.dtype) + jnp.asarray(mean, drawn.dtype)


@operation("random.uniform", draws=True)
def uniform(
    shape: ShapeLike,
    minval: TensorLike = 0,
    maxval: TensorLike = None,
    dtype: DTypeLike = "float32",
    seed: SeedLike = None,
) -> Any:
    """Numbers between two, the lower one included."""
    kind = narrowed(dtype)
    if jnp.issubdtype(kind, jnp.integer):
        return keras.random.randint(shape_of(shape), minval, maxval, str(kind), next_seed(seed))
    upper = 1 if maxval is None else maxval
    drawn = keras.random.uniform(shape_of(shape), dtype=str(kind), seed=next_seed(seed))
    return drawn * jnp.asarray(upper - minval, kind) + jnp.asarray(minval, kind)


@operation("random.shuffle", draws=True)
def shuffle(value: TensorLike, seed: SeedLike = None) -> Any:
    """The rows in another order."""
    return keras.random.shuffle(jnp.asarray(value), seed=next_seed(seed))


@operation("random.categorical", draws=True)
def categorical(
    logits: TensorLike, num_samples: int, dtype: DTypeLike = "int64", seed: SeedLike = None
) -> Any:
    """Classes drawn for each row."""
    drawn: Any = keras.random.categorical(jnp.asarray(logits), num_samples, seed=next_seed(seed))
    return drawn.astype(narrowed(dtype))


def _stateless(name: str) -> None:
    plain = {"normal": normal, "truncated_normal": truncated_normal, "uniform": uniform}[name]

    @operation(f"random.stateless_{name}")
    def drawn(shape: ShapeLike, seed: SeedLike, *args: Any, **kwargs: Any) -> Any:
        """The same numbers for the same seed, two integers."""
        # Both numbers count: folded into one, because Keras' functions take a single seed.
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(seed[0]), seed[1]))
        return plain(shape, *args, seed=int(key[0]), **kwargs)


for _name in ("normal", "truncated_normal", "uniform"):
    _stateless(_name)
