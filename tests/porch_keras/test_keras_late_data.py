"""Data of a Keras model that blocks: a note names the batch, and `fit(timeout_s=)` ends the wait."""

import logging
import threading

import keras
import numpy as np
import pytest

import tailrace as tr
import tailrace.keras as tk
from tailrace.feeds import waiting
from tailrace.keras.data import batch_source
from waits import LIMIT_S, Clock, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

QUIET = {"verbose": 0, "shuffle": False}
X, Y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")


class Gate:
    """Batches, of which the one numbered `at` takes an hour, and comes when it is let go."""

    def __init__(self, clock, at):
        self.clock, self.at = clock, at
        self.opened = threading.Event()

    def batch(self, number):
        if number == self.at:
            self.clock.now += 3600
            assert self.opened.wait(LIMIT_S), "something waits for the data"
        return X, Y

    def generator(self, count=8):
        for number in range(count):
            yield self.batch(number)

    def dataset(self, count=8):
        gate = self

        class Numbered(keras.utils.PyDataset):
            num_batches = count

            def __getitem__(self, index):
                return gate.batch(index)

        return Numbered()


@pytest.fixture
def clock(monkeypatch):
    """By which waits for batches are measured: no other batch takes any time."""
    made = Clock()
    for module in (batch_source, waiting):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def gate(clock):
    gates = []

    def made(at):
        gates.append(Gate(clock, at))
        return gates[-1]

    yield made
    for one in gates:
        one.opened.set()  # or a thread would stay in it


def model_of(steps_per_execution=1):
    with tk.Strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    return model


LATE = r"timeout_s=0.2 seconds, and batch {} of the data \(.*\) did not. Look at what"


@pytest.mark.parametrize(("kind", "at", "execution"), [
    ("generator", 0, 1),  # Keras takes it as soon as it is given the data
    ("generator", 3, 1),
    ("generator", 5, 2),
    ("dataset", 0, 1),  # Keras builds the metrics from it
    ("dataset", 3, 4),
])  # fmt: skip
def test_a_limit_names_the_batch(gate, kind, at, execution):
    model, blocking = model_of(execution), gate(at)
    with pytest.raises(tr.errors.DataTimeout, match=LATE.format(at)):
        model.fit(getattr(blocking, kind)(), **QUIET, timeout_s=0.2)
    # The model is as usable as before.
    history = model.fit(gate(None).generator(), **QUIET, timeout_s=60)
    assert np.isfinite(history.history["loss"]).all()


def test_validation_has_the_limit(gate):
    model = model_of()
    with pytest.raises(tr.errors.DataTimeout, match=LATE.format(1)):
        model.fit(X, Y, validation_data=gate(1).dataset(), **QUIET, timeout_s=0.2)


def test_a_fit_with_checkpoints_has_the_limit(gate, tmp_path):
    """And goes on afterwards, where the checkpoint was written."""
    for timed_out in (True, False):
        model = model_of()
        model.set_weights([np.zeros((3, 1), "float32"), np.zeros(1, "float32")])
        kept = tr.Checkpoint(tmp_path / "kept", every=1)
        data = gate(5 if timed_out else None).generator()
        if timed_out:
            with pytest.raises(tr.errors.DataTimeout, match=LATE.format(5)):
                model.fit(data, **QUIET, timeout_s=0.2, checkpoint=kept)
        else:
            model.fit(data, **QUIET, timeout_s=60, checkpoint=kept)
    plain = model_of()
    plain.set_weights([np.zeros((3, 1), "float32"), np.zeros(1, "float32")])
    plain.fit(gate(None).generator(), **QUIET)
    for found, wanted in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("kind", "at", "named"), [
    ("generator", 0, "batch 0 of the data (generator)"),
    ("generator", 3, "batch 3 of the data ("),
    ("dataset", 0, "batch 0 of the data (as Keras reads it)"),
])  # fmt: skip
def test_late_data_is_noted_without_a_limit(gate, clock, kind, at, named, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "LOOK_S", 0.01)
    model, blocking = model_of(), gate(at)

    def opens():
        wait_until(lambda: "Still waiting" in caplog.text, "the wait was not noted")
        blocking.opened.set()

    opening = threading.Thread(target=opens)
    opening.start()
    with caplog.at_level(logging.WARNING, "tailrace"):
        model.fit(getattr(blocking, kind)(), **QUIET)
    opening.join(LIMIT_S)
    assert f"Still waiting for {named}" in caplog.text
    assert caplog.text.count("Still waiting") == 1  # the next one after twice as long


def test_a_generator_is_not_closed_with_the_fit(gate):
    """A second fit goes on reading where the first one stopped."""
    data, model = gate(None).generator(8), model_of()
    for _ in range(2):
        model.fit(data, steps_per_epoch=3, **QUIET)
    assert next(data, None) is not None


def test_limits_that_are_refused(gate):
    with pytest.raises(tr.errors.OptionError, match="timeout_s is a number greater than 0"):
        model_of().fit(X, Y, timeout_s=0)
    model = model_of()
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(tr.errors.OptionError, match="timeout_s= limits .* run_eagerly=True"):
        model.fit(X, Y, timeout_s=1)
