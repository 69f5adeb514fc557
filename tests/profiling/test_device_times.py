"""What the device waits for in a fit with a run directory, by what the host does meanwhile."""

import threading
import time

import numpy as np
import optax

import tailrace as tr
from tailrace.spans.device_times import ACTIVITIES, DeviceTimes, outermost
from tailrace.spans.recorder import listeners, recorders
from tailrace.spans.span import is_traced, span


class Ready:
    """An execution that ends when it is told to."""

    def __init__(self):
        self._over = threading.Event()

    def end(self):
        self._over.set()
        time.sleep(0.01)  # for the thread that notes it

    def block_until_ready(self):
        assert self._over.wait(10)


def shares(times):
    return dict(zip(ACTIVITIES, times, strict=True))


def test_each_idle_moment_belongs_to_the_span_that_covers_it():
    times = DeviceTimes()
    first, second = Ready(), Ready()
    before = time.perf_counter()
    with times.open():
        with span("compilation"):
            time.sleep(0.05)
        with span("dispatch"):
            pass
        times.began(first)
        with span("dataset wait"):
            time.sleep(0.04)  # the device computes
            first.end()
            time.sleep(0.08)  # it waits for data
        with span("dispatch"):
            pass
        times.began(second)
        found = shares(times.ended())
        took = time.perf_counter() - before
        with span("validation"), span("dataset wait"):
            second.end()
            time.sleep(0.06)
        later = shares(times.ended())
    assert 0.17 <= sum(found.values()) <= took
    assert found["compilation"] >= 0.05
    assert found["data"] >= 0.08
    assert found["device"] >= 0.04
    assert later["validation"] >= 0.06  # not data: that wait is a part of the validation
    assert later["data"] == 0
    assert listeners() == ()


def test_an_execution_starts_at_the_end_of_the_one_before():
    times = DeviceTimes()
    first, second = Ready(), Ready()
    with times.open():
        times.began(first)
        times.began(second)
        time.sleep(0.03)
        first.end()
        found = shares(times.ended())
        time.sleep(0.05)
        second.end()
        later = shares(times.ended())
    assert found["device"] >= 0.03
    assert later["device"] >= 0.05
    assert found["data"] == later["data"] == 0


def test_spans_of_other_threads_do_not_count_and_nothing_is_traced():
    times = DeviceTimes()
    with times.open():
        assert not is_traced()
        assert recorders() == ()

        def other():
            with span("dataset wait"):
                time.sleep(0.03)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        one = Ready()
        times.began(one)
        one.end()
        found = shares(times.ended())
        assert times.ended() == ()
    assert found["data"] == 0
    assert found["host"] >= 0.03


def test_spans_in_spans():
    inner = [("a", 1, 2), ("b", 3, 4), ("outer", 0, 5), ("a", 6, 7)]
    assert outermost(inner) == [("outer", 0, 5), ("a", 6, 7)]


def fitted(directory, dataset, **options):
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
    np.testing.assert_allclose(*whole, rtol=0.1)
    return shares(rows["times"][1:].sum(axis=0))


def test_a_slow_dataset_in_a_run(tmp_path):
    def slow():
        while True:
            time.sleep(0.03)
            yield np.ones((8, 4), np.float32)

    found = fitted(tmp_path / "run", slow)
    assert found["data"] >= 0.5 * sum(found.values())


def test_a_slow_callback_in_a_run(tmp_path):
    class Slow(tr.Callback):
        def on_execution_end(self, trainer, execution):
            time.sleep(0.05)

    data = tr.batches(np.ones((16, 4), np.float32), 8, repeat=True)
    found = fitted(tmp_path / "run", data, callbacks=[Slow()])
    assert found["callbacks"] >= 0.4
    assert found["callbacks"] >= 0.5 * sum(found.values())


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
