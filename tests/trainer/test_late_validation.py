"""Data of `evaluate`, `predict` and validations that blocks is named, and `timeout_s` ends the wait."""

import logging
import threading

import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_close
from tailrace.errors import DataTimeout
from tailrace.feeds import reader, waiting
from threads import infeed_threads
from waits import LIMIT_S, Clock

X = [np.full(4, number, np.float32) for number in range(6)]


def loss_fn(w, x):
    return ((w - x) ** 2).mean()


def trainer_of(**options):
    return tr.Trainer(loss_fn, optax.sgd(0.1), np.float32(0.0), **options)


class Blocking:
    """Elements of two shapes; the one numbered `at` takes an hour, and comes when it is let go."""

    def __init__(self, clock, at):
        self.clock, self.at = clock, at
        self.reached, self.gate = threading.Event(), threading.Event()

    def __iter__(self):
        for number in range(6):
            if number == self.at:
                self.clock.now += 3600
                self.reached.set()
                assert self.gate.wait(LIMIT_S), "somebody waits for the dataset"
            yield np.full(4 if number < 3 else 2, number, np.float32)


@pytest.fixture
def blocking(monkeypatch):
    """Makes data that blocks; readers measure by a clock on which no other element takes any time."""
    clock, made = Clock(), []
    monkeypatch.setattr(reader, "time", clock)

    def of(at):
        made.append(Blocking(clock, at))
        return made[-1]

    yield of
    for one in made:
        one.gate.set()
    for thread in infeed_threads():  # those that were left in a dataset
        thread.join(LIMIT_S)


CALLS = {
    "evaluate": lambda trainer, data, **options: trainer.evaluate(data, **options),
    "predict": lambda trainer, data, **options: trainer.predict(data, loss_fn, **options),
    "live": lambda trainer, data, **options: list(
        trainer.predict(data, loss_fn, live=True, **options)
    ),
    "validation": lambda trainer, data, **options: trainer.fit(
        X, steps=2, validation_data=data, **options
    ),
}


@pytest.mark.parametrize(("call", "at"), [
    ("evaluate", 0),  # it tells the shape of the others
    ("evaluate", 2),
    ("evaluate", 4),  # the second of those with another shape
    ("predict", 2),
    ("live", 4),
    ("validation", 0),
    ("validation", 2),
])  # fmt: skip
def test_a_limit_names_the_source_and_the_element(blocking, call, at):
    trainer = trainer_of()
    text = rf"timeout_s=0.2 seconds, and element {at} of the dataset \(Blocking\) did not"
    with pytest.raises(DataTimeout, match=text) as raised:
        CALLS[call](trainer, blocking(at), timeout_s=0.2)
    assert ("late is validation_data" in str(raised.value)) == (call == "validation")
    # The program that was left waiting reads the next dataset, not the one that blocks.
    found = trainer.evaluate(X, timeout_s=LIMIT_S)["loss"]
    assert_close(found, np.mean([(trainer.params - x) ** 2 for x in X]))


def test_the_first_element_of_a_fit_has_the_limit(blocking):
    trainer, data = trainer_of(), blocking(0)
    elements = iter(data)
    for _ in range(2):  # also when it is asked for again, while the first read still waits
        with pytest.raises(DataTimeout, match=r"element 0 of the dataset \(generator __iter__\)"):
            trainer.fit(elements, steps=1, timeout_s=0.2)
    data.gate.set()
    trainer.fit(elements, steps=3, timeout_s=LIMIT_S)  # no element is lost
    expected = trainer_of()
    expected.fit(X[:3], steps=3)
    assert trainer.params == expected.params


def test_after_a_late_element_another_dataset_is_read(blocking):
    trainer = trainer_of()
    trainer.fit(X, steps=1)
    with pytest.raises(DataTimeout, match="element 2"):
        trainer.fit(blocking(2), epochs=1, timeout_s=0.2)
    trainer.fit(X, steps=1, timeout_s=LIMIT_S)


@pytest.mark.parametrize("call", ["evaluate", "validation"])
def test_a_note_names_the_source_and_the_element(blocking, call, monkeypatch, caplog):
    data = blocking(1)
    wait = waiting.wait

    def looked(*args, **kwargs):
        if "Still waiting" in caplog.text:
            data.gate.set()
        return wait(*args, **kwargs)

    monkeypatch.setattr(waiting, "wait", looked)
    with caplog.at_level(logging.WARNING, "tailrace"):
        CALLS[call](trainer_of(), data)
    assert "Still waiting for element 1 of the dataset (Blocking), for 3600 s now." in caplog.text
