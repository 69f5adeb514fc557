"""Datasets that block, and outfeeds that are not read: nothing waits or grows without an end."""

import _thread
import itertools
import logging
import threading

import jax
import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.feeds import reader, waiting
from tailrace.feeds.waiting import Patience
from threads import infeed_threads
from waits import LIMIT_S, Clock, wait_until


class Blocking:
    """Elements 0, 1, 2, ...; the one numbered `at` takes an hour, and comes when it is let go."""

    def __init__(self, clock, at=3, count=20):
        self.clock, self.at, self.count = clock, at, count
        self.gate = threading.Event()
        self.reached = threading.Event()

    def __iter__(self):
        for number in range(self.count):
            if number == self.at:
                self.clock.now += 3600
                self.reached.set()
                assert self.gate.wait(LIMIT_S), "something waits for the dataset"
            yield np.full(2, number, np.float32)


@pytest.fixture
def clock(monkeypatch):
    """By which readers measure how long an element takes: no other element takes any time."""
    made = Clock()
    monkeypatch.setattr(reader, "time", made)
    return made


@pytest.fixture
def blocking(clock):
    made = Blocking(clock)
    yield made
    made.gate.set()  # or its thread would stay


def numbers(staged):
    return np.asarray(staged.device[0])[:, 0].tolist()


DEVICE = jax.devices()[0]


class BlockingAtOnce(Blocking):
    """Blocks when it is iterated, before it has returned an iterator."""

    def __iter__(self):
        self.clock.now += 3600
        assert self.gate.wait(LIMIT_S), "something waits for the dataset"
        return iter([(np.ones((4, 2), np.float32),)] * 4)


@pytest.mark.parametrize(
    "use",
    [
        lambda data, trainer: tr.InfeedQueue(data, timeout_s=0.2).spec(),
        lambda data, trainer: trainer.fit(data, steps=2, timeout_s=0.2, progress=False),
        lambda data, trainer: trainer.evaluate(data, timeout_s=0.2),
        lambda data, trainer: trainer.predict(data, lambda w, x: x, timeout_s=0.2),
        lambda data, trainer: tr.dataset_benchmark(data, 1, 2, timeout_s=0.2),
    ],
    ids=["queue", "fit", "evaluate", "predict", "benchmark"],
)
def test_the_limit_counts_from_the_first_call_of_iter(clock, use):
    data = BlockingAtOnce(clock)
    trainer = tr.Trainer(
        lambda w, x: (x @ w).mean(), optax.sgd(0.1), np.zeros(2, np.float32), steps_per_execution=2
    )
    try:
        with pytest.raises(tr.errors.DataTimeout, match="element 0 of the dataset"):
            use(data, trainer)
    finally:
        data.gate.set()
    assert len(trainer.fit(data, steps=2, timeout_s=LIMIT_S, progress=False).loss) == 2


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
def test_every_way_to_read_has_the_limit(call, clock):
    data = Blocking(clock, at=0)
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


def test_late_data_is_noted(blocking, clock, monkeypatch, caplog):
    looks = []

    def ten_seconds_later(*args, **kwargs):
        if blocking.reached.is_set() and len(looks) < 13:
            looks.append(None)
            clock.now = since + 10 * len(looks)
        else:
            blocking.gate.set()
        return wait(*args, **kwargs)

    wait = waiting.wait
    with tr.InfeedQueue(blocking) as queue, caplog.at_level(logging.WARNING, "tailrace"):
        queue.take(2, DEVICE)
        assert blocking.reached.wait(LIMIT_S)
        since = clock.now - 3600
        monkeypatch.setattr(waiting, "wait", ten_seconds_later)
        monkeypatch.setattr(waiting, "LOOK_S", 0.01)
        assert numbers(queue.take(2, DEVICE)) == [2, 3]
    assert "Still waiting for element 3 of the dataset (Blocking), for 30 s now." in caplog.text
    assert caplog.text.count("Still waiting") == 3  # after 30, 60, 120 s


def test_a_wait_can_be_stopped_from_elsewhere(blocking):
    looks = []
    with tr.InfeedQueue(blocking) as queue:
        queue.take(2, DEVICE)
        assert blocking.reached.wait(LIMIT_S)
        queue.patience = Patience(stopped=lambda: looks.append(None) or len(looks) == 3)
        with pytest.raises(tr.errors.WaitStopped, match="Waiting for element 3 .* was stopped"):
            queue.take(2, DEVICE)
        blocking.gate.set()
        assert numbers(queue.take(2, DEVICE)) == [2, 3]


def test_rest_does_not_wait_for_a_dataset_that_blocks(blocking):
    queue = tr.InfeedQueue(blocking)
    queue.take(2, DEVICE)  # 2 and 3 are being read now
    assert blocking.reached.wait(LIMIT_S)
    queue.rest()
    blocking.gate.set()
    assert numbers(queue.take(2, DEVICE)) == [2, 3]  # what was being read is taken up
    queue.close()


def test_another_dataset_does_not_wait_for_the_one_that_blocks(blocking):
    others = infeed_threads()
    with tr.InfeedQueue(blocking) as queue:
        queue.take(2, DEVICE)
        assert blocking.reached.wait(LIMIT_S)
        (old,) = infeed_threads() - others
        queue.restart([np.full(2, 9, np.float32)] * 2)
        assert numbers(queue.take(2, DEVICE)) == [9, 9]
        assert old.is_alive()  # it still waits inside the old one
    blocking.gate.set()
    old.join(LIMIT_S)


@pytest.mark.parametrize("timeout_s", [0, -1, "x", float("nan"), True])
def test_limits_that_are_none(timeout_s):
    with pytest.raises(tr.errors.OptionError, match="timeout_s is a number greater than 0"):
        tr.InfeedQueue([1.0], timeout_s=timeout_s)


def test_ctrl_c_leaves_a_fit_whose_dataset_blocks(blocking, monkeypatch):
    trainer = tr.Trainer(
        lambda w, x: ((x - w) ** 2).mean(), optax.sgd(0.1), np.float32(0), steps_per_execution=1
    )
    others, wait, looks = infeed_threads(), waiting.wait, []

    def interrupted(*args, **kwargs):
        if blocking.reached.is_set():
            looks.append(None)
            if len(looks) == 3:  # the third look at the element that does not come
                _thread.interrupt_main()
        return wait(*args, **kwargs)

    monkeypatch.setattr(waiting, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(blocking, steps=20, progress=False)
    assert not blocking.gate.is_set()
    blocking.gate.set()
    wait_until(lambda: infeed_threads() <= others, "its thread did not end")


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
