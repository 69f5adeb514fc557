"""`fit(checkpoint=)` of Keras models: a fit that was stopped anywhere ends as if it had never been."""

import contextlib
import logging
import os
import re
import signal
import threading

import numpy as np
import optax
import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("orbax.checkpoint")

import tailrace as tr  # noqa: E402
import tailrace.keras as tk  # noqa: E402
from oracles import assert_bits_equal, assert_close  # noqa: E402
from tailrace.devices.processes import distributed  # noqa: E402
from tailrace.errors import (  # noqa: E402
    CheckpointError,
    DataExhausted,
    DistributedError,
    OptionError,
)
from tailrace.feeds import skipping, waiting  # noqa: E402
from tailrace.keras.checkpoints.callback_states import changes, plain_state  # noqa: E402
from tailrace.keras.checkpoints.kept_callbacks import KeptCallbacks  # noqa: E402
from waits import LIMIT_S, wait_until  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
HELD_OUT = (X[:8], Y[:8])


class Killed(Exception):
    """Stands for the end of a process."""


class Kill(keras.callbacks.Callback):
    """Ends the fit at some execution, without a chance to save."""

    def __init__(self, after):
        super().__init__()
        self.left, self.files = after, []

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left < 0:
            for file in self.files:
                file.csv_file.close()
            raise Killed

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


