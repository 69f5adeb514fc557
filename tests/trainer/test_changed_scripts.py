"""A script that was changed before it is started again, and a trainer that two threads use."""

import threading

import numpy as np
import optax
import pytest

import tailrace as tr
from killed_fits import Kill, Killed
from oracles import assert_bits_equal
from tailrace.errors import CheckpointError, DataError, OptionError, ProgramError, RunError
from tailrace.runs.writer import RunWriter
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
    ],
    ids=["params", "state", "evaluate", "predict"],
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


def in_another_thread(work):
    """The error of a function that another thread calls now, or None."""
    found = []

    def call():
        try:
            found.append(work())
        except ProgramError as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(LIMIT_S)
    return found[0]


def test_a_state_is_set_and_saved_by_the_thread_of_the_fit(tmp_path):
    """Another one is refused, and the training is that of a fit alone; a callback may set it."""
    alone, trainer, errors = trainer_of(), trainer_of(), []
    alone.fit(data(), steps=8)
    before = trainer.state

    class Meddling(tr.Callback):
        def on_execution_end(self, trainer, execution):
            errors.append(in_another_thread(lambda: setattr(trainer, "state", before)))
            errors.append(in_another_thread(lambda: trainer.save(tmp_path / "saved")))
            errors.append(in_another_thread(lambda: trainer.restore(tmp_path / "saved")))

    trainer.fit(data(), steps=8, callbacks=[Meddling()])
    texts = [str(error) for error in errors]
    assert len(texts) == 12
    for text, rule in zip(
        texts, ["that is set", "that is saved", "one fit at a time"] * 4, strict=True
    ):
        assert rule in text
    assert "Do it in a callback, which runs between executions, or after the fit." in texts[0]
    assert_bits_equal(trainer.params, alone.params)
    assert not (tmp_path / "saved").exists()

    class Setting(tr.Callback):
        def on_execution_end(self, trainer, execution):
            if trainer.step == 6:
                trainer.save(tmp_path / "saved")
                trainer.state = before

    trainer.fit(data(), steps=6, callbacks=[Setting()])
    assert in_another_thread(lambda: setattr(trainer, "state", before)) is None
    assert_bits_equal(trainer.params, before.params)


# -- run directories ----------------------------------------------------------------------------


def run(folder, run_dir, kill=None, seed=0, steps=12):
    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(0.1),
        np.zeros(3, np.float32),
        steps_per_execution=2,
        seed=seed,
        run_dir=run_dir,
        config={"seed": seed},
    )
    call = {"steps": steps, "checkpoint": tr.Checkpoint(folder, every=2)}
    try:
        trainer.fit(data(), **call, callbacks=[Kill(kill)] if kill is not None else [])
    except Killed:
        return None
    return trainer


def test_another_runs_directory_is_refused(tmp_path):
    """It stays as it was; its own fit, moved or not, goes on in it."""
    run(tmp_path / "a", tmp_path / "a-run", kill=3)
    other = run(tmp_path / "b", tmp_path / "b-run", seed=9)
    kept = {f: f.read_bytes() for f in (tmp_path / "b-run").rglob("*") if f.is_file()}
    text = (
        r"^A run directory belongs to one training, and '.*b-run' has the run of another one than the "
        r"checkpoints in '.*/a' \(its own: '.*/b'\)"
    )
    for steps in (12, 4):  # also where nothing is left to train
        with pytest.raises(RunError, match=text):
            run(tmp_path / "a", tmp_path / "b-run", steps=steps)
    with pytest.raises(RunError, match=text):
        trainer_in(tmp_path / "b-run").rewind(4, data(), checkpoint=tmp_path / "a")
    assert {f: f.read_bytes() for f in (tmp_path / "b-run").rglob("*") if f.is_file()} == kept
    for name in ("a", "a-run"):
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
    run(tmp_path / "moved-a", tmp_path / "moved-a-run")
    for name, seed in (("moved-a-run", 0), ("b-run", 9)):
        found = tr.open_run(tmp_path / name)
        assert found.history.steps.tolist() == list(range(12))
        assert found.info["config"] == {"seed": seed}
    assert_bits_equal(tr.open_run(tmp_path / "b-run").history.loss, other.history.loss)


def trainer_in(run_dir):
    return tr.Trainer(loss_fn, optax.sgd(0.1), np.zeros(3, np.float32), run_dir=run_dir)


def test_a_mark_that_does_not_say_whose_it_is(tmp_path, monkeypatch):
    """Checkpoints of earlier versions: the run says where its checkpoints are, if they are there."""
    mark = RunWriter.mark

    def as_before(self):
        rows = mark(self)
        return lambda: {k: v for k, v in rows().items() if k != "run"}

    monkeypatch.setattr(RunWriter, "mark", as_before)
    run(tmp_path / "a", tmp_path / "a-run", kill=3)
    run(tmp_path / "b", tmp_path / "b-run", kill=3, seed=9)
    monkeypatch.undo()
    with pytest.raises(RunError, match="belongs to one training"):
        run(tmp_path / "a", tmp_path / "b-run")
    for name in ("a", "a-run"):
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
    run(tmp_path / "moved-a", tmp_path / "moved-a-run")
    run(tmp_path / "b", tmp_path / "b-run", seed=9)
    for name in ("moved-a-run", "b-run"):
        assert tr.open_run(tmp_path / name).history.steps.tolist() == list(range(12))


def test_a_run_directory_added_changed_or_left_out(tmp_path, caplog):
    """What it then lacks is noted; a run that was left goes on nowhere."""
    run(tmp_path / "a", tmp_path / "first", kill=3)
    run(tmp_path / "a", tmp_path / "second", kill=1)
    assert "second' begins in the middle of a training: the fit is resumed, and its" in caplog.text
    caplog.clear()
    run(tmp_path / "a", None)
    assert "was stored in a run directory. Received: no run_dir=" in caplog.text
    assert tr.open_run(tmp_path / "first").history.steps.tolist() == list(range(8))
    with pytest.raises(RunError, match="holds one already"):
        run(tmp_path / "a", tmp_path / "second", steps=14)


def test_one_directory_for_a_run_and_its_checkpoints(tmp_path):
    with pytest.raises(OptionError, match="A run and its checkpoints are in two directories"):
        run(tmp_path / "a", tmp_path / "b" / ".." / "a")
    assert not (tmp_path / "a").exists()
    run(tmp_path / "a" / "kept", tmp_path / "a", steps=2)
