"""Keras fits on an accelerator: the loop of fixed length takes over, with what is listened to."""

import keras
import numpy as np
import pytest

import tailrace.keras as tk
from oracles import assert_close
from tailrace.program.running.executable import Executable
from tailrace.program.running.loop_runner import LoopRunner
from waits import LIMIT_S


@pytest.fixture
def fixed(monkeypatch):
    """The lengths that run in fixed loops, on a CPU that is called an accelerator."""
    monkeypatch.setattr("tailrace.devices.devices.platform", lambda: "gpu")
    monkeypatch.setattr("tailrace.taps.gpu_kernels.compiles", lambda _: False)
    monkeypatch.setattr("tailrace.feeds.dispatch_table.FIXED_WORTH", 0.0)
    monkeypatch.setattr("tailrace.feeds.dispatch_table.FIXED_BELOW_S", 60.0)
    lengths, fix, run = [], LoopRunner.fix, Executable.run

    def waiting(self, *args):
        fix(self, *args)
        if self.fixed.compiling is not None:
            self.fixed.compiling.result(LIMIT_S)

    def running(self, *args):
        if self.segment.is_loop and not self.counted:
            lengths.append(self.length)
        return run(self, *args)

    monkeypatch.setattr(LoopRunner, "fix", waiting)
    monkeypatch.setattr(Executable, "run", running)
    return lengths


class Batches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def model_of(adopted=True):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)]
    )
    model = tk.adopt(model) if adopted else model
    model.compile(optimizer="sgd", loss="mse", steps_per_execution=8)
    return model


def data(batches, more=0):
    random = np.random.default_rng(0)
    x = random.normal(size=(8 * batches + more, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1, keepdims=True), "batch_size": 8, "verbose": 0}


def test_a_fit_that_listens_after_one_that_does_not(fixed):
    """A program without outputs for the losses is another one."""
    quiet = model_of()
    quiet.fit(**data(16), epochs=8, shuffle=False)
    assert fixed
    heard = Batches()
    quiet.fit(**data(16), epochs=2, shuffle=False, callbacks=[heard])
    plain, expected = model_of(adopted=False), Batches()
    plain.fit(**data(16), epochs=8, shuffle=False)
    plain.fit(**data(16), epochs=2, shuffle=False, callbacks=[expected])
    assert_close(np.float32(heard.losses), np.float32(expected.losses))


def test_the_length_of_most_executions(fixed):
    """Not that of the last batches of an epoch, whose blocks are padded."""
    quiet = model_of()
    history = quiet.fit(**data(44), epochs=8, shuffle=False)
    assert set(fixed) == {max(fixed)}
    assert max(fixed) > 4
    plain = model_of(adopted=False).fit(**data(44), epochs=8, shuffle=False)
    assert_close(np.float32(history.history["loss"]), np.float32(plain.history["loss"]))


def test_a_smaller_last_batch(fixed):
    """Steps on it are another program; the times of the others are kept."""
    quiet = model_of()
    history = quiet.fit(**data(16, more=3), epochs=6, shuffle=False)
    assert fixed
    plain = model_of(adopted=False).fit(**data(16, more=3), epochs=6, shuffle=False)
    assert_close(np.float32(history.history["loss"]), np.float32(plain.history["loss"]))
