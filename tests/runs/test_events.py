"""Event files, read back with TensorBoard's own reader."""

import sys

import numpy as np
import pytest
from small_runs import X, Y, make_trainer, train

import tailrace as tr

pytest.importorskip("tensorboardX")


def read(logdir):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = dict.fromkeys(["scalars", "histograms", "tensors"], 0)
    return EventAccumulator(str(logdir), size_guidance=everything).Reload()


@pytest.fixture
def run(finished):
    return tr.open_run(finished)


def test_scalars_and_statistics(run, tmp_path):
    count = run.to_tensorboard(tmp_path / "log")
    assert count == 2 * 20 + 2 * 7 * 20 + 2 * 4
    events = read(tmp_path / "log")
    loss = events.Scalars("history/loss")
    assert [event.step for event in loss] == list(range(20))
    np.testing.assert_allclose([event.value for event in loss], run.history.loss, rtol=1e-6)
    stats = run.records["grad/first", "stats"].values
    for field in stats.dtype.names:
        values = [event.value for event in events.Scalars(f"grad/first/stats/{field}")]
        np.testing.assert_allclose(values, stats[field], rtol=1e-6)


def test_histograms_bin_for_bin(run, tmp_path):
    run.to_tensorboard(tmp_path / "log")
    found = read(tmp_path / "log").Histograms("grad/first/histogram/log2_magnitude")
    counts = run.records["grad/first", "histogram"].values
    assert [event.step for event in found] == [4, 9, 14, 19]
    for event, row in zip(found, counts, strict=True):
        there = {
            limit: number
            for limit, number in zip(
                event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True
            )
            if number
        }
        expected = {float(index - 126): row[index] for index in np.flatnonzero(row[:255])}
        assert there == expected
        assert event.histogram_value.num == row[:255].sum()


def test_microbatches_and_replicas_become_one_value(tmp_path):
    taps = ["grad/first", tr.Tap("update/*", reduce="norm"), tr.Tap("loss", reduce="tensor")]
    taps.append(tr.Tap("param/*", reduce=lambda v: {"sum": v.sum(), "whole": v}))
    train(make_trainer(tmp_path / "run", taps, accumulation=2, replicas=2), 6)
    run = tr.open_run(tmp_path / "run")
    run.to_tensorboard(tmp_path / "log")
    events = read(tmp_path / "log")
    values = run.records["grad/first"].values.reshape(6, 4)
    for field, merge in (("mean", "mean"), ("min", "min"), ("max", "max"), ("nan", "sum")):
        found = [event.value for event in events.Scalars(f"grad/first/{field}")]
        np.testing.assert_allclose(found, getattr(values[field], merge)(axis=1), rtol=1e-5)
    assert len(events.Scalars("update/first")) == len(events.Scalars("loss")) == 6
    assert "param/first/sum" in events.Tags()["scalars"]
    assert "param/first/whole" not in events.Tags()["scalars"]


def test_steps_that_were_trained_again(tmp_path):
    """A trainer that went back to its best state: the run and the export have the later values."""
    # The loss falls, so with "max" the first epoch is the best.
    stopping = tr.callbacks.EarlyStopping("loss", patience=1, mode="max", restore_best=True)
    trainer = make_trainer(tmp_path / "run", ["grad/first"], accumulation=2)
    trainer.fit(tr.batches((X[:32], Y[:32]), 8), epochs=9, callbacks=[stopping], progress=False)
    trainer.fit(tr.batches((X[32:64], Y[32:64]), 8), epochs=1, progress=False)
    run = tr.open_run(tmp_path / "run")
    record = run.records["grad/first"]
    assert trainer.step == 4
    assert record.steps.tolist() == [step for step in range(4) for _ in range(2)]
    run.to_tensorboard(tmp_path / "log", "grad/first")
    events = read(tmp_path / "log").Scalars("grad/first/max")
    last = {step: row for row, step in enumerate(record.steps)}
    expected = {step: record.values["max"][row - 1 : row + 1].max() for step, row in last.items()}
    assert {event.step for event in events} == set(expected)
    for event in events:
        np.testing.assert_allclose(event.value, expected[event.step], rtol=1e-6)


def test_select_and_every(run, tmp_path):
    count = run.to_tensorboard(tmp_path / "log", "grad/second", every=10)
    assert count == 2 * 2 + 7 * 2 + 0
    events = read(tmp_path / "log")
    assert [e.step for e in events.Scalars("history/loss")] == [9, 19]
    assert not [tag for tag in events.Tags()["scalars"] if "grad/first" in tag]


def test_errors(run, tmp_path, monkeypatch):
    with pytest.raises(tr.errors.SelectionError, match="No records match 'x'. There are records"):
        run.to_tensorboard(tmp_path, "x")
    with pytest.raises(tr.errors.OptionError, match="every must be a whole number >= 1"):
        run.to_tensorboard(tmp_path, every=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        tr.errors.RunError, match="Events cannot be written to .*file/log': .*is a file"
    ):
        run.to_tensorboard(tmp_path / "file" / "log")
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(tr.errors.MissingDependency, match=r"tailrace\[tensorboard\]"):
        run.to_tensorboard(tmp_path)
