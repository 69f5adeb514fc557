"""What a Keras model is refused that would be lost in silence: distribution, values that do not fit."""

import jax
import keras
import numpy as np
import pytest

import tailrace.keras as tk
from tailrace.errors import OptionError, TailraceError

X = np.linspace(0, 1, 24, dtype=np.float32).reshape(24, 1)


@pytest.mark.parametrize("size", [1, 4])
def test_data_that_does_not_fit(size):
    """Batches that are moved alone, and blocks of them."""
    with tk.Strategy().scope():
        model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=size)
    whole = np.ones((24, 1), np.int64)
    whole[13] = 2**40 + 5
    batches = [(whole[n : n + 4], X[n : n + 4]) for n in range(0, 24, 4)]
    with pytest.raises(TailraceError, match="Received: 1099511627781 in leaf "):
        model.fit((batch for batch in batches), verbose=0)


@pytest.mark.parametrize("kind", ["DataParallel", "ModelParallel"])
def test_a_distribution_of_keras(kind):
    devices = [str(device) for device in jax.devices()[:2]]
    if kind == "DataParallel":
        found = keras.distribution.DataParallel(devices=devices)
    else:
        grid = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], devices=devices)
        layouts = keras.distribution.LayoutMap(grid)
        layouts[".*kernel"] = (None, "model")
        found = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    keras.distribution.set_distribution(found)
    try:
        with tk.Strategy().scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        x = np.ones((8, 8), np.float32)
        calls = (
            lambda: model.fit(x, x[:, :4], verbose=0),
            lambda: model.evaluate(x, x[:, :4], verbose=0),
            lambda: model.predict(x, verbose=0),
            lambda: model.train_on_batch(x, x[:, :4]),
        )
        for call in calls:
            with pytest.raises(OptionError, match=f"keras.distribution is not used .*: {kind}"):
                call()
    finally:
        keras.distribution.set_distribution(None)
