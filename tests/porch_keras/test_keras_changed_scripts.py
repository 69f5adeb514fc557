"""A script with a Keras model that was changed before it is started again."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("orbax.checkpoint")

import tailrace as tr  # noqa: E402
import tailrace.keras as tk  # noqa: E402
from oracles import assert_bits_equal  # noqa: E402
from tailrace.errors import CheckpointError  # noqa: E402

X = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Killed(Exception):
    """Stands for the end of a process."""


class Kill(keras.callbacks.Callback):
    """Ends the fit in the second epoch, after its first checkpoint there."""

    def on_train_batch_end(self, batch, logs=None):
        if len(self.model.history.epoch) == 1 and batch >= 5:
            raise Killed


class Seen(keras.callbacks.Callback):
    """Has seen so many epochs."""

    def __init__(self):
        super().__init__()
        self.epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1


class Also(Seen):
    """Another callback with the same attribute."""


def fit(folder, callbacks=(), x=None, **call):
    keras.utils.set_random_seed(3)
    with tk.Strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", steps_per_execution=2)
    call = {"y": Y, "batch_size": 4, "epochs": 3, **call}
    model.fit(
        X if x is None else x,
        verbose=0,
        callbacks=list(callbacks),
        checkpoint=tr.Checkpoint(folder, every=2),
        **call,
    )
    return model


@pytest.fixture
def killed(tmp_path):
    """The directory of a fit that was killed in its second epoch, after 4 of 12 batches."""
    with pytest.raises(Killed):
        fit(tmp_path / "killed", [Seen(), Kill()])
    return tmp_path / "killed"


def test_another_order_is_refused(killed):
    text = "belongs to another training: shuffle: True there, False here"
    with pytest.raises(CheckpointError, match=text):
        fit(killed, shuffle=False)


def test_fewer_epochs_than_were_begun_return_what_is_there(killed, tmp_path, caplog):
    """Not marked as the end of a fit: the next one would begin an epoch in the middle of another."""
    model = fit(killed, epochs=1)
    assert int(model.optimizer.iterations) == 16
    text = "holds a fit that went further (1 epochs, 4 batches). Its end is returned."
    assert text in caplog.text
    assert_bits_equal(fit(killed).get_weights(), fit(tmp_path / "whole").get_weights())


def test_a_callback_gets_the_state_of_its_class(killed, caplog):
    also, seen = Also(), Seen()
    fit(killed, [also, seen])
    assert (also.epochs, seen.epochs) == (2, 3)
    fit(killed, [seen := Seen()])  # finished: states of the end
    assert seen.epochs == 3
    assert "callbacks that this fit does not have: Also." in caplog.text


@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed")
def test_data_that_is_not_shuffled_by_keras_ignores_the_option(tmp_path):
    batches = [(X[n : n + 4], Y[n : n + 4]) for n in range(0, 48, 4)]
    call = {"y": None, "batch_size": None, "epochs": 1, "steps_per_epoch": 12}
    fit(tmp_path, x=(one for one in batches), shuffle=True, **call)
    assert fit(tmp_path, x=(one for one in batches), shuffle=False, **call).history.epoch == [0]
