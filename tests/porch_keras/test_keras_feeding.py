"""What enters and leaves an execution: blocks of batches, and of each step only what is heard."""

import keras
import numpy as np
import pytest
from keras_oracle import SPARSE, assert_same, classifier, digits_like, fit_both, twins

import tailrace.keras as tk
from oracles import assert_bits_equal, assert_close
from tailrace.feeds import dispatch_table
from tailrace.keras.data.copied_batches import copying
from tailrace.keras.programs import train
from tailrace.keras.programs.pacing import Pacing


class Heard(keras.callbacks.Callback):
    """Takes down the logs of each execution it hears of."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append((batch, {name: np.float32(value) for name, value in logs.items()}))


def model_of(execution=4, replicas=1, compiled=None):
    keras.utils.set_random_seed(5)
    made = tk.adopt(classifier(), replicas)
    call = {"metrics": ["accuracy"], **(compiled or {})}
    made.compile("sgd", "sparse_categorical_crossentropy", **call, steps_per_execution=execution)
    return made


def fitted(monkeypatch, quiet, *, callbacks=(), **made):
    """A model after two epochs of 12 batches, its history, and whether its programs were quiet."""
    with monkeypatch.context() as patch:
        patch.setattr(dispatch_table, "QUIET_FROM", 2)
        if not quiet:
            patch.setattr(train.Training, "_is_quiet", lambda *_: False)
        model = model_of(**made)
        x, y = digits_like(96)
        call = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
        history = model.fit(x, y, **call, callbacks=list(callbacks)).history
    program = tk.of(model).programs["train"]
    runner = program.engine.runner
    muted = {key[-1] for key in runner.executables}
    assert runner.muted == frozenset(), "as it was, once the fit is over"
    return model.get_weights(), history, muted == {frozenset([program.engine.scalars])}


# -- what leaves --------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_nothing_leaves_step_by_step_that_nobody_hears(monkeypatch, replicas):
    weights, history, quiet = fitted(monkeypatch, True, replicas=replicas, execution=2)
    expected, expected_logs, loud = fitted(monkeypatch, False, replicas=replicas, execution=2)
    assert quiet
    assert not loud
    assert history == expected_logs
    assert_bits_equal(weights, expected)


def test_the_logs_of_an_execution_are_those_after_its_last_step(monkeypatch):
    heard = Heard(), Heard()
    weights, _, quiet = fitted(monkeypatch, True, callbacks=heard[:1])
    expected, _, loud = fitted(monkeypatch, False, callbacks=heard[1:])
    assert quiet
    assert not loud
    assert [batch for batch, _ in heard[0].logs] == [3, 7, 11] * 2
    for (_, found), (_, expected_logs) in zip(heard[0].logs, heard[1].logs, strict=True):
        assert_bits_equal(found, expected_logs)
    assert_bits_equal(weights, expected)


class OwnMetrics(keras.Sequential):
    """Says more than its metrics do."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "largest": keras.ops.max(y_pred)}


def test_who_wants_each_step_gets_it(monkeypatch):
    monkeypatch.setattr(dispatch_table, "QUIET_FROM", 2)
    x, y = digits_like(96)
    call = {"batch_size": 8, "verbose": 0, "shuffle": False}
    stepwise, heard = model_of(), Heard()
    stepwise.set_asynchronous_callbacks(True)
    stepwise.fit(x, y, **call, callbacks=[heard])
    assert [batch for batch, _ in heard.logs] == list(range(12))
    assert len({float(logs["loss"]) for _, logs in heard.logs}) == 12
    own, heard = tk.adopt(OwnMetrics(classifier().layers)), Heard()
    own.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=4)
    own.fit(x, y, **call, callbacks=[heard])
    assert all(0.25 < logs["largest"] <= 1 for _, logs in heard.logs)
    seen = model_of(compiled={"observe": ["loss"]})
    seen.fit(x, y, **call)
    assert seen.records["loss"].values.shape == (12,)
    listed = model_of(replicas=2, execution=2)
    listed.set_replication_options("list")
    losses = listed.fit(x, y, **call).history["loss"]
    assert np.shape(losses) == (1, 2)


# -- what enters --------------------------------------------------------------------------------


class OneBuffer(keras.utils.PyDataset):
    """Hands out the same two arrays again and again, with other values in them."""

    def __init__(self, x, y):
        super().__init__()
        self._x, self._y, self._batch = x, y, (np.empty_like(x[:8]), np.empty_like(y[:8]))

    def __len__(self):
        return len(self._x) // 8

    def __getitem__(self, number):
        rows = slice(8 * number, 8 * number + 8)
        self._batch[0][...], self._batch[1][...] = self._x[rows], self._y[rows]
        return self._batch


def test_batches_that_are_overwritten_are_copied_in_time():
    x, y = digits_like(96)
    pair = twins(classifier, execution=12, **SPARSE)
    for model, data in zip(pair, ((x, y), (OneBuffer(x, y),)), strict=True):
        model.fit(*data, batch_size=8 if len(data) == 2 else None, verbose=0, shuffle=False)
    assert_close(pair[1].get_weights(), pair[0].get_weights())


@pytest.mark.parametrize("kind", ["dataset", "workers", "generator"])
def test_what_a_source_overwrites_is_copied(kind):
    """As on an accelerator, where Keras reads a batch before it hands out the one before."""
    x, y = digits_like(32)
    source = OneBuffer(x, y)
    if kind == "workers":
        source.workers = 3
    made = copying((source[n] for n in range(4)) if kind == "generator" else source)
    if kind != "generator":
        assert (made.num_batches, made.workers) == (4, source.workers)
        made = [made[n] for n in range(4)]
    found = list(made)
    np.testing.assert_array_equal(np.concatenate([batch[0] for batch in found]), x)
    np.testing.assert_array_equal(np.concatenate([batch[1] for batch in found]), y)
    assert copying(x) is x


@pytest.mark.cpu  # an accelerator takes larger pieces
def test_pieces_of_an_execution():
    size = 100_480  # 32 x 784 floats, and as many labels
    assert Pacing(100).piece(size, 100) == 100
    assert Pacing(500).piece(size, 500) == 250
    assert Pacing(500, unit=4).piece(size, 500) == 100, "all alike, if a little shorter"
    assert Pacing(499).piece(size, 499) == 250
    assert Pacing(7).piece(1 << 30, 7) == 1
    assert Pacing(64).piece(1 << 10, 64) == 64


# -- one program --------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_short_execution_at_the_end_needs_no_program_of_its_own(compilations, replicas):
    x, y = digits_like(8 * 22)
    pair = twins(classifier, execution=8, replicas=replicas, **SPARSE)
    call = {"batch_size": 8, "shuffle": False}
    if replicas == 1:
        assert_same(pair, fit_both(pair, x, y, epochs=2, **call))
    else:
        pair[1].fit(x, y, epochs=2, verbose=0, **call)
    runner = tk.of(pair[1]).programs["train"].engine.runner
    assert len(runner.compiled_lengths) == 1
    pair[1].evaluate(x, y, batch_size=8, verbose=0)
    before = len(compilations)
    pair[1].evaluate(x[: 8 * 6], y[: 8 * 6], batch_size=8, verbose=0)
    assert len(compilations) == before
