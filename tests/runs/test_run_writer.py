"""What a trainer writes: equal to what it would keep in memory, whole, by one writer, as a sentence."""

import errno
import json
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import PARAMS, X, Y, assert_same_records, make_trainer, train

import tailrace as tr
from tailrace.runs import write_queue
from tailrace.runs.storage import durable
from tailrace.runs.write_queue import THREAD

TAPS = [
    tr.Tap("grad/*"),
    tr.Tap("grad/*", reduce="histogram", mode=tr.every(5)),
    tr.Tap("update/*", reduce="norm"),
    tr.Tap("activation/hidden", reduce="tensor", mode="final"),
    tr.Tap("param/*", reduce=lambda v: {"sum": v.sum(), "ends": (v.max(), [v.min()])}),
    tr.Tap("loss", mode="sum", reduce="tensor"),
]


@pytest.mark.parametrize("options", [{}, {"accumulation": 2, "replicas": 2}])
def test_the_same_on_disk_as_in_memory(tmp_path, options):
    plain, stored = make_trainer(None, TAPS, **options), make_trainer(tmp_path, TAPS, **options)
    expected = train(plain, 23)
    history = train(stored, 23)
    run = tr.open_run(tmp_path)
    assert_same_records(plain.records, stored.records)
    assert_same_records(plain.records, run.records)
    assert set(run.history) == set(expected) == {"loss", "mae"}
    for name in expected:
        np.testing.assert_array_equal(history[name], expected[name])
        np.testing.assert_array_equal(run.history.each(name), expected.each(name))
    np.testing.assert_array_equal(run.history.steps, np.arange(23))
    np.testing.assert_array_equal(stored.params["first"], plain.params["first"])


def test_narrow_dtypes_come_back_as_they_were(tmp_path):
    def loss_fn(w, x):
        return ((w.astype(jnp.float32) - x) ** 2).mean()

    def fitted(run_dir):
        trainer = tr.Trainer(
            loss_fn,
            optax.sgd(0.1),
            jnp.ones(4, jnp.bfloat16),
            observe=[
                tr.Tap("updated*", reduce="tensor"),
                tr.Tap("param*", reduce=lambda v: v.astype(jnp.float8_e4m3fn)),
                tr.Tap("grad*", reduce=lambda v: v > 0),
            ],
            run_dir=run_dir,
        )
        trainer.fit(tr.batches(X[:, :4], 8), steps=5, progress=False)
        return trainer.records

    assert_same_records(fitted(None), fitted(tmp_path))


def test_weighted_history(tmp_path):
    def fitted(run_dir):
        weighted = tr.Accumulation(2, weight=lambda x, y: x[0, 0] ** 2 + 1)
        return train(make_trainer(run_dir, (), accumulation=weighted), 9)

    expected = fitted(None)
    fitted(tmp_path)
    np.testing.assert_array_equal(tr.open_run(tmp_path).history.loss, expected.loss)


def test_a_second_fit_goes_on_in_the_same_run(tmp_path):
    trainer, plain = make_trainer(tmp_path), make_trainer()
    first, second = train(trainer, 7), train(trainer, 9)
    train(plain, 7)
    train(plain, 9)
    assert_same_records(plain.records, trainer.records)  # those of the latest fit
    run = tr.open_run(tmp_path)
    assert list(run.records["grad/first"].steps) == list(range(16))
    np.testing.assert_array_equal(run.history.loss, np.concatenate([first.loss, second.loss]))


def test_another_batch_size_in_the_same_run(tmp_path):
    trainer = make_trainer(tmp_path, ["grad/*", tr.Tap("input/1", reduce="norm")])
    train(trainer, 6)
    train(trainer, 6, batch=4)
    train(trainer, 6)
    record = tr.open_run(tmp_path).records["input/1"]
    assert list(record.steps) == list(range(18))