class Listener(keras.callbacks.Callback):
    """A user's own callback, with what it heard."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def on_train_batch_end(self, batch, logs=None):
        self.heard.append([batch, logs["loss"]])

    def on_epoch_end(self, epoch, logs=None):
        self.heard.append([epoch, dict(logs)])


def layers():
    return [
        keras.Input((3,)),
        keras.layers.Dense(4, activation="tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3, seed=7),
        keras.layers.Dense(1),
    ]


class OwnStep(keras.Sequential):
    """A model whose step is its own."""

    def train_step(self, *args, **kwargs):
        return super().train_step(*args, **kwargs)


def model_of(kind=keras.Sequential, replicas=1, accumulation=1, execution=2, **options):
    keras.utils.set_random_seed(3)
    with tk.Strategy(replicas).scope():
        model = kind(layers())
    if accumulation > 1:
        model.set_gradient_accumulation_options(accumulation)
    model.compile("adam", "mse", metrics=["mae"], steps_per_execution=execution, **options)
    return model


def arrays(**call):
    return {"x": X, "y": Y, "batch_size": 4, **call}


def from_tensorflow(**call):
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(48, seed=5).batch(4)
    return {"x": data, "shuffle": False, **call}


def generated(**call):
    def endless():
        order = np.random.default_rng(4)
        while True:
            rows = order.integers(0, 48, 4)
            yield X[rows], Y[rows]

    return {"x": endless(), "shuffle": False, **call}


def loaded(**call):
    torch = pytest.importorskip("torch")
    torch.manual_seed(2)
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    data = torch.utils.data.DataLoader(data, 4, shuffle=True)
    return {"x": data, "shuffle": False, **call}


def seeded(replacement=False, **call):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    own = torch.Generator().manual_seed(3)
    order = torch.utils.data.RandomSampler(data, replacement=replacement, generator=own)
    return {"x": torch.utils.data.DataLoader(data, 4, sampler=order), "shuffle": False, **call}


def sampled(**call):
    torch = pytest.importorskip("torch")

    class Counting(torch.utils.data.Sampler):
        """Another order each time, by a count of its own."""

        def __init__(self):
            self.passes = 0

        def __len__(self):
            return 48

        def __iter__(self):
            self.passes += 1
            return iter(np.random.default_rng(self.passes).permutation(48).tolist())

    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(data, 4, sampler=Counting())
    return {"x": loader, "shuffle": False, **call}


class Rows(keras.utils.PyDataset):
    """Rows that are shuffled in place between epochs, by some generator; a batch may draw as well."""

    def __init__(self, source, draws, **options):
        super().__init__(**options)
        self.source, self.draws, self.order = source, draws, np.arange(48)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        rows = self.order[4 * index : 4 * index + 4]
        x = X[rows]
        return (x + self.source.normal(size=x.shape).astype(x.dtype) if self.draws else x), Y[rows]

    def on_epoch_begin(self):
        if self.draws:
            self.source.shuffle(self.order)

    def on_epoch_end(self):
        self.source.shuffle(self.order)


def shuffled(source=lambda: np.random.default_rng(5), draws=False, **call):
    return {"x": Rows(source(), draws), **call}


CASES = {
    "arrays": (arrays, {"epochs": 3, "validation_data": HELD_OUT}, {}),
    "shuffled batches": (arrays, {"epochs": 2, "shuffle": "batch"}, {"execution": 1}),
    "across epochs": (arrays, {"epochs": 5, "steps_per_epoch": 6}, {}),
    "tensorflow": (from_tensorflow, {"epochs": 3}, {}),
    "generator": (generated, {"epochs": 3, "steps_per_epoch": 8}, {}),
    "loader": (loaded, {"epochs": 3}, {}),
    "seeded loader": (seeded, {"epochs": 3}, {}),
    "seeded loader across epochs": (seeded, {"epochs": 4, "steps_per_epoch": 6}, {}),
    "loader that draws rows": (seeded, {"epochs": 3, "replacement": True}, {}),
    "own sampler": (sampled, {"epochs": 3}, {}),
    "dataset": (shuffled, {"epochs": 3}, {}),
    "dataset on numpy's": (shuffled, {"epochs": 3, "source": lambda: np.random}, {}),
    "dataset that draws rows": (shuffled, {"epochs": 3, "draws": True}, {}),
    "dataset across epochs": (shuffled, {"epochs": 4, "steps_per_epoch": 6}, {}),
    "replicas": (arrays, {"epochs": 3}, {"replicas": 2, "accumulation": 2}),
    "own step": (arrays, {"epochs": 3}, {"kind": OwnStep}),
}


def in_pieces(directory, script, kills):
    """Run a script again and again, killed each time but the last."""
    for after in (*kills, None):
        kept = tr.Checkpoint(directory, every=3, keep=2)
        try:
            return script(kept, [] if after is None else [Kill(after)])
        except Killed:
            continue
    raise AssertionError


def same(found, expected):
    """Models and histories of two scripts."""
    for one, other in zip(found.variables, expected.variables, strict=True):
        assert_bits_equal(np.asarray(one), np.asarray(other))
    for one, other in zip(found.optimizer.variables, expected.optimizer.variables, strict=True):
        assert_bits_equal(np.asarray(one), np.asarray(other))
    assert found.history.history == expected.history.history
    assert found.history.epoch == expected.history.epoch


MORE = [case for case in CASES if "loader" in case or "dataset" in case or "sampler" in case]


@pytest.mark.parametrize("case", CASES)
def test_killed_and_started_again(tmp_path, case):
    make, call, options = CASES[case]

    def script(checkpoint, extra):
        model, heard = model_of(**options), Listener()
        given = make(**call)
        model.fit(**given, callbacks=[heard, *extra], verbose=0, checkpoint=checkpoint)
        return model, heard

    expected, plain_calls = script(None, [])
    found, heard = in_pieces(tmp_path / "kept", script, (2, 5))
    same(found, expected)
    assert heard.heard == plain_calls.heard


@pytest.mark.parametrize("case", MORE)
def test_more_epochs_go_on_in_the_order_of_the_data(tmp_path, case):
    make, call, options = CASES[case]

    def script(folder, less):
        model = model_of(**options)
        given = make(**{**call, "epochs": call["epochs"] - less})
        model.fit(**given, verbose=0, checkpoint=tmp_path / folder)
        return model

    expected = script("whole", 0)
    script("parts", 1)
    same(script("parts", 0), expected)


def test_another_loader_is_refused(tmp_path):
    model_of().fit(**seeded(epochs=1), verbose=0, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="generators of the DataLoader: 1 there, 0 here"):
        model_of().fit(**loaded(epochs=2), verbose=0, checkpoint=tmp_path)


def test_several_fits_in_one_script(tmp_path):
    """A finished fit is not computed again, but what follows goes on from its end."""

    def script(checkpoint, extra):
        model = model_of()
        stream = generated()["x"]
        kept = {"verbose": 0, "callbacks": extra, "checkpoint": checkpoint, "shuffle": False}
        first = model.fit(stream, epochs=1, steps_per_epoch=6, **kept)
        second = model.fit(X, Y, batch_size=4, epochs=2, **{**kept, "shuffle": True})
        model.fit(stream, epochs=1, steps_per_epoch=6, **kept)
        return model, first.history, second.history

    expected, *histories = script(None, [])
    found, *others = in_pieces(tmp_path / "kept", script, (1, 5))
    same(found, expected)
    assert others == histories
    again, *others = script(tr.Checkpoint(tmp_path / "kept"), [Kill(0)])
    same(again, expected)
    assert others == histories, "nothing is computed, no callback is called"


def test_keras_callbacks_go_on(tmp_path):
    """Early stopping, learning rates, a file of values, and a run directory."""

    def script(checkpoint, extra, where):
        model = model_of(run_dir=where / "run")
        callbacks = [
            keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, start_from_epoch=2),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0, factor=0.5),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.CSVLogger(where / "log.csv"),
            *extra,
        ]
        for one in extra:
            one.files = [callbacks[3]]
        model.fit(**arrays(epochs=9), callbacks=callbacks, verbose=0, checkpoint=checkpoint)
        return model

    for name in ("never", "often"):
        (tmp_path / name).mkdir()
    expected = script(None, [], tmp_path / "never")
    found = in_pieces(
        tmp_path / "kept", lambda kept, extra: script(kept, extra, tmp_path / "often"), (8, 2)
    )
    same(found, expected)
    assert 3 <= len(found.history.epoch) < 9, "early stopping has ended it"
    logs = [(tmp_path / name / "log.csv").read_text() for name in ("never", "often")]
    assert logs[0] == logs[1]
    runs = [tr.open_run(tmp_path / name / "run") for name in ("never", "often")]
    assert_bits_equal(runs[1].history.loss, runs[0].history.loss)
    assert runs[1].history.steps.tolist() == runs[0].history.steps.tolist()


@pytest.mark.parametrize("freq", ["epoch", 3])
def test_backup_and_restore_is_exact(tmp_path, freq):
    """Keras' own callback: dropout goes on, and the epoch in its middle."""
    directory = tmp_path / "backup"

    def script(extra, backup=True):
        model, heard = model_of(), Listener()
        callbacks = [heard, *extra]
        if backup:
            callbacks.append(keras.callbacks.BackupAndRestore(directory, save_freq=freq))
        model.fit(**arrays(epochs=3), callbacks=callbacks, verbose=0)
        return model, heard

    expected, plain_calls = script([], backup=False)
    with pytest.raises(Killed):
        script([Kill(8)])
    assert directory.exists()
    found, heard = script([])
    same(found, expected)
    assert heard.heard == plain_calls.heard
    first = 6 if freq == "epoch" else 2  # executions of two batches in an epoch of twelve
    assert len(heard.heard) > first
    assert not directory.exists(), "as Keras does: nothing is left once the fit has ended"


