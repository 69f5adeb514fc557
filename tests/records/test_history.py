"""The history, the progress bar and callbacks, without a device."""

import contextlib
import errno
import io
import os
import pickle
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, assert_close, mlp, mlp_loss, regression
from tailrace.records import columns
from tailrace.records.columns import ValueFile
from tailrace.records.history import History, split_emission
from tailrace.trainer.callbacks.callback import Execution, Reported, notify
from tailrace.trainer.fitting.progress_bar import ProgressBar

VALUES = np.arange(12, dtype=np.float32).reshape(2, 3, 2)  # [steps, microbatches, replicas]


def test_one_value_a_step_and_all_of_them():
    history = History(first_step=10, microbatches=3, replicas=2)
    history.add({"loss": VALUES, "hits": VALUES.astype(np.int32)})
    history.add({"loss": VALUES + 12, "hits": VALUES.astype(np.int32)})
    assert_bits_equal(history.loss, np.float32([2.5, 8.5, 14.5, 20.5]))
    assert_bits_equal(history.each("loss"), np.concatenate([VALUES, VALUES + 12]))
    assert history["hits"].dtype == np.float32
    assert history.steps.tolist() == [10, 11, 12, 13]
    assert len(history) == 4
    assert list(history) == history.names == ["loss", "hits"]
    assert history.last() == {"loss": 20.5, "hits": 8.5}


def test_one_microbatch_on_one_replica_is_not_touched():
    values = np.float32([0.1, np.nan, 1e-30]).reshape(3, 1, 1)
    history = History()
    history.add({"loss": values})
    assert_bits_equal(history.loss, values[:, 0, 0])


def test_weights_of_microbatches_make_a_weighted_mean():
    history = History(microbatches=2)
    for _ in range(2):
        history.add({"loss": np.float32([[[1.0], [4.0]]])}, np.array([[[3.0], [1.0]]]))
    assert history.loss.tolist() == [1.75, 1.75]


def test_nothing_yet():
    history = History(microbatches=3, replicas=2)
    assert history.loss.shape == (0,)
    assert history.each("loss").shape == (0, 3, 2)
    assert history.last() == {}
    assert repr(history) == "History(0 steps)"
    assert "0 steps" in history._repr_html_()
    with pytest.raises(KeyError, match="No metric is called 'mae'. There are: "):
        history["mae"]


def test_its_texts():
    history = History(microbatches=3, replicas=2)
    history.add({"loss": VALUES})
    assert repr(history) == "History(2 steps, last: loss=8.5)"
    assert "<td>loss</td><td>2.5</td><td>8.5</td>" in history._repr_html_()


def test_emissions_are_sorted_by_step_microbatch_replica():
    # From a program with replicas: [replicas, steps, microbatches].
    assert_bits_equal(split_emission(np.moveaxis(VALUES, 2, 0), 3, 2), VALUES)
    assert_bits_equal(split_emission(VALUES[..., 0], 3, 1), VALUES[..., :1])
    assert split_emission(np.zeros(4), 1, 1).shape == (4, 1, 1)


# -- through a trainer --------------------------------------------------------------------------


def test_each_microbatch_and_replica_and_nested_metrics():
    def loss_fn(params, x, y):
        loss, aux = mlp_loss(params, x, y)
        return loss, {**aux, "deep": {"n": jnp.int32(3)}, "vector": y, "step": tr.step()}

    elements = regression(12)
    trainer = tr.Trainer(loss_fn, optax.sgd(0.0), mlp(), accumulation=3, replicas=2)
    history = trainer.fit(elements, steps=2)
    expected = np.float32([mlp_loss(mlp(), *e)[0] for e in elements]).reshape(2, 3, 2)
    assert_close(history.each("loss"), expected)
    assert_close(history.loss, expected.mean((1, 2)))
    assert sorted(history.names) == ["deep/n", "loss", "mae", "step"]
    assert history["step"].tolist() == [0, 1]
    assert history["deep/n"].tolist() == [3, 3]


def test_aux_that_is_one_scalar():
    trainer = tr.Trainer(lambda w, x, y: (w * x.sum(), y.sum()), optax.sgd(0.0), jnp.float32(1))
    history = trainer.fit(regression(2), steps=2)
    assert_close(history["aux"], np.float32([y.sum() for _, y in regression(2)]))


def test_a_metric_that_is_called_loss_does_not_replace_the_loss():
    trainer = tr.Trainer(
        lambda w, x, y: (w * x.sum(), {"loss": y.sum()}), optax.sgd(0.0), jnp.float32(1)
    )
    history = trainer.fit(regression(2), steps=2)
    assert_close(history.loss, np.float32([x.sum() for x, _ in regression(2)]))
    assert_close(history["aux/loss"], np.float32([y.sum() for _, y in regression(2)]))
    assert trainer.evaluate(regression(2)).keys() == {"loss", "aux/loss"}


def test_weighted_losses():
    weight = lambda x, y: 1 + (y > 0).sum()  # noqa: E731
    accumulation = tr.Accumulation(3, weight=weight)
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.0), mlp(), accumulation=accumulation)
    history = trainer.fit(regression(6), steps=2)
    weights = np.array([weight(x, y) for x, y in regression(6)]).reshape(2, 3)
    losses = history.each("loss")[..., 0]
    assert_close(history.loss, ((losses * weights).sum(1) / weights.sum(1)).astype(np.float32))


# -- callbacks ----------------------------------------------------------------------------------


