"""What a Keras model is refused that would be lost in silence: distribution, values that do not fit."""

import re

import jax
import keras
import numpy as np
import pytest

import tailrace as tr
import tailrace.keras as tk
from tailrace.errors import OptionError, TailraceError

X = np.linspace(0, 1, 24, dtype=np.float32).reshape(24, 1)


# JAX 0.12 warns of Keras' symbolic build.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
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
        model.fit((batch for batch in batches), verbose=0, shuffle=False)


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


class Killed(Exception):
    pass


class Kill(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise Killed


def compiled(**options):
    keras.utils.set_random_seed(0)
    with tk.Strategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    accumulation = options.pop("accumulation", {})
    given = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "steps_per_execution": 2}
    model.compile(**{**given, **options})
    model.set_gradient_accumulation_options(2, **accumulation)
    return model


SECOND = {
    "nothing": ({}, ""),
    "rate": (
        {"optimizer": keras.optimizers.SGD(0.2)},
        "optimizer's learning_rate: 0.2.*variables, such as a learning rate, are those of",
    ),
    "clipping": (
        {"optimizer": keras.optimizers.SGD(0.1, clipnorm=1e-3)},
        "optimizer's clipnorm: 0.001",
    ),
    "loss": ({"loss": "mae"}, 'loss: "mse", and .* loss: "mae"'),
    "reduction": (
        {"accumulation": {"gradient_accumulation_reduction_method": "mean"}},
        "accumulation: sum, .*accumulation: mean,",
    ),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_model_that_was_changed_before_it_resumes(tmp_path, caplog, name):
    """What was changed has effect or not, and is noted."""
    options, text = SECOND[name]
    call = {"x": X, "y": 2 * X, "batch_size": 4, "epochs": 4, "verbose": 0}
    kept = tr.Checkpoint(tmp_path, every=3)
    with pytest.raises(Killed):
        compiled().fit(**call, checkpoint=kept, callbacks=[Kill()])
    compiled(**options).fit(**call, checkpoint=kept)
    found = " ".join(record.getMessage() for record in caplog.records)
    assert ("was trained with" in found) is bool(text)
    assert re.search(text, found), found


def test_the_best_of_a_value_without_a_direction(tmp_path):
    """As in `tr.Trainer.fit`; a resumed fit keeps the direction."""
    for name in ("val_psnr", "val_mae", "acceleration_error"):
        with pytest.raises(OptionError, match=f"Received: '{name}' without mode="):
            tr.Checkpoint(tmp_path, best=name)
    model = compiled(metrics=["mae"])
    call = {"x": X, "y": 2 * X, "batch_size": 4, "verbose": 0, "validation_data": (X, 2 * X)}
    best = {"best": "val_mae", "every": 1000}
    model.fit(**call, epochs=3, checkpoint=tr.Checkpoint(tmp_path, mode="max", **best))
    steps = [int(p.name.split("-")[1]) for p in tmp_path.glob("fit-0/*-best")]
    assert max(steps) == 3  # it falls from the first epoch on
    again = compiled(metrics=["mae"])
    again.fit(**call, epochs=5, checkpoint=tr.Checkpoint(tmp_path, mode="min", **best))
    assert max(int(p.name.split("-")[1]) for p in tmp_path.glob("fit-0/*-best")) == 3