def counters(backup):
    """What Keras' own tests read of the callback: the epoch, and the last batch in it."""
    return tuple(vars(backup)[name] for name in ("_current_epoch", "_last_batch_seen"))


def test_the_counters_of_backup_and_restore_go_on(tmp_path):
    def script(extra, freq, epochs):
        backup = keras.callbacks.BackupAndRestore(tmp_path / str(freq), save_freq=freq)
        with contextlib.suppress(Killed):
            model_of(execution=1).fit(
                **arrays(epochs=epochs), callbacks=[backup, *extra], verbose=0
            )
        return counters(backup)

    assert script([Kill(2)], 4, 2) == (0, 2), "12 batches in an epoch; the third raises"
    assert script([], 4, 2) == (2, 0)
    assert script([Kill(25)], "epoch", 3) == (2, 0), "an epoch leaves no batch"


def test_a_fit_with_a_backup_is_made_again_by_the_same_process(tmp_path):
    expected = model_of(execution=1)
    expected.fit(**arrays(epochs=3), verbose=0)
    model = model_of(execution=1)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(Killed):
        model.fit(**arrays(epochs=3), callbacks=[backup, Kill(20)], verbose=0)
    assert model.optimizer.iterations > 20
    model.fit(**arrays(epochs=3), callbacks=[backup], verbose=0)
    same(model, expected)
    assert counters(backup) == (3, 0)
    assert not os.path.exists(tmp_path / "backup")