def test_records_can_be_read_while_training_runs(tmp_path):
    seen = []

    class Look(tr.Callback):
        def on_execution_end(self, trainer, execution):
            record = trainer.records["grad/first"]
            run = tr.open_run(tmp_path)
            assert not run.is_ended
            assert len(run.history) == len(record) == len(run.records["grad/first"])
            seen.append(len(record))
            names = {t.name for t in threading.enumerate()}
            assert THREAD in names

    trainer = make_trainer(tmp_path)
    data = tr.batches((X, Y), 8, repeat=True)
    trainer.fit(data, steps=20, callbacks=[Look()], progress=False)
    assert seen == [5, 10, 15, 20]
    assert tr.open_run(tmp_path).is_ended
    assert THREAD not in {t.name for t in threading.enumerate()}


def test_live_taps_still_stream(tmp_path):
    trainer = make_trainer(tmp_path, [tr.Tap("grad/first", reduce="norm", live=True)])
    train(trainer, 20)
    assert sum(len(record) for record in trainer.records.stream(timeout_s=1)) == 20
    assert len(trainer.records["grad/first"]) == 20


def test_what_ran_is_written_down(tmp_path):
    train(make_trainer(tmp_path, [tr.Tap(["grad/*", "loss"], mode=tr.every(5))], seed=7))
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["format"] == 1
    assert {"tailrace", "jax", "numpy"} <= set(info["versions"])
    assert info["devices"][0]["platform"] == "cpu"
    assert info["options"]["seed"] == 7
    assert info["taps"] == [{"select": ["grad/*", "loss"], "mode": "every(5)", "reduce": "stats"}]
    assert "grad/first" in {row["name"] for row in info["catalogue"]}
    assert tr.open_run(tmp_path).catalogue["grad/first"].shape == (6, 5)
    assert tr.open_run(tmp_path).plan is None


