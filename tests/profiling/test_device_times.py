"""What the device waits for in a fit with a run directory, by what the host does meanwhile."""

import threading

import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.base.spans import device_times
from tailrace.base.spans import span as span_module
from tailrace.base.spans.device_times import ACTIVITIES, DeviceTimes, outermost
from tailrace.base.spans.recorder import listeners, recorders
from tailrace.base.spans.span import is_traced, span
from tailrace.feeds import waiting
from tailrace.trainer.observation import journal
from waits import LIMIT_S, Clock, wait_until


@pytest.fixture
def clock(monkeypatch):
    """Stands still while a test, the device or a thread takes its time."""
    made = Clock()
    monkeypatch.setattr(device_times, "time", made)
    monkeypatch.setattr(span_module, "time", made)
    finished = journal.Finished
    monkeypatch.setattr(journal, "Finished", lambda *a, **k: finished(*a, ended=made.now, **k))
    return made


class Ready:
    """An execution that ends when the test says so."""

    def __init__(self, times):
        self._times, self._over = times, threading.Event()

    def end(self):
        (run,) = (one for one in self._times._runs if one.ready is self)
        self._over.set()
        wait_until(lambda: run.ended, "the end of an execution was not noted")

    def block_until_ready(self):
        assert self._over.wait(LIMIT_S)


def shares(times):
    return dict(zip(ACTIVITIES, times, strict=True))


def only(**seconds):
    return pytest.approx({**dict.fromkeys(ACTIVITIES, 0.0), **seconds})


def test_each_idle_moment_belongs_to_the_span_that_covers_it(clock):
    times = DeviceTimes()
    first, second = Ready(times), Ready(times)
    with times.open():
        with span("compilation"):
            clock.now += 0.05
        with span("dispatch"):
            pass
        times.began(first)
        with span("dataset wait"):
            clock.now += 0.04  # the device computes
            first.end()
            clock.now += 0.08  # it waits for data
        with span("dispatch"):
            pass
        times.began(second)
        found = shares(times.ended())
        with span("validation"), span("dataset wait"):
            second.end()
            clock.now += 0.06
        later = shares(times.ended())
    assert found == only(compilation=0.05, device=0.04, data=0.08)
    assert later == only(validation=0.06)  # not data: that wait is a part of the validation
    assert listeners() == ()


def test_an_execution_starts_at_the_end_of_the_one_before(clock):
    times = DeviceTimes()
    first, second = Ready(times), Ready(times)
    with times.open():
        times.began(first)
        times.began(second)
        clock.now += 0.03
        first.end()
        found = shares(times.ended())
        clock.now += 0.05
        second.end()
        later = shares(times.ended())
    assert found == only(device=0.03)
    assert later == only(device=0.05)


def test_an_execution_in_parts_starts_with_the_first(clock):
    times = DeviceTimes()
    with times.open():
        for _ in range(2):
            with span("dispatch"):
                pass
            clock.now += 0.02
        whole = Ready(times)
        times.began(whole, dispatches=2)
        whole.end()
        found = shares(times.ended())
    assert found == only(device=0.04)


def test_spans_between_executions_are_bounded(clock, monkeypatch):
    monkeypatch.setattr(device_times, "MOST", 3)
    times = DeviceTimes()
    with times.open():
        for _ in range(5):
            with span("dataset wait"):
                clock.now += 0.25
        one = Ready(times)
        times.began(one)
        one.end()
        found = shares(times.ended())
    assert found == only(data=0.75, host=0.5)


def test_spans_of_other_threads_do_not_count_and_nothing_is_traced(clock):
    times = DeviceTimes()
    with times.open():
        assert not is_traced()
        assert recorders() == ()

        def other():
            with span("dataset wait"):
                clock.now += 0.03

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        one = Ready(times)
        times.began(one)
        one.end()
        found = shares(times.ended())
        assert times.ended() == ()
    assert found == only(host=0.03)


def test_spans_in_spans():
    inner = [("a", 1, 2), ("b", 3, 4), ("outer", 0, 5), ("a", 6, 7)]
    assert outermost(inner) == [("outer", 0, 5), ("a", 6, 7)]


@pytest.fixture
def idle(monkeypatch):
    """Waits until every execution of a fit has ended, and its end is noted."""
    started = []

    class Run(device_times.Run):
        def __init__(self, *about):
            super().__init__(*about)
            started.append(self)

    monkeypatch.setattr(device_times, "Run", Run)
    return lambda: wait_until(lambda: all(one.ended for one in started), "it has not ended")


def fitted(directory, dataset, **options):
    """What the nine periods between ten executions were spent on."""
    trainer = tr.Trainer(
        lambda w, x: ((x @ w) ** 2).mean(),
        optax.sgd(0.1),
        np.ones(4, np.float32),
        steps_per_execution=2,
        run_dir=directory,
    )
    trainer.fit(dataset, steps=20, progress=False, **options)
    rows = tr.open_run(directory).executions
    # The times between executions add up to the time between their ends.
    whole = rows["times"][1:].sum(), rows["ended"][-1] - rows["ended"][0]
    np.testing.assert_allclose(*whole)
    return shares(rows["times"][1:].sum(axis=0))


def test_a_slow_dataset_in_a_run(tmp_path, clock, idle, monkeypatch):
    waits, wait = threading.Event(), waiting.wait

    def noticed(futures, **kwargs):
        if not futures[0].done():
            waits.set()
        return wait(futures, **kwargs)

    def slow():
        while True:
            for first in (True, False):
                if first:  # of an execution: the fit waits for it, with nothing else to do
                    for _ in range(2):  # a first look may be the last one at the execution before
                        waits.clear()
                        assert waits.wait(LIMIT_S)
                    idle()
                clock.now += 0.03
                yield np.ones((8, 4), np.float32)

    monkeypatch.setattr(waiting, "wait", noticed)
    monkeypatch.setattr(waiting, "LOOK_S", 0.01)
    # An execution is collected when the next one is dispatched: the first period has two waits.
    assert fitted(tmp_path / "run", slow) == only(data=8 * 0.06)


def test_a_slow_callback_in_a_run(tmp_path, clock, idle):
    class Slow(tr.Callback):
        def on_execution_end(self, trainer, execution):
            idle()
            clock.now += 0.05

    data = tr.batches(np.ones((16, 4), np.float32), 8, repeat=True)
    assert fitted(tmp_path / "run", data, callbacks=[Slow()]) == only(callbacks=9 * 0.05)


def test_without_a_run_directory_nothing_listens():
    heard = []

    class Look(tr.Callback):
        def on_execution_end(self, trainer, execution):
            heard.append(listeners())

    trainer = tr.Trainer(lambda w, x: ((x - w) ** 2).mean(), optax.sgd(0.1), np.float32(0))
    trainer.fit(
        tr.batches(np.ones(16, np.float32), 8, repeat=True),
        steps=4,
        progress=False,
        callbacks=[Look()],
    )
    assert set(heard) == {()}