def test_a_backup_that_keras_has_written_is_keras_to_restore(tmp_path, caplog):
    def script(adopted, extra=()):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model = tk.adopt(model) if adopted else model
        model.compile("sgd", "mse")
        backup = keras.callbacks.BackupAndRestore(tmp_path / f"backup {bool(extra)}")
        try:
            model.fit(**arrays(epochs=3, shuffle=False), callbacks=[backup, *extra], verbose=0)
        except Killed:
            os.rename(tmp_path / "backup True", tmp_path / "backup False")
        return model

    script(False, [Kill(30)])
    found = script(True)
    assert "holds a backup that Keras has written" in caplog.text
    script(False, [Kill(30)])
    expected = script(False)
    assert found.history.epoch == expected.history.epoch == [2]
    assert_close(found.get_weights(), expected.get_weights())


def test_a_fit_that_has_finished_gives_callbacks_their_states(tmp_path):
    class Own(Kill):
        """A callback that says itself what its state is, once it has any."""

        def on_train_begin(self, logs=None):
            self.seen = 0

        def on_epoch_end(self, epoch, logs=None):
            self.seen += 1

        def get_state(self):
            return {"seen": self.seen}

        def set_state(self, state):
            self.seen = state["seen"]

    def script():
        early = keras.callbacks.EarlyStopping(
            "loss", patience=1, min_delta=9.0, restore_best_weights=True
        )
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0)
        callbacks = [early, Listener(), plateau, Own(99)]
        model = model_of(execution=12)
        model.fit(**arrays(epochs=9), callbacks=callbacks, verbose=0, checkpoint=tmp_path / "kept")
        return model, callbacks

    (model, expected), (again, found) = script(), script()
    same(again, model)
    assert expected[0].stopped_epoch == 1
    for one, other in zip(found, expected, strict=True):
        assert not changes(plain_state(other), plain_state(one))
        assert plain_state(one).keys() == plain_state(other).keys()


class Signal(Kill):
    """Sends this process a signal at some execution."""

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_saves_and_leaves(tmp_path):
    def script(checkpoint, extra):
        model = model_of()
        model.fit(**arrays(epochs=2), callbacks=extra, verbose=0, checkpoint=checkpoint)
        return model

    expected = script(None, [])
    kept = tr.Checkpoint(tmp_path / "kept", every=1000)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        script(kept, [Signal(2)])
    assert signal.getsignal(signal.SIGTERM) is before
    assert (tmp_path / "kept" / "fit-0" / "step-4").is_dir()
    same(script(kept, []), expected)


def test_a_signal_while_the_data_blocks(tmp_path):
    let_go, waited = threading.Event(), []

    def blocking(after):
        for number, batch in enumerate(generated()["x"]):
            if number == after:
                os.kill(os.getpid(), signal.SIGTERM)
                waited.append(let_go.wait(LIMIT_S))
            yield batch

    def script(data):
        model = model_of()
        kept = tr.Checkpoint(tmp_path / "kept", every=1000)
        call = {"epochs": 2, "steps_per_epoch": 8, "shuffle": False, "verbose": 0}
        model.fit(data, **call, checkpoint=kept)
        return model

    with pytest.raises(SystemExit, match="143"):
        script(blocking(6))
    assert not waited, "nobody waits for data that does not come"
    let_go.set()
    found = script(generated()["x"])
    expected = model_of()
    expected.fit(generated()["x"], epochs=2, steps_per_epoch=8, shuffle=False, verbose=0)
    same(found, expected)


