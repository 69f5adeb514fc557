"""Datasets that block, and outfeeds that are not read: nothing waits or grows without an end."""

import _thread
import itertools
import logging
import threading
import time

import jax
import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.feeds import staging, waiting
from tailrace.feeds.waiting import Patience
from threads import infeed_threads


class Blocking:
    """Elements 0, 1, 2, ...; the one numbered `at` comes when it is let go."""

    def __init__(self, at=3, count=20):
        self.at, self.count = at, count
        self.gate = threading.Event()
        self.reached = threading.Event()

    def __iter__(self):
        for number in range(self.count):
            if number == self.at:
                self.reached.set()
                assert self.gate.wait(30)
            yield np.full(2, number, np.float32)


@pytest.fixture
def blocking():
    made = Blocking()
    yield made
    made.gate.set()  # or its thread would stay


def numbers(staged):
    return np.asarray(staged.device[0])[:, 0].tolist()


DEVICE = jax.devices()[0]


def test_a_limit_names_the_source_and_the_element(blocking):
    with tr.InfeedQueue(blocking, timeout_s=0.2) as queue:
        assert numbers(queue.take(2, DEVICE)) == [0, 1]
        text = r"timeout_s=0.2 seconds, and element 3 of the dataset \(Blocking\) did not"
        with pytest.raises(tr.errors.DataTimeout, match=text):
            queue.take(2, DEVICE)
        with pytest.raises(TimeoutError):
            queue.take(2, DEVICE)
        blocking.gate.set()
        assert numbers(queue.take(2, DEVICE)) == [2, 3]  # nothing is lost
        assert numbers(queue.take(2, DEVICE)) == [4, 5]


@pytest.mark.parametrize("call", ["spec", "remaining", "need", "pad"])
def test_every_way_to_read_has_the_limit(call):
    data = Blocking(at=0)
    with tr.InfeedQueue(data, timeout_s=0.2) as queue:
        calls = {
            "spec": queue.spec,
            "remaining": lambda: queue.remaining(2),
            "need": lambda: queue.need(2),
            "pad": lambda: queue.pad(2, 4),
        }
        with pytest.raises(tr.errors.DataTimeout, match="element 0 of the dataset"):
            calls[call]()
        data.gate.set()
        calls[call]()
        assert numbers(queue.take(2, DEVICE)) == [0, 1]


def test_late_data_is_noted(blocking, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "NOTE_S", 0.1)
    monkeypatch.setattr(waiting, "LOOK_S", 0.05)
    timer = threading.Timer(0.5, blocking.gate.set)
    timer.start()
    with tr.InfeedQueue(blocking) as queue, caplog.at_level(logging.WARNING, "tailrace"):
        queue.take(2, DEVICE)
        assert numbers(queue.take(2, DEVICE)) == [2, 3]
    timer.join()
    assert "Still waiting for element 3 of the dataset (Blocking), for 0 s now." in caplog.text
    assert 1 < caplog.text.count("Still waiting") < 5  # after 0.1, 0.2, 0.4 s


def test_a_wait_can_be_stopped_from_elsewhere(blocking):
    stop = threading.Event()
    with tr.InfeedQueue(blocking) as queue:
        queue.patience = Patience(stopped=stop.is_set)
        queue.take(2, DEVICE)
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(tr.errors.WaitStopped, match="Waiting for element 3 .* was stopped"):
            queue.take(2, DEVICE)
        stop.clear()
        blocking.gate.set()
        assert numbers(queue.take(2, DEVICE)) == [2, 3]


def test_rest_does_not_wait_for_a_dataset_that_blocks(blocking, monkeypatch):
    monkeypatch.setattr(staging, "LEAVE_S", 0.1)
    queue = tr.InfeedQueue(blocking)
    queue.take(2, DEVICE)  # 2 and 3 are being read now
    assert blocking.reached.wait(10)
    began = time.monotonic()
    queue.rest()
    assert time.monotonic() - began < 2
    blocking.gate.set()
    assert numbers(queue.take(2, DEVICE)) == [2, 3]  # what was being read is taken up
    queue.close()


