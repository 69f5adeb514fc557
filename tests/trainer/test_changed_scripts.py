"""A script that was changed before it is started again, and a trainer that two threads use."""

import threading

import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import CheckpointError, DataError, ProgramError
from tailrace.trainer.checkpoints.callback_matching import states_of
from waits import LIMIT_S

pytest.importorskip("orbax.checkpoint")

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = X.sum(axis=1)


def loss_fn(w, x, y):
    return ((x.astype(np.float32) @ w - y) ** 2).mean()


def trainer_of():
    return tr.Trainer(loss_fn, optax.sgd(0.1), np.zeros(3, np.float32), steps_per_execution=2)


def data():
    return tr.batches((X, Y), 4, shuffle=True, seed=5)


def rows(size=4):
    return [(X[n : n + size], Y[n : n + size]) for n in range(0, 64, size)]


class WithState(list):
    """A dataset whose iterators have a state."""

    def __iter__(self):
        return Positioned(list(super().__iter__()))


class Positioned:
    """An iterator with a state."""

    def __init__(self, elements):
        self.elements, self.place = elements, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(self.elements):
            raise StopIteration
        self.place += 1
        return self.elements[self.place - 1]

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


class Kept(tr.Callback):
    """Counts steps, also across a restart."""

    def __init__(self):
        self.steps, self.given = 0, None

    def on_step_end(self, trainer, step, values):
        self.steps += 1

    def get_state(self):
        return {"steps": self.steps, "kind": type(self).__name__}

    def set_state(self, state):
        self.given = state["kind"]
        self.steps = state["steps"]


class Other(Kept):
    """Another callback with a state."""


# -- the dataset --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (data, rows, "tr.batches"),
        (data, lambda: rows, "tr.batches"),
        (lambda: WithState(rows()), rows, "a dataset whose iterator has a state"),
    ],
    ids=["a list", "a function", "a list after iterators with a state"],
)
def test_another_kind_of_dataset_is_refused(tmp_path, first, second, kind):
    trainer_of().fit(first(), steps=4, checkpoint=tmp_path)
    with pytest.raises(
        DataError,
        match=f"^A fit continues with the dataset that it was begun with: {kind}. Received: .*"
        f"Give that dataset, or use another checkpoint directory.$",
    ):
        trainer_of().fit(second(), steps=6, checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("other", "form"),
    [
        (rows(2), r"float32\[2, 3\], float32\[2\]"),
        ([(x.astype(np.float16), y) for x, y in rows()], r"float16\[4, 3\], float32\[4\]"),
    ],
    ids=["smaller batches", "another dtype"],
)
def test_elements_of_another_form_are_refused(tmp_path, other, form):
    trainer_of().fit(rows(), steps=4, checkpoint=tmp_path)
    text = rf"an element of the dataset: 'float32\[4, 3\], float32\[4\]' there, '{form}' here"
    with pytest.raises(CheckpointError, match=text):
        trainer_of().fit(other, steps=6, checkpoint=tmp_path)
    whole = trainer_of()
    whole.fit(rows(), steps=6)
    resumed = trainer_of()
    resumed.fit(rows(), steps=6, checkpoint=tmp_path)
    assert_bits_equal(resumed.params, whole.params)


# -- callbacks ----------------------------------------------------------------------------------


def test_a_callback_gets_the_state_of_its_class(tmp_path, caplog):
    trainer_of().fit(data(), steps=4, checkpoint=tmp_path, callbacks=[Kept(), Other()])
    added, kept, again = tr.Callback(), Kept(), Kept()
    trainer_of().fit(data(), steps=6, checkpoint=tmp_path, callbacks=[added, again, kept])
    assert (again.given, again.steps) == ("Kept", 6)
    assert (kept.given, kept.steps) == (None, 2)  # the second of its class is new
    assert "has the state of callbacks that this fit does not have: Other." in caplog.text


def test_states_of_an_earlier_version_go_by_position():
    states = [{"a": 1}, {}]
    assert states_of([Kept()], states, None) == [{"a": 1}]
    assert states_of([Kept(), Other(), Kept()], states, None) == [{"a": 1}, {}, {}]
    assert states_of([Other(), Kept()], states, ["Kept", "Other"]) == [{}, {"a": 1}]


# -- threads ------------------------------------------------------------------------------------


def test_a_fit_of_another_thread_is_refused_from_its_start(monkeypatch):
    """Also before its first execution: both would read and train the same state."""
    trainer, begun, go_on = trainer_of(), threading.Event(), threading.Event()
    use = trainer.engine.use

    def waiting(*given):
        begun.set()
        assert go_on.wait(LIMIT_S)
        return use(*given)

    monkeypatch.setattr(trainer.engine, "use", waiting)
    thread = threading.Thread(target=lambda: trainer.fit(data(), steps=4))
    thread.start()
    assert begun.wait(LIMIT_S)
    with pytest.raises(ProgramError, match="^A trainer runs one fit at a time, and one is running"):
        trainer.fit(data(), steps=4)
    go_on.set()
    thread.join(LIMIT_S)
    assert trainer.step == 4
    trainer.fit(data(), steps=4)
    assert trainer.step == 8


@pytest.mark.parametrize(
    "read",
    [
        lambda trainer, folder: trainer.params,
        lambda trainer, folder: trainer.state,
        lambda trainer, folder: trainer.evaluate(rows()),
        lambda trainer, folder: trainer.predict(rows(), lambda w, x, y: x @ w),
        lambda trainer, folder: trainer.save(folder / "saved"),
    ],
    ids=["params", "state", "evaluate", "predict", "save"],
)
def test_state_that_a_running_fit_overwrites_is_not_read(tmp_path, read):
    trainer = trainer_of()
    trainer.fit(data(), steps=2)
    trainer.engine.state.params.delete()  # as an execution does that is running
    text = (
        "^The executions of a running fit overwrite the state .* in a callback, or after the fit.$"
    )

    def elements():  # read by the fit, while it runs
        with pytest.raises(ProgramError, match=text):
            read(trainer, tmp_path)
        raise OSError("enough")
        yield

    with pytest.raises(DataError, match="enough"):
        trainer.fit(elements(), steps=2)
    with pytest.raises(RuntimeError, match="deleted"):  # without a fit it is no matter of threads
        read(trainer, tmp_path)
