"""Initializers whose defaults in TensorFlow 1 are not those of TensorFlow 2 and Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tailrace.base.array_like import DTypeLike
from tailrace.compat.arguments import SeedLike


def random_normal_initializer(
    mean: float = 0.0, stddev: float = 1.0, seed: SeedLike = None, dtype: DTypeLike = None
) -> Any:
    """Normal numbers, of deviation 1 (that of TensorFlow 2 is 0.05)."""
    del dtype  # a variable says its own
    return keras.initializers.RandomNormal(mean, stddev, seed)


def random_uniform_initializer(
    minval: float = 0.0,
    maxval: float | None = None,
    seed: SeedLike = None,
    dtype: DTypeLike = None,
) -> Any:
    """Numbers between 0 and 1 (those of TensorFlow 2 are between -0.05 and 0.05)."""
    del dtype
    return keras.initializers.RandomUniform(minval, 1.0 if maxval is None else maxval, seed)


def truncated_normal_initializer(
    mean: float = 0.0, stddev: float = 1.0, seed: SeedLike = None, dtype: DTypeLike = None
) -> Any:
    """Normal numbers of deviation 1, none of which is further from the mean than 2 (Keras' is 0.05)."""
    del dtype
    return keras.initializers.TruncatedNormal(mean, stddev, seed)


INITIALIZERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        random_normal_initializer,
        random_uniform_initializer,
        truncated_normal_initializer,
    )
}
for _function in INITIALIZERS.values():
    _function.is_class = True  # type: ignore[attr-defined]  # for `initializer=tf.random_normal_initializer`