def test_another_dataset_does_not_wait_for_the_one_that_blocks(blocking, monkeypatch):
    monkeypatch.setattr(staging, "LEAVE_S", 0.1)
    with tr.InfeedQueue(blocking) as queue:
        queue.take(2, DEVICE)
        assert blocking.reached.wait(10)
        (old,) = infeed_threads()
        queue.restart([np.full(2, 9, np.float32)] * 2)
        assert numbers(queue.take(2, DEVICE)) == [9, 9]
        assert old.is_alive()  # it still waits inside the old one
    blocking.gate.set()
    old.join(10)


@pytest.mark.parametrize("timeout_s", [0, -1, "x", float("nan"), True])
def test_limits_that_are_none(timeout_s):
    with pytest.raises(tr.errors.OptionError, match="timeout_s is a number greater than 0"):
        tr.InfeedQueue([1.0], timeout_s=timeout_s)


def test_ctrl_c_leaves_a_fit_whose_dataset_blocks(blocking):
    trainer = tr.Trainer(
        lambda w, x: ((x - w) ** 2).mean(), optax.sgd(0.1), np.float32(0), steps_per_execution=1
    )

    def interrupt():
        assert blocking.reached.wait(30)
        time.sleep(0.3)
        interrupted.append(time.monotonic())
        _thread.interrupt_main()

    interrupted = []
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(blocking, steps=20, progress=False)
    assert time.monotonic() - interrupted[0] < 3
    thread.join()
    blocking.gate.set()
    give_up = time.monotonic() + 10
    while infeed_threads() and time.monotonic() < give_up:
        time.sleep(0.01)


# -- faults of datasets ---------------------------------------------------------------------------


def test_a_dataset_that_raises_when_it_is_iterated():
    def fails():
        raise OSError("no such bucket")

    with (
        tr.InfeedQueue(fails) as queue,
        pytest.raises(
            tr.errors.ProducerError, match="raised OSError when it was iterated: no such"
        ),
    ):
        queue.spec()


def test_a_first_element_that_is_wrong_is_not_passed_over():
    with tr.InfeedQueue(lambda: iter([np.zeros((0, 2)), np.ones(2)])) as queue:
        for _ in range(2):
            with pytest.raises(tr.errors.DataError, match="may not have a dim of size 0"):
                queue.take(1, DEVICE)


# -- outfeeds -------------------------------------------------------------------------------------


def test_an_outfeed_that_nobody_reads_has_a_limit():
    outfeed = tr.OutfeedQueue(most_bytes=1000)

    @tr.compile
    def program(x):
        return tr.repeat(10, lambda x: outfeed.enqueue(x + 1), x)

    for _ in itertools.repeat(None, 3):
        program(np.zeros(8, np.float32))  # 320 bytes each
    text = (
        "960 bytes of 3 executions wait here, of at most 1,000: 320 more have no room. Call dequeue"
    )
    with pytest.raises(tr.errors.FeedError, match=text):
        program(np.zeros(8, np.float32))
    assert outfeed.dequeue().shape == (30, 8)  # what waits is kept
    program(np.zeros(8, np.float32))
    assert outfeed.dequeue().shape == (10, 8)


def test_an_outfeed_may_drop_the_oldest(caplog):
    outfeed = tr.OutfeedQueue(most_bytes=1000, when_full="drop_oldest")

    @tr.compile
    def program(x):
        return tr.repeat(10, lambda x: outfeed.enqueue(x + 1), x)

    for number in range(8):
        program(np.full(8, 100 * number, np.float32))
    found = outfeed.dequeue()
    assert found.shape == (30, 8)
    assert found[0, 0] == 501
    assert outfeed.dropped == 5
    assert caplog.text.count("the oldest executions are dropped") == 1


@pytest.mark.parametrize(
    "options", [{"most_bytes": 0}, {"most_bytes": "1"}, {"when_full": "block"}]
)
def test_options_of_a_full_outfeed(options):
    with pytest.raises(tr.errors.OptionError, match=next(iter(options))):
        tr.OutfeedQueue(**options)
