"""The benchmark: its JSON, the infeed that it drives, and what it says about datasets that fail."""

import contextlib
import json
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.base.spans.recorder import Recorder
from tailrace.data.batches import batches
from tailrace.errors import DataError, DataExhausted, DataTimeout, ElementError, ProducerError
from tailrace.feeds import dispatch_table
from tailrace.feeds.benchmark.measure import dataset_benchmark, infeed_benchmark
from tailrace.feeds.benchmark.table import benchmark_table
from threads import infeed_threads
from waits import LIMIT_S, Clock, wait_until

KEYS = [
    "elements_processed",
    "total_bytes_processed",
    "time_elapsed",
    "elements_per_second",
    "bandwidth",
]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = infeed_threads()
    yield
    wait_until(lambda: infeed_threads() <= before, "a thread is left")


def endless(element):
    while True:
        yield element


def test_the_json_of_ten_epochs():
    text = dataset_benchmark(endless(np.ones((4, 4), np.float32)), 10, 1000)
    assert isinstance(text, str)
    loaded = json.loads(text)
    assert list(loaded) == ["epochs"]
    assert len(loaded["epochs"]) == 10
    for epoch in loaded["epochs"]:
        assert list(epoch) == KEYS
        assert all(epoch[key] > 0 for key in KEYS)
        assert epoch["elements_processed"] == 1000
        assert epoch["total_bytes_processed"] == 1000 * 64
        assert epoch["elements_per_second"] == pytest.approx(1000 / epoch["time_elapsed"])
        assert epoch["bandwidth"] == pytest.approx(64_000 / (1e9 * epoch["time_elapsed"]))


@contextlib.contextmanager
def recorded():
    """What happens inside, as a timeline would show it."""
    recorder = Recorder()
    recorder.open()
    try:
        yield recorder
    finally:
        recorder.close()


def infeed_spans(recorder):
    """(thread, what, how much) of everything that feeding does."""
    return [
        (recorder.threads[one.track], one.name, *one.about.values())
        for one in sorted(recorder.slices, key=lambda one: one.start)
        if one.name in ("dataset read", "infeed copy")
    ]


@pytest.mark.parametrize("kind", ["batches", "iterable"])
def test_it_is_the_infeed_of_a_fit(kind, monkeypatch):
    """A fit and the benchmark read the same blocks in the same thread by the same calls."""
    elements = [np.full(8, i, np.float32) for i in range(40)]
    read = []

    def dataset():
        if kind == "batches":
            return batches(np.stack(elements).reshape(-1), 8)
        return (read.append(int(e[0])) or e for e in elements)

    def loss_fn(params, x):
        return jnp.mean(x * params)

    monkeypatch.setattr(dispatch_table, "most_bytes", lambda: 32 * 10)  # ten elements a dispatch
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), np.float32(1), steps_per_execution=10)
    with recorded() as fit:
        trainer.fit(dataset(), steps=40, progress=False)
    of_fit = list(read)
    read.clear()
    with recorded() as benchmark:
        dataset_benchmark(dataset(), 2, 20)
    assert infeed_spans(benchmark) == infeed_spans(fit)
    expected = [("dataset read", 10), ("infeed copy", 320)] * 4
    assert [rest for _, *rest in infeed_spans(fit)] == [list(pair) for pair in expected]
    assert {thread for thread, *_ in infeed_spans(benchmark)} == {"tailrace-infeed"}
    assert read == of_fit == ([] if kind == "batches" else list(range(40)))


def test_nothing_is_read_behind_the_last_element():
    read = []
    dataset = (read.append(i) or np.float32(i) for i in range(100))
    dataset_benchmark(dataset, 3, 7)
    assert read == list(range(21))
    assert next(dataset) == 21


def test_blocks_are_as_long_as_an_execution_may_be(monkeypatch):
    monkeypatch.setattr(dispatch_table, "LONGEST", 4)
    with recorded() as recorder:
        dataset_benchmark([np.zeros(2, np.float32)] * 20, 2, 10)
    read = [count for _, name, count in infeed_spans(recorder) if name == "dataset read"]
    assert read == [4, 4, 2] * 2


@pytest.mark.parametrize("do_memcpy", [False, True])
def test_bytes_count_every_leaf(do_memcpy):
    recipe = batches({"x": np.zeros((100, 7), np.uint8), "y": np.zeros(100)}, 10, repeat=True)
    for dataset in (recipe, lambda: recipe):
        text = dataset_benchmark(dataset, 2, 37, do_memcpy=do_memcpy)
        assert [e["total_bytes_processed"] for e in json.loads(text)["epochs"]] == [37 * 150] * 2


def test_a_slow_dataset_is_measured_as_slow():
    def slow():
        while True:
            time.sleep(0.005)  # at least: a busy machine only makes it slower
            yield np.zeros(1)

    (epoch,) = json.loads(dataset_benchmark(slow, 1, 20))["epochs"]
    assert epoch["elements_per_second"] < 200


def test_exactly_enough_is_enough():
    dataset_benchmark(batches(np.arange(12), 2), 2, 3)
    dataset_benchmark([np.zeros(1)] * 6, 2, 3)


def test_through_an_infeed():
    infeed = SimpleNamespace(dataset=batches(np.zeros(64), 4, repeat=True))
    assert len(json.loads(infeed_benchmark(infeed, 5, 256))["epochs"]) == 5
    with pytest.raises(DataError, match=r"Received: a list, which has none\. For a dataset use"):
        infeed_benchmark([np.zeros(1)], 1, 1)


