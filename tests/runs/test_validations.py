"""The values of validations in a run directory: those of the live history, whatever happens."""

import json
import shutil

import numpy as np
import optax
import pytest
from small_runs import X, Y, loss_fn, make_trainer

import tailrace as tr
from killed_fits import Kill, Killed
from tailrace.cli.command_line import main
from tailrace.page.comparison import compare
from tailrace.page.curves import history_curves
from tailrace.page.followed import FollowedRun
from tailrace.records.history import History
from tailrace.records.sinks import Finished, Validated
from tailrace.runs.writer import RunWriter

HELD_OUT = tr.batches((X[:16], Y[:16]), 8)


def fit(trainer, steps=20, **call):
    data = tr.batches((X, Y), 8, repeat=True)
    call = {"validation_data": HELD_OUT, "validation_every": 5, **call}
    return trainer.fit(data, steps=steps, progress=False, **call)


def write_steps(writer, first):
    """Five steps, as an execution of the run's metrics."""
    values = np.zeros((5, 1, 1), np.float32)
    writer.execution(Finished(first, 5, [], {"loss": values, "mae": values}))


def assert_same(found, *expected):
    """The validations of a history are those of others, one after the other."""
    steps = np.concatenate([history.validated for history in expected])
    assert found.validated.tolist() == steps.tolist()
    assert "val_loss" in found.names
    for name in [name for name in expected[0].names if name.startswith("val_")]:
        values = np.concatenate([history[name] for history in expected])
        np.testing.assert_array_equal(found[name], values, strict=True)


@pytest.fixture(scope="module")
def two_fits(tmp_path_factory):
    """A run of two fits, and their histories."""
    directory = tmp_path_factory.mktemp("validated") / "run"
    trainer = make_trainer(directory, ())
    return directory, [fit(trainer), fit(trainer, 15)]


def test_they_are_those_of_the_live_history(two_fits):
    directory, live = two_fits
    history = tr.open_run(directory).history
    assert_same(history, *live)
    assert history.validated.tolist() == [5, 10, 15, 20, 25, 30, 35]
    assert history.names == live[0].names
    assert history.last_validation() == live[1].last_validation()


def test_they_are_there_while_the_fit_goes_on(tmp_path):
    seen = []

    class Look(tr.Callback):
        def on_validation_end(self, trainer, logs):
            list(trainer.records)  # reads what is on disk, and waits for it
            history = tr.open_run(tmp_path / "run").history
            seen.append((history.validated.tolist(), history["val_loss"][-1] == logs["val_loss"]))

    fit(make_trainer(tmp_path / "run", ()), 10, callbacks=[Look()])
    assert seen == [([5], True), ([5, 10], True)]


def test_a_run_without_any_has_no_table(finished):
    assert not (finished / "validations").exists()
    assert tr.open_run(finished).history.validated.tolist() == []


# -- where they are seen ------------------------------------------------------------------------


def test_they_are_shown(two_fits, capsys, tmp_path):
    directory, live = two_fits
    report = tmp_path / "report.html"
    assert main(["report", str(directory), "-o", str(report)]) == 0
    shown, first, last = capsys.readouterr().out, live[0]["val_loss"][0], live[1]["val_loss"][-1]
    assert f"{last:.4g} (first validation: {first:.4g})" in shown
    text = report.read_text()
    places = [text.index(f"<h2>{heading}</h2>") for heading in ("Loss", "Val_loss", "Mae")]
    assert places == sorted(places)
    curve = history_curves(FollowedRun(directory))["val_loss"]
    # The step before each validation, as in a log of steps.
    assert curve.steps.tolist() == [4, 9, 14, 19, 24, 29, 34]
    assert curve.last == last


def test_they_are_compared(two_fits, tmp_path):
    directory, _ = two_fits
    fit(make_trainer(tmp_path / "other", (), rate=0.02), 35)
    lines = {line.what: line for line in compare(directory, tmp_path / "other").tables["numbers"]}
    other = tr.open_run(tmp_path / "other").history
    assert lines["val_loss"].second == f"{other['val_loss'][-1]:.4g}"
    assert lines["val_loss"].first != lines["val_loss"].second


def test_runs_that_differ_in_them_only(two_fits, tmp_path):
    directory, _ = two_fits
    other = tr.batches((X[:16], Y[:16] + 1), 8)
    trainer = make_trainer(tmp_path / "other", ())
    fit(trainer)
    fit(trainer, 15, validation_data=other)
    assert not tr.diff(directory, directory)
    found = tr.diff(directory, tmp_path / "other")
    assert (found.tensor, found.step) == ("history/val_loss", 24)


def test_they_are_in_the_events(two_fits, tmp_path):
    pytest.importorskip("tensorboard")
    directory, live = two_fits
    run, values = tr.open_run(directory), 35 * len(live[0].step_names)
    assert run.to_tensorboard(tmp_path / "one") == values + 7 * 2
    assert run.to_tensorboard(tmp_path / "five", every=5) == values // 5 + 7 * 2


# -- kills, rewinds and old directories ---------------------------------------------------------