def test_plain_zarr_and_xarray_open_it(finished):
    xarray, zarr = pytest.importorskip("xarray"), pytest.importorskip("zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = xarray.open_zarr(finished, group="history", consolidated=False)
        stats = xarray.open_zarr(finished, group="records/0", consolidated=False)
        counts = xarray.open_zarr(finished, group="records/1", consolidated=False)
    assert history["metric0"].dims == ("step", "microbatch", "replica")
    assert history["metric0"].attrs["long_name"] == "loss"
    assert list(history["step"]) == list(range(20))
    assert set(stats.coords) == {"step", "microbatch", "replica", "stage", "tensor"}
    assert stats["mean"].dims == ("record", "tensor")
    one = stats["std"].sel(tensor="grad/second")
    expected = tr.open_run(finished).records["grad/second", "stats"].values["std"]
    np.testing.assert_array_equal(one, expected)
    assert counts["values"].dims == ("record", "tensor", "bin")
    assert list(counts["step"]) == [4, 9, 14, 19]
    assert zarr.open_group(finished, mode="r")["history/metric0"].shape == (20, 1, 1)


def test_names_never_become_paths(tmp_path):
    def loss_fn(params, x, y):
        return ((x @ params["../../evil\x1b[2J"])[:, 0] - y).mean() ** 2, {"../up/\n": y.mean()}

    params = {"../../evil\x1b[2J": np.ones((6, 1), np.float32)}
    trainer = tr.Trainer(
        loss_fn, optax.sgd(0.01), params, observe=["grad/*"], run_dir=tmp_path / "run"
    )
    train(trainer)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    run = tr.open_run(tmp_path / "run")
    texts = [repr(run.records), run.catalogue.to_text(), repr(run.history), run._repr_html_()]
    texts += [run.catalogue._repr_html_(), run.history._repr_html_()]
    assert not any("\x1b" in text for text in texts)
    assert run.records.names == ["grad/../../evil\x1b[2J"]
    assert "../up/\n" in run.history


# -- what is refused ----------------------------------------------------------------------------


def test_two_writers(tmp_path):
    holder = make_trainer(tmp_path)
    refused = make_trainer(tmp_path)

    class Second(tr.Callback):
        def on_execution_end(self, trainer, execution):
            with pytest.raises(tr.errors.RunError, match="has one writer at a time.* is being"):
                train(refused, 5)

    data = tr.batches((X, Y), 8, repeat=True)
    history = holder.fit(data, steps=5, callbacks=[Second()], progress=False)
    assert len(tr.open_run(tmp_path).history) == len(history) == 5
    with pytest.raises(tr.errors.RunError, match="holds one run, and .* holds one already"):
        train(refused, 5)
    with pytest.raises(tr.errors.RunError, match="holds one already. Give run_dir a new directory"):
        train(make_trainer(tmp_path), 5)


def test_a_file_and_a_foreign_group(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(tr.errors.RunError, match="run_dir is a directory.* is something else"):
        make_trainer(tmp_path / "file")
    pytest.importorskip("zarr").open_group(tmp_path / "group", mode="w")
    with pytest.raises(tr.errors.RunError, match="holds arrays that belong to none"):
        train(make_trainer(tmp_path / "group"))
    trainer = make_trainer(tmp_path / "file" / "below")
    with pytest.raises(
        tr.errors.RunError,
        match="cannot be written: NotADirectoryError: Not a dir.* is a file: give another",
    ):
        train(trainer)


def test_without_zarr(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zarr", None)
    text = r"A run directory needs the package 'zarr'.*tailrace\[records\]"
    with pytest.raises(tr.errors.MissingDependency, match=text):
        make_trainer(tmp_path)


@pytest.mark.parametrize(
    ("reduce", "text"),
    [
        (lambda v: {1: v.sum()}, r"dicts with strings as keys. Received the keys \[1\]"),
    ],
)
def test_trees_that_cannot_be_stored(tmp_path, reduce, text):
    with pytest.raises(tr.errors.RunError, match=text):
        train(make_trainer(tmp_path, [tr.Tap("grad/*", reduce=reduce)]))


def test_a_full_disk(tmp_path, monkeypatch):
    """The loop ends with a sentence; what was committed before can be read."""
    plain, room = durable.sync_file, [True]

    def fails(*args):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(*args)

    monkeypatch.setattr(durable, "sync_file", fails)
    monkeypatch.setattr(write_queue, "FULL_S", 0.2)
    monkeypatch.setattr(write_queue, "RETRY_S", 0.05)

    class Fill(tr.Callback):
        def on_execution_end(self, trainer, execution):
            assert len(trainer.records["grad/first"]) == 5
            room[0] = False

    monkeypatch.setattr(write_queue, "WRITE_EVERY_S", 0.0)
    trainer = make_trainer(tmp_path)
    data = tr.batches((X, Y), 8, repeat=True)
    text = "could not be written any further: OSError: No space left.* The 5 steps before are there"
    text += ".* Make room there"
    fill = Fill()
    fill.on_execution_end = _once(fill.on_execution_end)
    with pytest.raises(tr.errors.RunError, match=text):
        trainer.fit(data, steps=40, callbacks=[fill], progress=False)
    run = tr.open_run(tmp_path)
    assert len(run.history) == len(run.records["grad/first"]) == 5
    assert not run.is_ended
    assert len(trainer.history) >= 5
    room[0] = True
    train(trainer, 5)  # there is room again: the same run goes on behind what counted
    run.refresh()
    assert len(run.history) == 10
    assert run.is_ended


def _once(function):
    calls = []

    def call(*args):
        if not calls:
            calls.append(1)
            function(*args)

    return call


def test_an_exception_of_the_loop_is_not_masked(tmp_path):
    class Fails(tr.Callback):
        def on_execution_end(self, trainer, execution):
            raise ZeroDivisionError

    data, trainer = tr.batches((X, Y), 8, repeat=True), make_trainer(tmp_path)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(data, steps=20, callbacks=[Fails()], progress=False)
    assert len(tr.open_run(tmp_path).history) == len(trainer.history) > 0


def test_after_a_stop_at_nan_the_good_steps_are_there(tmp_path):
    bad = X.copy()
    bad[8 * 12, 0] = np.inf
    trainer = make_trainer(tmp_path, ["grad/*", tr.stop_on_nonfinite("loss")])
    with pytest.raises(tr.errors.NonFiniteError):
        trainer.fit(tr.batches((bad, Y), 8), steps=20, progress=False)
    assert len(tr.open_run(tmp_path).history) == 12


def test_a_loop_that_is_too_fast_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(write_queue, "MOST_QUEUED", 1)
    monkeypatch.setattr(write_queue, "MOST_WAITING", 1)
    train(make_trainer(tmp_path, steps_per_execution=2), 20)
    assert len(tr.open_run(tmp_path).history) == 20


# -- pipelines ----------------------------------------------------------------------------------


def first_stage(w, x, y):
    with jax.named_scope("hidden"):
        return jax.nn.relu(x @ w), y


def second_stage(w, h, y):
    return (h @ w)[:, 0], y


def pipelined(run_dir):
    pipeline = tr.Pipeline(
        [first_stage, second_stage], lambda out, y: ((out - y) ** 2).mean(), accumulation=4
    )
    taps = ["grad/*", tr.Tap("*/hidden", reduce="norm"), tr.Tap("update/*", mode="final")]
    trainer = tr.Trainer(
        pipeline, optax.sgd(0.01), list(PARAMS.values()), observe=taps, run_dir=run_dir,
        steps_per_execution=2,
    )  # fmt: skip
    trainer.fit(tr.batches((X, Y), 8, repeat=True), steps=6, progress=False)
    return trainer


def test_the_run_of_a_pipeline(tmp_path):
    plain, stored = pipelined(None), pipelined(tmp_path)
    run = tr.open_run(tmp_path)
    assert_same_records(plain.records, run.records)
    assert_same_records(plain.records, stored.records)
    assert run.plan == stored.plan
    assert run.plan.stages == 2
    assert "<svg" in run.plan._repr_svg_()
    first, second = run.records["grad/0"], run.records["grad/1"]
    assert set(first.stages) == {0}
    assert set(second.stages) == {1}
    assert list(first.microbatches) == [0, 1, 2, 3] * 6
    assert run.catalogue["grad/1"].stage == 1
    xarray = pytest.importorskip("xarray")
    found = xarray.open_zarr(tmp_path, group="records/0", consolidated=False)
    assert found["stage"].dims == ("tensor",)
    assert found["stage"].sel(tensor="grad/1") == 1
    assert not tr.diff(plain, run)


def test_executions_in_which_no_periodic_tap_looks(tmp_path):
    taps = [tr.Tap("param/*"), tr.Tap("grad/*", mode=tr.every(10))]
    plain, stored = make_trainer(None, taps), make_trainer(tmp_path, taps)
    for trainer in (plain, stored):
        trainer.fit([(X[:8], Y[:8])] * 3, epochs=7, progress=False)
    assert_same_records(plain.records, tr.open_run(tmp_path).records)


def test_a_run_stays_where_it_was_begun(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer("run", TAPS)
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(trainer, 8)
    assert len(tr.open_run(tmp_path / "run").history.steps) == 8


def test_training_that_waits_for_room_is_not_left_waiting(tmp_path, monkeypatch):
    """Room comes when the writer is done, which would otherwise be in an hour."""
    monkeypatch.setattr(write_queue, "MOST_QUEUED", 1)
    monkeypatch.setattr(write_queue, "WRITE_EVERY_S", 3600.0)
    trainer = make_trainer(tmp_path, TAPS)
    train(trainer, 23)
    assert len(tr.open_run(tmp_path).history.steps) == 23