def test_print_stats(capsys):
    dataset_benchmark(endless(np.zeros(8)), 2, 10, print_stats=True)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert printed[0].startswith("Processed: ")
    assert printed[0].endswith(" elements/second.")
    assert printed[1].startswith("Bandwidth: ")
    assert printed[1].endswith(" GB/s.")
    dataset_benchmark(endless(np.zeros(8)), 2, 10)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"epochs": 0, "elements_per_epoch": 1}, r"epochs must be a whole number >= 1. .*epochs=0"),
        ({"epochs": 1, "elements_per_epoch": 0}, "elements_per_epoch must be a whole number >= 1"),
        ({"epochs": 1.5, "elements_per_epoch": 1}, r"Received: epochs=1\.5"),
        (
            {"epochs": 1, "elements_per_epoch": 1, "timeout_s": 0},
            "timeout_s is a number greater than",
        ),
    ],
)
def test_bad_counts(arguments, text):
    with pytest.raises(DataError, match=text):
        dataset_benchmark([np.zeros(1)], **arguments)


def test_what_is_no_dataset():
    with pytest.raises(DataError, match=r"not a dataset\. Received: a int: 3"):
        dataset_benchmark(3, 1, 1)


@pytest.mark.parametrize(
    "dataset",
    [
        batches(np.arange(14), 2),
        [np.zeros(1)] * 7,
        iter([np.zeros(1)] * 7),
        lambda: batches(np.arange(14), 2),
    ],
    ids=["batches", "list", "iterator", "function"],
)
def test_too_short(dataset):
    text = (
        r"asked for 10 elements \(epochs=2 times elements_per_epoch=5\), but the dataset \(.*\) "
        r"has only 7\. Ask for fewer, or make the dataset repeat"
    )
    with pytest.raises(DataExhausted, match=text):
        dataset_benchmark(dataset, 2, 5)


def test_too_short_in_the_first_of_several_epochs():
    with pytest.raises(DataExhausted, match=r"asked for 15 elements .* has only 3\."):
        dataset_benchmark(iter([np.zeros(1)] * 3), 3, 5)


def test_a_dimension_of_size_zero():
    with pytest.raises(DataError, match=r"size 0: .*Received: leaf \['b'\] of shape \(2, 0\)\. "):
        dataset_benchmark([{"a": np.zeros(1), "b": np.zeros((2, 0))}], 1, 1)


def test_an_element_without_arrays():
    with pytest.raises(DataError, match="needs at least one array"):
        dataset_benchmark([()], 1, 1)


def test_elements_that_are_not_alike():
    alike = r"shapes and dtypes of the first one: leaf \[0\] is float64\[2\]\. Received: element 1 "
    with pytest.raises(ElementError, match=alike + r"with float64\[3\]"):
        dataset_benchmark([[np.zeros(2)], [np.zeros(3)]], 1, 2)
    with pytest.raises(ElementError, match=alike + r"with int64\[2\]"):
        dataset_benchmark([[np.zeros(2)], [np.zeros(2, int)]], 1, 2, do_memcpy=False)
    with pytest.raises(ElementError, match=r"structure of the first one, .* Received: element 1"):
        dataset_benchmark([[np.zeros(2)], [np.zeros(2), np.zeros(2)]], 1, 2)
    with pytest.raises(
        ElementError, match=r"int64\[2\]\. Received.*int64\[1\].*drop_remainder=True"
    ):
        dataset_benchmark(batches(np.arange(5), 2, drop_remainder=False), 1, 3)


def test_the_datasets_own_exception_reaches_the_caller():
    def broken():
        yield np.zeros(1)
        yield np.zeros(1)
        raise OSError("the disk is gone")

    with pytest.raises(
        ProducerError,
        match=r"\(generator broken\) raised OSError after 2 elements: the disk is gone",
    ) as caught:
        dataset_benchmark(broken(), 1, 5)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.__traceback__ is not None
    assert any(frame.name == "broken" for frame in _frames(cause))


def _frames(error):
    import traceback

    return traceback.extract_tb(error.__traceback__)


def test_a_refused_leaf_reaches_the_caller():
    with pytest.raises(DataError, match=r"leaf \['t'\] holds strings"):
        dataset_benchmark([{"t": "a"}], 1, 1)


def test_a_dataset_that_hangs_is_left_and_its_thread_ends_with_it(monkeypatch):
    released, clock, others = threading.Event(), Clock(), infeed_threads()
    monkeypatch.setattr("tailrace.feeds.reader.time", clock)

    def stuck():
        yield np.zeros(1)
        clock.now += 1  # the first element took no time at all
        released.wait(LIMIT_S)
        yield np.zeros(1)

    text = (
        r"within timeout_s=0\.1 seconds, and element 1 of the dataset \(generator stuck\) did not"
    )
    with pytest.raises(DataTimeout, match=text):
        dataset_benchmark(stuck(), 1, 2, timeout_s=0.1)
    (thread,) = infeed_threads() - others
    assert thread.daemon  # or a dataset that hangs for good would keep the process alive
    released.set()
    thread.join(LIMIT_S)


def test_at_most_one_block_is_read_ahead(monkeypatch):
    monkeypatch.setattr(dispatch_table, "LONGEST", 16)
    read = []

    def counted():
        for i in range(10_000):
            read.append(i)
            yield np.zeros(2 if i == 20 else 1)

    with pytest.raises(ElementError, match="element 20"):
        dataset_benchmark(counted(), 1, 10_000)
    assert len(read) == 21  # what differs ends the reading: the rest stays unread


def test_the_table():
    table = benchmark_table(dataset_benchmark([np.zeros(4)] * 6, 3, 2), title="mine")
    assert table.title == "mine"
    assert table.row_count == 3
    assert [column.header for column in table.columns][-2:] == ["elements/s", "GB/s"]