class Gate:
    """Blocks the data once, when it passes for the `at`-th time; then, with a signal or without one."""

    def __init__(self, at, signals=False):
        self.at, self.signals, self.passed = at, signals, 0
        self.let_go, self.waits = threading.Event(), False

    def pass_by(self):
        self.passed += 1
        if self.passed == self.at:
            self.waits = True  # before the signal, which ends the fit in its own thread
            if self.signals:
                os.kill(os.getpid(), signal.SIGTERM)
            self.let_go.wait(timeout=LIMIT_S)
            self.waits = False


def once(gate):
    """A generator with a gate before each batch."""

    def batches():
        for batch in generated()["x"]:
            gate.pass_by()
            yield batch

    return batches()


def again(gate):
    """A loader with a gate before each pass."""
    torch = pytest.importorskip("torch")

    class Loader(torch.utils.data.DataLoader):
        cardinality = 12  # as tf.data has it, whose order may differ in each pass

        def __iter__(self):
            gate.pass_by()  # with the first batch of a pass
            yield from super().__iter__()

    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return Loader(data, 4)


def kept_script(data, directory, steps=6):
    model = model_of()
    kept = tr.Checkpoint(directory, every=1000)
    model.fit(data, epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0, checkpoint=kept)
    return model


@pytest.mark.parametrize(
    ("make", "what", "name"),
    [(once, "batches", "generator"), (again, "passes over the data", "Loader")],
)
def test_skipping_before_keras_sees_the_data_says_so_and_can_be_left(
    make, what, name, tmp_path, monkeypatch, caplog
):
    expected = kept_script(make(Gate(0)), tmp_path)  # it has ended: the others only return its end
    monkeypatch.setattr(skipping, "SHOWN_EVERY_S", 0.0)
    with caplog.at_level(logging.WARNING, logger="tailrace"):
        same(kept_script(make(Gate(0)), tmp_path), expected)
    assert re.search(f"Skipping {what} that were used before: [0-9]+ of [0-9]+.", caplog.text)

    gate = Gate(1, signals=True)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        kept_script(make(gate), tmp_path)
    assert gate.waits, "nobody waits for data that does not come"
    assert signal.getsignal(signal.SIGTERM) is before
    gate.let_go.set()

    monkeypatch.setattr(waiting, "NOTE_S", 0.1)
    late, text = Gate(1), f"Still waiting for the data ({name}), to skip {what} used before"

    def opens():
        wait_until(lambda: text in caplog.text, "the wait was not noted")
        late.let_go.set()

    opening = threading.Thread(target=opens)
    opening.start()
    with caplog.at_level(logging.WARNING, logger="tailrace"):
        same(kept_script(make(late), tmp_path), expected)
    opening.join(LIMIT_S)
    assert text in caplog.text


def test_a_signal_while_the_first_batch_of_an_epoch_blocks(tmp_path):
    gate = Gate(3, signals=True)  # Keras looks at the first batch, too
    with pytest.raises(SystemExit, match="143"):
        kept_script(again(gate), tmp_path / "kept", steps=None)
    assert gate.waits, "nobody waits for data that does not come"
    gate.let_go.set()
    found = kept_script(again(Gate(0)), tmp_path / "kept", steps=None)
    same(found, kept_script(again(Gate(0)), tmp_path / "other", steps=None))


def test_the_best_and_the_end_stay(tmp_path):
    model = model_of()
    kept = tr.Checkpoint(tmp_path / "kept", every=1000, best="val_loss")
    call = arrays(epochs=2, validation_data=HELD_OUT)
    model.fit(**call, verbose=0, checkpoint=kept)
    names = sorted(path.name for path in tmp_path.glob("kept/fit-0/*"))
    assert {"step-0", "step-24-end"} <= set(names)
    assert any(name.endswith("-best") for name in names)


def test_the_best_of_a_value_that_there_is_not(tmp_path):
    best = tr.Checkpoint(tmp_path / "kept", best="val_loss")
    with pytest.raises(tr.errors.OptionError, match="best='val_loss'. without validation_data"):
        model_of().fit(**arrays(), verbose=0, checkpoint=best)
    best = tr.Checkpoint(tmp_path / "kept", best="mea", mode="max")
    with pytest.raises(tr.errors.OptionError, match="no value 'mea' to watch. Logged are: 'loss'"):
        model_of().fit(**arrays(), verbose=0, checkpoint=best)


