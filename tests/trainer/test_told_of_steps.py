"""What callbacks may read in a step, and that each of them is told of every step."""

import threading

import numpy as np
import optax
import pytest

import tailrace as tr

DATA = [np.full(2, number, np.float32) for number in range(8)]


def loss_fn(w, x):
    return w + x.mean()


def trainer_of(**options):
    options = {"steps_per_execution": 4, **options}
    return tr.Trainer(loss_fn, optax.sgd(-1.0), np.float32(0), **options)


READS = {
    "params": lambda trainer, path: trainer.params,
    "state": lambda trainer, path: trainer.state,
    "model_state": lambda trainer, path: trainer.model_state,
    "model": lambda trainer, path: trainer.model,
    "loss_scale": lambda trainer, path: trainer.loss_scale,
    "save": lambda trainer, path: trainer.save(path),
    "evaluate": lambda trainer, path: trainer.evaluate(DATA),
    "predict": lambda trainer, path: trainer.predict(DATA, loss_fn),
    "live": lambda trainer, path: trainer.predict(DATA, loss_fn, live=True),
}


class Reads(tr.Callback):
    """Reads in each step, and keeps where that was refused."""

    def __init__(self, path):
        self.path, self.refused, self.read = path, [], []

    def on_step_end(self, trainer, step, values):
        for name, read in READS.items():
            if name == "model":
                continue  # of a module only
            try:
                read(trainer, self.path / f"{step}")
                self.read.append((name, step))
            except tr.errors.ProgramError as error:
                self.refused.append((name, step))
                text = str(error)
                assert f"step {step}, of an execution that ended with step {step | 3}" in text
                assert "on_execution_end, or give tr.Trainer(steps_per_execution=1)" in text

    def on_execution_end(self, trainer, execution):
        assert float(trainer.params) == trainer.step


@pytest.mark.parametrize("length", [4, 1])
def test_the_state_is_read_in_the_last_step_of_an_execution(tmp_path, length):
    pytest.importorskip("orbax.checkpoint")
    reads, trainer = Reads(tmp_path), trainer_of(steps_per_execution=length)
    trainer.fit(DATA, callbacks=[reads], progress=False)
    names, ends = [name for name in READS if name != "model"], [3, 7] if length == 4 else range(8)
    assert reads.read == [(name, step) for step in ends for name in names]
    assert reads.refused == [(n, s) for s in range(8) if s not in ends for n in names]


def test_the_state_is_set_in_the_last_step_of_an_execution():
    class Sets(tr.Callback):
        def __init__(self, at):
            self.at = at

        def on_step_end(self, trainer, step, values):
            if step == self.at:
                trainer.state = other.state

    other, trainer = trainer_of(), trainer_of()
    with pytest.raises(tr.errors.ProgramError, match="in the last step of an execution"):
        trainer.fit(DATA, callbacks=[Sets(2)], progress=False)
    trainer = trainer_of()
    trainer.fit(DATA, callbacks=[Sets(3)], progress=False)
    assert float(trainer.params) == 4


def test_another_thread_does_not_set_the_state_of_a_fit():
    trainer, errors = trainer_of(), []
    old = trainer.state

    def sets():
        try:
            trainer.state = old
        except tr.errors.ProgramError as error:
            errors.append(str(error))

    def elements():
        for number, element in enumerate(DATA):
            if number == 5:
                thread = threading.Thread(target=sets)
                thread.start()
                thread.join()
            yield element

    trainer.fit(elements, progress=False)
    (error,) = errors
    assert "from another thread would belong to another step" in error
    assert float(trainer.params) == 8
    sets()  # after the fit
    assert float(trainer.params) == 0


class Keeps(tr.Callback):
    def __init__(self):
        self.told = []

    def on_fit_begin(self, trainer):
        self.told.append("begin")

    def on_step_end(self, trainer, step, values):
        self.told.append(step)

    def on_validation_end(self, trainer, logs):
        self.told.append("validation")

    def on_epoch_end(self, trainer, epoch, logs):
        self.told.append("epoch")

    def on_fit_end(self, trainer, history):
        self.told.append("end")


WHERE = ("fit_begin", "execution_end", "validation_end", "epoch_end", "fit_end")


@pytest.mark.parametrize("where", WHERE)
def test_one_that_raises_keeps_nothing_from_the_others(where):
    def raises(self, *args):
        raise ArithmeticError(where)

    def also(self, *args):
        raise LookupError("another")

    first, last = (
        type(name, (tr.Callback,), {f"on_{where}": f})() for name, f in (("A", raises), ("B", also))
    )
    watches = [Keeps(), Keeps()]
    with pytest.raises(ArithmeticError, match=where) as caught:
        trainer_of().fit(
            DATA,
            validation_data=DATA,
            callbacks=[watches[0], first, last, watches[1]],
            progress=False,
        )
    assert watches[0].told == watches[1].told
    assert caught.value.__notes__ == ["Then B raised LookupError: another"]
    expected = ["begin", *range(8), "validation", "epoch"]
    there = {"fit_begin": 1, "execution_end": 5, "validation_end": 10}.get(where, 11)
    assert watches[1].told == [*expected[:there], "end"]


def test_a_fit_that_does_not_begin_does_not_end(tmp_path):
    """Its callbacks would end that of the fit before."""
    pytest.importorskip("zarr")
    stopping = tr.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best=True)
    trainer = trainer_of(run_dir=tmp_path / "run")
    trainer.fit(DATA, epochs=2, callbacks=[stopping], progress=False)
    trainer.fit(DATA, steps=3, progress=False)
    state, step = float(trainer.params), trainer.step
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(tr.errors.RunError):
        trainer.fit(DATA, steps=3, callbacks=[stopping], progress=False)
    assert (float(trainer.params), trainer.step) == (state, step)


def test_a_longer_fit_does_not_begin_at_an_earlier_state(tmp_path):
    """It would train steps twice under one number."""
    pytest.importorskip("orbax.checkpoint")

    def fit(epochs, **more):
        best = tr.callbacks.EarlyStopping("loss", mode="min", patience=1, restore_best=True)
        trainer = trainer_of()
        trainer.fit(DATA, epochs=epochs, checkpoint=tmp_path, callbacks=[best], progress=False)
        return trainer

    assert fit(9).step == 8  # of 16: the loss grows
    with pytest.raises(
        tr.errors.CheckpointError, match="16 steps.* best state, of step 8.*further fit"
    ):
        fit(12)
    assert fit(9).step == 8


def test_event_files_of_one_second_are_several(tmp_path):
    pytest.importorskip("tensorboardX")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = trainer_of()
    for _ in range(3):
        log = tr.callbacks.TensorBoard(tmp_path)
        trainer.fit(DATA, steps=2, callbacks=[log], progress=False)
    events = EventAccumulator(str(tmp_path), {"scalars": 0}).Reload()
    assert [one.step for one in events.Scalars("loss")] == list(range(6))