def test_steps_are_passed_only_to_functions_that_take_them():
    calls = []

    class Steps(tr.Callback):
        def on_step_end(self, trainer, step, values):
            calls.append((trainer, step, values))

        def on_execution_end(self, trainer, execution):
            calls.append("execution")

    execution = Execution(4, 2, {"loss": np.float32([0.5, 0.25])})
    notify([Steps(), tr.Callback()], "trainer", execution, Reported(4, 2))
    assert calls == [("trainer", 4, {"loss": 0.5}), ("trainer", 5, {"loss": 0.25}), "execution"]


# -- the progress bar ---------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def watched(monkeypatch):
    """Calls a function while standard error is a terminal; returns what that shows."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")

    def watch(function, **options):
        with contextlib.redirect_stderr(Terminal()) as stream:
            function(**options)
        return stream.getvalue()

    return watch


def advance(**options):
    with ProgressBar(10, batch=4096, **options) as bar:
        bar.advance(4, np.full((4, 1), 0.125))
        bar.advance(6, np.full((6, 1), 0.0625))


def test_quiet_when_nobody_watches(capsys):
    advance()
    tr.Trainer(mlp_loss, optax.sgd(0.1), mlp()).fit(regression(4), steps=4)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_sees_steps_loss_and_effective_batch(watched):
    text = watched(advance)
    assert "10/10" in text
    assert "loss 0.0625" in text
    assert "effective batch 4,096" in text


def test_it_can_be_silenced_and_asked_for(watched, capsys):
    assert watched(advance, shown=False) == ""
    advance(shown=True)
    assert "10/10" in capsys.readouterr().err


def test_a_fit_in_a_terminal(watched):
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), accumulation=2, replicas=2)
    text = watched(lambda: trainer.fit(regression(8), steps=2))
    assert "effective batch 16" in text
    assert "2/2" in text


# -- long histories in a file -------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file in place of the run directory's; blocks of 64 bytes."""
    monkeypatch.setattr(columns, "BLOCK", 64)
    return ValueFile(lambda: os.open(tmp_path / "values", os.O_RDWR | os.O_CREAT))


def executions(count):
    rng = np.random.default_rng(count)
    for _ in range(count):
        values = rng.normal(size=(5, 3, 2)).astype(np.float32)
        yield {"loss": values, "hits": values.astype(np.int64)}, np.ones_like(values)


def test_a_history_in_a_file_has_the_same_bits_as_one_in_memory(file, tmp_path):
    here, there = History(microbatches=3, replicas=2), History(microbatches=3, replicas=2)
    there.keep_in(file)
    for values, weights in executions(20):
        here.add(values, weights)
        there.add(values, weights)
        assert len(there) == len(here)
    assert (tmp_path / "values").stat().st_size > 20 * 5 * 6 * 8
    for name, array in here.to_arrays().items():
        assert_bits_equal(there.to_arrays()[name], array)
    assert_bits_equal(there.loss, here.loss)
    assert there.last() == here.last()
    assert there.each("loss") is there.each("loss")  # read once, until more is added
    copied = pickle.loads(pickle.dumps(there))
    copied.add(values, weights)
    assert_bits_equal(copied.loss[:-5], here.loss)
    assert len(there) == len(here) == len(copied) - 5


def test_a_history_stays_in_memory_where_a_file_cannot_be_written(monkeypatch, file, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    history, expected = History(microbatches=3, replicas=2), []
    history.keep_in(file)
    write = os.pwrite
    for number, (values, weights) in enumerate(executions(9)):
        # Full after a part of a block was written; later there is room again.
        cut_short = lambda handle, data, at: write(handle, data[:7], at)  # noqa: E731
        monkeypatch.setattr(os, "pwrite", {3: cut_short, 4: full, 5: full}.get(number, write))
        history.add(values, weights)
        expected.append(values["loss"])
        assert_bits_equal(history.each("loss"), np.concatenate(expected))
    nowhere, attempts = History(microbatches=3, replicas=2), []
    nowhere.keep_in(ValueFile(lambda: attempts.append(1) or full()))
    for _ in range(3):
        nowhere.add(values, weights)
    assert_bits_equal(nowhere.each("loss"), np.concatenate([values["loss"]] * 3))
    assert attempts == [1], "a growing history would be joined for each attempt"


def test_a_file_that_lost_its_end_is_an_error_with_a_sentence(file, tmp_path):
    history = History(microbatches=3, replicas=2)
    history.keep_in(file)
    for values, _ in executions(3):
        history.add(values)
    os.truncate(tmp_path / "values", 10)
    with pytest.raises(tr.errors.RunError, match="cannot be read any more: it has become shorter"):
        history.each("loss")


def test_the_history_of_a_fit_with_a_run_directory_leaves_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "BLOCK", 64)
    data, moved, put = regression(100), [], columns.ValueFile.put
    monkeypatch.setattr(
        columns.ValueFile, "put", lambda *given: moved.append(put(*given)) or moved[-1]
    )
    plain = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(seed=0), steps_per_execution=10)
    kept = tr.Trainer(
        mlp_loss, optax.sgd(0.1), mlp(seed=0), steps_per_execution=10, run_dir=tmp_path / "run"
    )
    expected, history = plain.fit(data, progress=False), kept.fit(data, progress=False)
    assert sum(len(values) for values in moved) > 100 - 64 // 4
    shutil.rmtree(tmp_path / "run")  # the values are in an open file, which has no name
    assert_bits_equal(history.loss, expected.loss)
    assert len(history) == 100