def test_killed_and_started_again(tmp_path, two_fits):
    _, (expected, _) = two_fits
    for after in (1, 2, None):
        trainer = make_trainer(tmp_path / "run", ())
        kept = tr.Checkpoint(tmp_path / "kept", every=10)
        try:
            fit(trainer, checkpoint=kept, callbacks=[] if after is None else [Kill(after)])
        except Killed:
            # Rows after the checkpoint, which come again.
            assert len(tr.open_run(tmp_path / "run").history.validated) >= 1
    assert_same(trainer.history, expected)
    assert_same(tr.open_run(tmp_path / "run").history, expected)


def test_rewound(tmp_path, two_fits):
    """A validation after the step that a run goes back to is cut off; one just before it stays."""
    _, (expected, _) = two_fits
    trainer = make_trainer(tmp_path / "run", ())
    data = tr.batches((X, Y), 8, repeat=True)
    kept = tr.Checkpoint(tmp_path / "kept", every=5)
    call = {"validation_data": HELD_OUT, "validation_every": 5, "checkpoint": kept}
    trainer.fit(data, steps=20, **call)
    trainer.rewind(10, data, checkpoint=kept, reason="for once")
    trainer.fit(data, steps=5, validation_data=HELD_OUT, validation_every=5)
    found = tr.open_run(tmp_path / "run").history
    assert found.validated.tolist() == [5, 10, 15]
    assert found.validated.tolist() == sorted(set(found.validated.tolist()))
    np.testing.assert_array_equal(found["val_loss"][:2], expected["val_loss"][:2])


def as_old(directory):
    """As it was written before validations were kept."""
    shutil.rmtree(directory / "validations")
    about = json.loads((directory / "zarr.json").read_text())
    for name in ("validations", "checksum"):
        del about["attributes"]["committed"][name]
    (directory / "zarr.json").write_text(json.dumps(about))


def test_an_old_directory(two_fits, tmp_path):
    directory, live = two_fits
    old = shutil.copytree(directory, tmp_path / "old")
    as_old(old)
    history = tr.open_run(old).history
    assert history.names == live[0].step_names
    assert len(history) == 35
    assert history.validated.tolist() == []
    assert main(["show", str(old)]) == 0
    # It can be taken up by a checkpoint of that time, which does not know the table.
    writer = RunWriter(old)
    writer.take_up({"history": 30, "executions": 6, "records": [], "starts": []})
    with writer.fitting({}):
        write_steps(writer, 30)
        values = {name: live[1][f"val_{name}"][-1] for name in ("loss", "mae")}
        writer.validation(Validated(35, values))
    found = tr.open_run(old).history
    assert (len(found), found.validated.tolist()) == (35, [35])
    assert found.last_validation() == live[1].last_validation()


def test_a_truncated_table(two_fits, tmp_path):
    directory, _ = two_fits
    broken = shutil.copytree(directory, tmp_path / "broken")
    (broken / "validations" / "metric0" / "c.0").unlink()
    with pytest.raises(tr.TailraceError, match=r"truncated: the chunk 0 of validations/metric0"):
        _ = tr.open_run(broken).history
    shutil.rmtree(broken / "validations")
    with pytest.raises(tr.TailraceError, match="damaged: validations cannot be read"):
        _ = tr.open_run(broken).history


def test_a_value_that_comes_late_or_is_missing(tmp_path):
    """NaN in its place, live and on disk."""
    live, writer = History(), RunWriter(tmp_path / "run")
    values = [{"a": 1.0}, {"a": 2.0, "b": 3.0}, {"b": 4.0}, {}]
    with writer.fitting({}):
        write_steps(writer, 0)
        for step, one in enumerate(values, start=1):
            live.add_validation(step, one)
            writer.validation(Validated(step, one))
    found = tr.open_run(tmp_path / "run").history
    for history in (live, found):
        assert history.validated.tolist() == [1, 2, 3, 4]
        np.testing.assert_array_equal(history["val_a"], [1, 2, np.nan, np.nan])
        np.testing.assert_array_equal(history["val_b"], [np.nan, 3, 4, np.nan])


def test_an_evaluation_of_other_values(tmp_path):
    def eval_fn(params, x, y):
        return {"off": loss_fn(params, x, y)[1]["mae"]}

    trainer = tr.Trainer(
        loss_fn, optax.sgd(0.01), make_trainer().params, eval_fn=eval_fn, run_dir=tmp_path / "run"
    )
    live = fit(trainer, 10)
    found = tr.open_run(tmp_path / "run").history
    assert [name for name in found.names if name.startswith("val_")] == ["val_off"]
    np.testing.assert_array_equal(found["val_off"], live["val_off"], strict=True)


def test_a_compilation_that_ends_after_its_fit_waits_for_the_next(tmp_path):
    """Between fits the directory may belong to another process."""
    writer, row = RunWriter(tmp_path / "run"), {"purpose": "training", "cause": "fixed length"}
    with writer.fitting({"catalogue": []}):
        writer.compilation({**row, "cause": "first"})
    writer.compilation(row)
    causes = lambda: [one["cause"] for one in tr.open_run(tmp_path / "run").compilations]  # noqa: E731
    assert causes() == ["first"]
    with writer.fitting({"catalogue": []}):
        pass
    assert causes() == ["first", "fixed length"]
