"""Keras mixes dtypes as JAX does by default, and names models anew in every test."""

from importlib.util import find_spec

import jax
import pytest

if find_spec("keras"):  # else every file of this folder is skipped
    import tailrace.keras as tk  # noqa: F401  (chooses the backend, before anybody imports keras)


@pytest.fixture(autouse=True)
def _as_keras_expects():
    import keras

    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")
    with jax.numpy_dtype_promotion("standard"):
        yield
    keras.config.set_dtype_policy("float32")
