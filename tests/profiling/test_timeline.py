"""`tr.trace`, `fit(trace=...)`, `tr.counter`: what a timeline has, read back from its file."""

import itertools
import os
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.base.spans.recorder import recorders
from tailrace.feeds import waiting
from tailrace.profiling.programs import device_operations
from timelines import Timeline, no_overlap
from waits import LIMIT_S


def loss_fn(params, x, y):
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ params["w"])
    with jax.named_scope("head"):
        return ((h.sum(axis=1) - y) ** 2).mean()


def data(repeat=True):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype(np.float32)
    return tr.batches((x, x[:, 0]), 8, repeat=repeat)


def trainer(**options):
    params = {"w": np.full((8, 8), 0.1, np.float32)}
    return tr.Trainer(loss_fn, optax.sgd(0.1), params, steps_per_execution=5, **options)


class Slow(tr.Callback):
    def on_execution_end(self, trainer, execution):
        tr.counter("my own", execution.first_step)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A fit with everything: callbacks, checkpoints, validation, counters of its own."""
    directory = tmp_path_factory.mktemp("traced")
    one = trainer()
    history = one.fit(
        data(),
        steps=20,
        validation_data=data(repeat=False),
        validation_every=10,
        callbacks=[Slow()],
        checkpoint=directory / "checkpoints",
        progress=False,
        trace=directory / "traces",
    )
    (path,) = (directory / "traces").iterdir()
    return Timeline(path), history, path


def test_the_host_says_what_it_does(traced):
    timeline, _, path = traced
    assert path.name == "trace-000.pftrace"
    found = {one.name for slices in timeline.slices.values() for one in slices}
    assert {
        "dataset wait",
        "dataset read",
        "infeed copy",
        "compilation",
        "dispatch",
        "execution wait",
        "outfeed copy",
        "callback",
        "validation",
        "checkpoint",
        "checkpoint write",
    } <= found
    assert {"MainThread", "tailrace-infeed", "tailrace-checkpoint"} <= timeline.slices.keys()
    (callback, *_) = timeline.named("callback")
    assert callback.about == {"callback": "Slow"}


def test_executions_follow_each_other_and_cover_all_steps(traced):
    timeline, _, _ = traced
    executions = timeline.slices["executions"]
    assert no_overlap(executions)
    training = [one for one in executions if one.about.get("steps") == 5]
    assert [one.about["first_step"] for one in training[:4]] == [0, 5, 10, 15]
    dispatches = timeline.named("dispatch")
    assert len(dispatches) == len(executions)


def test_counters_are_in_the_timeline(traced):
    timeline, history, _ = traced
    losses = [value for _, value in timeline.values["loss"]]
    np.testing.assert_allclose(losses, history.loss[4::5], rtol=1e-6)
    assert [value for _, value in timeline.values["my own"]] == [0, 5, 10, 15]
    assert all(0 <= value <= 1 for _, value in timeline.values["infeed depth"])
    speeds = [value for _, value in timeline.values["steps/s"]]
    assert len(speeds) >= 4
    assert min(speeds) > 0


def test_operations_have_the_names_of_scopes(traced):
    timeline, _, _ = traced
    names = {
        one.name
        for path, slices in timeline.slices.items()
        if path.startswith("operations/device 0")
        for one in slices
    }
    for place in ("forward hidden", "backward hidden", "forward head", "optimizer"):
        assert any(name.startswith(place) for name in names), (place, names)


def test_operations_lie_in_the_executions_they_belong_to(traced):
    timeline, _, _ = traced
    executions = timeline.slices["executions"][:2]
    for path, slices in timeline.slices.items():
        if path.startswith("operations"):
            for one in slices:
                assert executions[0].start <= one.start <= one.end <= executions[1].end + 10_000_000


def test_a_wait_between_the_two_clocks_moves_no_operation(tmp_path, monkeypatch):
    """A busy machine may take the core from a thread that has read one of them."""
    waits = [0.2]

    def perf_counter_ns():
        now = time.perf_counter_ns()
        if waits:
            time.sleep(waits.pop())
        return now

    clock = types.SimpleNamespace(perf_counter=time.perf_counter, perf_counter_ns=perf_counter_ns)
    monkeypatch.setattr(device_operations, "time", clock)
    trainer().fit(data(), steps=10, progress=False, trace=tmp_path)
    assert not waits
    timeline = Timeline(next(tmp_path.iterdir()))
    starts = [
        one.start
        for path, slices in timeline.slices.items()
        if path.startswith("operations")
        for one in slices
    ]
    assert min(starts) >= timeline.slices["executions"][0].start


def test_the_trace_says_what_it_cost(traced):
    timeline, _, _ = traced
    cost = timeline.notes["cost of this trace"]
    assert cost["spans"] > 20
    assert 0 < cost["recording_s"] < 0.1
    assert cost["profiler_s"] > 0
    assert cost["writing_s"] > 0
    assert cost["left_out"] == 0
    assert "no_operations" not in cost


def test_several_fits_write_several_files_and_results_are_the_same(tmp_path):
    plain = trainer().fit(data(), steps=10, progress=False)
    one = trainer()
    first = one.fit(data(), steps=10, progress=False, trace=tmp_path)
    one.fit(data(), steps=5, progress=False, trace=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trace-000.pftrace",
        "trace-001.pftrace",
    ]
    np.testing.assert_array_equal(plain.loss, first.loss)
    assert recorders() == ()


def test_chosen_executions(tmp_path):
    one = trainer()
    with tr.trace(tmp_path, executions=range(2, 4)) as timeline:
        one.fit(data(), steps=25, progress=False)
    read = Timeline(timeline.path)
    assert [e.name for e in read.slices["executions"]] == ["execution 2", "execution 3"]
    assert len(read.named("dispatch")) == 2
    assert any(path.startswith("operations") for path in read.slices)


def test_an_exception_in_fit_leaves_a_whole_file(tmp_path):
    class Failing(tr.Callback):
        def on_execution_end(self, trainer, execution):
            raise RuntimeError("here")

    with pytest.raises(RuntimeError, match="here"):
        trainer().fit(data(), steps=10, callbacks=[Failing()], progress=False, trace=tmp_path)
    (path,) = tmp_path.iterdir()
    read = Timeline(path)
    (callback,) = [event for event in read.named("callback") if "raised" in event.about]
    assert callback.about == {"callback": "Failing", "raised": "RuntimeError"}
    assert read.slices["executions"]


def test_a_dataset_that_waits_is_seen_waiting(tmp_path, monkeypatch):
    waits, wait = threading.Event(), waiting.wait

    def noticed(futures, **kwargs):
        if not futures[0].done():
            waits.set()
        return wait(futures, **kwargs)

    def slow():
        for number in itertools.count():
            if number == 3:
                for _ in range(2):  # a first look may be the last one at what came before
                    waits.clear()
                    assert waits.wait(LIMIT_S)
                time.sleep(0.05)  # the fit waits, and this takes at least as long
            yield np.ones((8, 8), np.float32), np.ones(8, np.float32)

    monkeypatch.setattr(waiting, "wait", noticed)
    trainer().fit(slow, steps=10, progress=False, trace=tr.trace(tmp_path, operations=0))
    read = Timeline(next(tmp_path.iterdir()))
    assert sum(one.seconds for one in read.named("dataset read")) >= 0.05
    assert sum(one.seconds for one in read.named("dataset wait")) >= 0.05
    assert not any(path.startswith("operations") for path in read.slices)


def test_traces_in_traces_and_threads(tmp_path):
    def other():
        with tr.trace(tmp_path / "thread", operations=0):
            tr.counter("from a thread", 2)

    with tr.trace(tmp_path / "outer", operations=0) as outer:
        tr.counter("n", 1)
        with tr.trace(tmp_path / "inner", operations=0) as inner:
            trainer().fit(data(), steps=5, progress=False)
        thread = threading.Thread(target=other, name="my thread")
        thread.start()
        thread.join()
    found = {name: Timeline(t.path) for name, t in (("outer", outer), ("inner", inner))}
    assert len(found["inner"].named("dispatch")) == len(found["outer"].named("dispatch")) == 1
    assert "n" in found["outer"].values
    assert "n" not in found["inner"].values
    assert "from a thread" in found["outer"].values


def test_a_program_without_a_trainer(tmp_path):
    infeed = tr.InfeedQueue(data())

    def body(total, x, y):
        return total + x.sum() + y.sum()

    program = tr.compile(lambda total: tr.repeat(6, body, total, infeed=infeed))
    with tr.trace(tmp_path) as timeline:
        program(jnp.float32(0))
    read = Timeline(timeline.path)
    assert len(read.slices["executions"]) == 1


def test_nothing_happened_nothing_written(tmp_path):
    with tr.trace(tmp_path) as timeline:
        pass
    assert timeline.path is None
    assert list(tmp_path.iterdir()) == []


def test_a_thousand_steps_stay_small(tmp_path):
    one = trainer()
    one.fit(data(), steps=1000, progress=False, trace=tr.trace(tmp_path, operations=None))
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 50e6
    read = Timeline(path)
    assert len(read.slices["executions"]) == 200


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(tr.TailraceError, match=r"file' cannot be one: File exists. Give the path"),
        tr.trace(tmp_path / "file"),
    ):
        pass


def test_wrong_arguments():
    with pytest.raises(tr.TailraceError, match=r"executions is a range .* Received: 3"):
        tr.trace("x", executions=3)  # type: ignore[arg-type]
    with pytest.raises(
        tr.TailraceError,
        match="operations must be a whole number >= 0 .0: of no execution., or None",
    ):
        tr.trace("x", operations=-1)


def test_a_counter_is_a_number(tmp_path):
    tr.counter("no trace is open", "x")
    with (
        pytest.raises(tr.TailraceError, match=r"A counter has a number.*'rate', 'x'"),
        tr.trace(tmp_path),
    ):
        tr.counter("rate", "x")


def test_without_perfetto(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(tr.TailraceError, match=r"pip install 'tailrace\[trace\]'"):
        tr.trace(tmp_path).__enter__()


def test_the_environment_traces_a_whole_process(tmp_path):
    program = (
        "import numpy as np, optax, tailrace as tr\n"
        "x = np.ones((8, 4), np.float32)\n"
        "t = tr.Trainer(lambda w, x: ((x @ w) ** 2).mean(), optax.sgd(0.1), x[0])\n"
        "t.fit(tr.batches(x, 4, repeat=True), steps=3, progress=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TAILRACE_TRACE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    assert Timeline(path).named("compilation")
