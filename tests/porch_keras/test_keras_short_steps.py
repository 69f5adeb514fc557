"""Single steps with a callback for each batch: few take the long way, and all are those of Keras."""

import keras
import numpy as np
import pytest
from keras_oracle import SPARSE, classifier, digits_like, twins

import tailrace as tr
import tailrace.keras as tk
from oracles import assert_bits_equal
from tailrace.keras.model import Adopted
from tailrace.trainer.engine import Engine

ROWS, BATCH = 44, 8
BATCHES = 6
"""Of an epoch; the last one is smaller."""


class Heard(keras.callbacks.Callback):
    """Keeps the logs of each batch; `change(model, batch)` may change something meanwhile."""

    def __init__(self, change=None):
        super().__init__()
        self.logs, self.change = [], change

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append((batch, sorted(logs.items())))
        if self.change is not None:
            self.change(self.model, batch)


def set_weights(model, batch):
    if batch == 2:
        model.set_weights([0.5 * weight for weight in model.get_weights()])


def set_rate(model, batch):
    model.optimizer.learning_rate = 0.1 / (batch + 1)


def evaluate(model, batch):
    if batch == 2:
        x, y = digits_like(12, seed=1)
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)


def stop(model, batch):
    model.stop_training = batch == 3


def generator():
    x, y = digits_like(ROWS)
    while True:
        for first in range(0, ROWS, BATCH):
            yield x[first : first + BATCH], y[first : first + BATCH]


def ours_and_keras(change, *data, **call):
    pair = twins(classifier, 1, **SPARSE, metrics=lambda: ["accuracy"])
    found = []
    for model in pair:
        keras.utils.set_random_seed(3)
        heard = Heard(change)
        given = [one() if callable(one) else one for one in data]
        history = model.fit(*given, epochs=3, verbose=0, callbacks=[heard], **call).history
        found.append((heard.logs, history, [np.asarray(v.value) for v in model.variables]))
    return pair[1], found


@pytest.fixture
def long_ways(monkeypatch):
    """How often the engine dispatches in the general way."""
    counted, plain = [], Engine.dispatch

    def dispatch(self, *args, **kwargs):
        counted.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "dispatch", dispatch)
    return counted


@pytest.mark.parametrize("change", [None, set_weights, set_rate, evaluate, stop])
def test_every_batch_is_keras_own(change, long_ways):
    _, (plain, ours) = ours_and_keras(change, *digits_like(ROWS), batch_size=BATCH)
    assert ours[:2] == plain[:2]
    assert_bits_equal(ours[2], plain[2])
    assert len(plain[0]) == (4 if change is stop else 3 * BATCHES)
    # Of an epoch, the first batch and the smaller one: they have programs of their own.
    assert change is not None or len(long_ways) == 3 * 2


def test_data_of_unknown_length_and_an_epoch_that_ends_inside(long_ways):
    model, (plain, ours) = ours_and_keras(None, generator, steps_per_epoch=4, shuffle=False)
    assert ours[:2] == plain[:2]
    assert_bits_equal(ours[2], plain[2])
    assert tk.of(model).programs["train"].engine.step == 12
    assert len(long_ways) < 12


def test_after_executions_that_ran_together():
    """Batches travel alone, without the room that a program of many has."""
    model, x, y = tk.adopt(classifier()), *digits_like(ROWS)
    model.compile("sgd", SPARSE["loss"]())
    model.fit(x, y, batch_size=4, verbose=0)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[Heard()])
    engine = tk.of(model).programs["train"].engine
    assert sorted(engine.runner.compiled_lengths) == [1, 11]


def test_a_trace_sees_every_step(long_ways, tmp_path):
    model, x, y = tk.adopt(classifier()), *digits_like(40)
    model.compile("sgd", SPARSE["loss"]())
    with tr.trace(tmp_path / "traced", operations=0):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Heard()])
    assert len(long_ways) == 5


@pytest.mark.parametrize("frequency", ["epoch", 2])
def test_a_backup_does_not_read_the_model_after_each_batch(frequency, tmp_path, monkeypatch):
    """Reading it writes every value back, also where executions run together."""
    pytest.importorskip("orbax.checkpoint")
    pair, (x, y) = twins(classifier, 1, **SPARSE), digits_like(ROWS)
    synced, plain = [], Adopted.jax_state_sync

    def jax_state_sync(self):
        synced.append(self)
        plain(self)

    monkeypatch.setattr(Adopted, "jax_state_sync", jax_state_sync)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=frequency)
    for model, callbacks in zip(pair, ([], [backup]), strict=True):
        model.fit(x, y, 4, 2, shuffle=False, verbose=0, callbacks=callbacks)
    assert_bits_equal(pair[1].get_weights(), pair[0].get_weights())
    assert len(synced) < 22 or frequency == 2
