"""The same initial values and random data in every run: they depend on shapes alone.

Backends of Keras draw other random numbers from one seed. Values that follow from the shape also do
not depend on how often or in which order weights are made.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def same_initial_values() -> None:
    """Replace the random initializers of Keras."""
    import keras

    def values(self: Any, shape: Any, dtype: Any = None, **_: Any) -> Any:
        limit = np.sqrt(3.0 / max(1, np.prod(shape[:-1])))
        drawn = np.random.default_rng(list(shape)).uniform(-limit, limit, shape)
        return keras.ops.convert_to_tensor(drawn.astype("float32"), dtype)

    kinds: list[Any] = [
        keras.initializers.Orthogonal,
        keras.initializers.RandomNormal,
        keras.initializers.RandomUniform,
        keras.initializers.TruncatedNormal,
        keras.initializers.VarianceScaling,
    ]
    for kind in kinds:
        kind.__call__ = values


def same_random_data(plain: bool) -> None:
    """Replace `tf.random.uniform`, from which some programs make their data.

    Args:
        plain: whether that of TensorFlow itself is replaced.
    """
    if plain:
        import tensorflow as tf
    else:
        from tailrace.compat import tensorflow as tf

    def uniform(
        shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = "float32", **_: Any
    ) -> Any:
        high = 1 if maxval is None else maxval
        drawn = np.random.default_rng(list(shape)).uniform(minval, high, shape)
        return tf.constant(drawn.astype(tf.as_dtype(dtype).as_numpy_dtype))

    if plain:
        tf.random.uniform = uniform
    else:
        from tailrace.compat.tensorflow.operations.table import OPERATIONS

        OPERATIONS["random.uniform"] = uniform