def test_what_is_refused(tmp_path):
    directory = tmp_path / "kept"
    model = model_of()
    kept = tr.Checkpoint(directory, every=1)
    with pytest.raises(Killed):
        model.fit(**arrays(epochs=2), verbose=0, checkpoint=kept, callbacks=[Kill(2)])
    other = model_of()
    with pytest.raises(CheckpointError, match=r"batches of an epoch: 12 there, 6 here"):
        other.fit(**{**arrays(epochs=2), "batch_size": 8}, verbose=0, checkpoint=directory)
    with tk.Strategy().scope():
        wider = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    wider.compile("adam", "mse", metrics=["mae"], steps_per_execution=2)
    with pytest.raises(CheckpointError, match=r"kernel: float32\[3, 2\] here, float32\[3, 4\] in"):
        wider.fit(**arrays(epochs=2), verbose=0, checkpoint=directory)
    call = {"epochs": 2, "steps_per_epoch": 12, "shuffle": False, "verbose": 0}
    with pytest.raises(CheckpointError, match="shuffle: True there, None here"):
        model_of().fit((pair for pair in [(X[:4], Y[:4])]), **call, checkpoint=directory)
    fed = tr.Checkpoint(tmp_path / "fed", every=1)
    pairs = ((X[:4], Y[:4]) for _ in range(24))
    with pytest.raises(Killed):
        model_of().fit(pairs, **call, checkpoint=fed, callbacks=[Kill(2)])
    with pytest.raises(DataExhausted, match="ends after 1"):
        model_of().fit((pair for pair in [(X[:4], Y[:4])]), **call, checkpoint=fed)
    both = [keras.callbacks.BackupAndRestore(tmp_path / "backup")]
    with pytest.raises(OptionError, match="both resume a fit. Received: both"):
        model_of().fit(**arrays(), verbose=0, checkpoint=directory, callbacks=both)
    eager = model_of()
    eager.compile("adam", "mse", run_eagerly=True)
    with pytest.raises(OptionError, match="run_eagerly=True, which Keras' own loop runs"):
        eager.fit(**arrays(), verbose=0, checkpoint=directory)
    trainer = tr.Trainer(lambda w, x: (x @ w).mean(), optax.sgd(0.1), np.zeros((3, 1)))
    with pytest.raises(CheckpointError, match="Keras"):
        trainer.restore(directory)


def test_killed_after_the_last_epoch(tmp_path, monkeypatch):
    """The end is still to come: callbacks restore the best weights, here those of the first epoch."""

    def fit(directory):
        model, early = (
            model_of(),
            keras.callbacks.EarlyStopping(
                "loss", patience=9, mode="max", restore_best_weights=True
            ),
        )
        kept = tr.Checkpoint(tmp_path / directory, every=12)
        model.fit(**arrays(epochs=2), verbose=0, checkpoint=kept, callbacks=[early])
        return model

    def killed(self):
        raise Killed

    expected = fit("never")
    with monkeypatch.context() as patched:
        patched.setattr(KeptCallbacks, "save_end", killed)
        with pytest.raises(Killed):
            fit("kept")
    assert_bits_equal(fit("kept").get_weights(), expected.get_weights())
    assert_bits_equal(fit("kept").get_weights(), expected.get_weights())


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_several_processes_are_refused(monkeypatch, method):
    """By a sentence of their own: that of replicas would advise what is refused next."""
    monkeypatch.setattr(distributed, "process_count", lambda: 2)
    data = {"x": X} if method == "predict" else {"x": X, "y": Y}
    for replicas in (1, 2):
        with pytest.raises(
            DistributedError, match="A Keras model trains in one process, on all of its"
        ):
            getattr(model_of(replicas=replicas), method)(**data, verbose=0)


def test_checkpoints_in_several_processes_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(distributed, "process_count", lambda: 2)
    with pytest.raises(CheckpointError, match="are for training in one process; this one has 2"):
        model_of().fit(**arrays(), verbose=0, checkpoint=tmp_path / "kept")
