"""A kill at every moment that leaves other files: the script, started again, ends as without a kill.

A script runs once to its end. Whenever it has written something, its directory is copied: that is what
a process that is killed there would leave. Then the script runs from each of these copies.
"""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_apply, regression
from tailrace.errors import CheckpointError, NonFiniteError
from tailrace.runs import write_queue
from tailrace.runs.audit import audit
from tailrace.trainer.checkpoints.writer import CheckpointWriter

X, Y = (np.concatenate(leaf) for leaf in zip(*regression(12), strict=True))
HELD_OUT = regression(2, seed=3)


def loss_fn(params, x, y):
    if tr.training():
        x = jnp.where(jax.random.bernoulli(tr.key(), 0.8, x.shape), x, 0)
    return ((mlp_apply(params, x) - y) ** 2).mean()


def shuffled(x=X):
    return tr.batches((x, Y), 4, shuffle=True, seed=5)


def trainer_of(folder, **options):
    options = {"steps_per_execution": 2, "fingerprint": True, **options}
    optimizer = optax.sgd(0.1, momentum=0.9)
    return tr.Trainer(loss_fn, optimizer, mlp(), run_dir=folder / "run", **options)


class Calls(tr.Callback):
    """Keeps what it is called with, in checkpoints too; stops a fit at some step."""

    def __init__(self, stop_at=None):
        self.seen, self.stop_at = [], stop_at

    def on_execution_end(self, trainer, execution):
        self.seen.append(["execution", trainer.step, float(execution.values["loss"][-1])])
        if trainer.step == self.stop_at:
            trainer.stop()

    def on_validation_end(self, trainer, logs):
        self.seen.append(["validation", trainer.step, logs])

    def on_epoch_end(self, trainer, epoch, logs):
        self.seen.append(["epoch", trainer.step, epoch, logs])

    def get_state(self):
        return {"seen": self.seen}

    def set_state(self, state):
        self.seen = [list(one) for one in state["seen"]]


def validated(folder, **call):
    """Callbacks of all kinds, a best checkpoint, two fits."""
    trainer, calls = trainer_of(folder), Calls(call.pop("stop_at", None))
    early = tr.callbacks.EarlyStopping(patience=2, restore_best=True)
    log = tr.callbacks.CSVLogger(folder / "log.csv")
    every = call.pop("every", 3)
    kept = tr.Checkpoint(folder / "kept", every=every, best="val_loss")
    extra = {"validation_data": HELD_OUT, "callbacks": [calls, early, log], **call}
    first = trainer.fit(shuffled(), checkpoint=kept, **extra)
    rows = (folder / "log.csv").read_text()
    trainer.fit(shuffled(), steps=4, checkpoint=tr.Checkpoint(folder / "kept", every=every))
    return trainer, [first, rows, calls.seen, early.best, early.best_step]


def rewound(folder):
    """Back to a step, and on with other data."""
    trainer = trainer_of(folder)
    kept = tr.Checkpoint(folder / "kept", every=4)
    call = {"validation_data": HELD_OUT, "validation_every": 3, "checkpoint": kept}
    first = trainer.fit(shuffled(), epochs=1, **call)
    trainer.rewind(5, shuffled(), checkpoint=kept, reason="row 3")
    trainer.fit(shuffled().without([3]), steps=6, **call)
    return trainer, [first, len(tr.open_run(folder / "run").interventions)]


def skipping(folder):
    """Steps are skipped, up to a limit that counts those before a kill too."""
    spoilt = np.array(X)
    spoilt[[1, 14, 25, 40]] = np.nan
    guard = tr.stop_on_nonfinite(on_nonfinite="skip", limit=3)
    trainer = trainer_of(folder, observe=[guard])
    with pytest.raises(NonFiniteError) as raised:
        trainer.fit(shuffled(spoilt), epochs=3, checkpoint=tr.Checkpoint(folder / "kept", every=2))
    return trainer, [str(raised.value)]


SCRIPTS = {
    "epochs": lambda folder: validated(folder, epochs=4),
    "steps": lambda folder: validated(folder, steps=12, every=6),
    "by steps": lambda folder: validated(folder, epochs=2, validation_every=5),
    "stopped": lambda folder: validated(folder, epochs=2, stop_at=6),
    "rewound": rewound,
    "skipping": skipping,
}


def copied_while(script, folder, copies, monkeypatch):
    """Run a script; its directory is copied whenever a checkpoint is written, and in callbacks."""
    save, tell = CheckpointWriter.save, Calls.on_epoch_end

    def copy():
        # The checkpoints first: a run is never behind its checkpoint.
        where = copies / str(len(list(copies.iterdir())))
        for name in ("kept", "log.csv", "run"):
            source = folder / name
            if source.is_dir():
                shutil.copytree(source, where / name)
            elif source.exists():
                where.mkdir(exist_ok=True)
                shutil.copy(source, where / name)

    def save_and_copy(self, *args, **kwargs):
        save(self, *args, **kwargs)
        self.wait(last=True)
        copy()

    def tell_and_copy(self, trainer, *args):
        tell(self, trainer, *args)
        list(trainer.records)  # what is asked of the run is written first
        copy()

    copies.mkdir()
    with monkeypatch.context() as patched:
        # Only when it is asked to: files that a thread writes while they are copied are of no moment.
        patched.setattr(write_queue, "WRITE_EVERY_S", 1e9)
        patched.setattr(CheckpointWriter, "save", save_and_copy)
        patched.setattr(Calls, "on_epoch_end", tell_and_copy)
        return script(folder)


@pytest.mark.parametrize("name", SCRIPTS)
def test_resumed_from_every_moment(tmp_path, monkeypatch, name):
    script, folder, copies = SCRIPTS[name], tmp_path / "here", tmp_path / "copies"
    expected, said = copied_while(script, folder, copies, monkeypatch)
    run = tr.open_run(folder / "run")
    moments = sorted(copies.iterdir(), key=lambda path: int(path.name))
    assert len(moments) > 4
    for moment in moments:
        shutil.rmtree(folder)
        shutil.copytree(moment, folder)
        found, says = script(folder)
        same_text = [str(one) for one in says] == [str(one) for one in said]
        assert same_text, (moment.name, says, said)
        assert found.step == expected.step, moment.name
        assert_bits_equal(found.state, expected.state)
        same_history(found.history, expected.history)
        again = tr.open_run(folder / "run")
        same_history(again.history, run.history)
        assert audit(again).is_clean, (moment.name, str(audit(again)))


def same_history(found, expected):
    assert found.names == expected.names
    assert found.steps.tolist() == expected.steps.tolist()
    for name in expected.names:
        assert_bits_equal(np.asarray(found[name]), np.asarray(expected[name]))
    assert found.validated.tolist() == expected.validated.tolist()
    for name, marks in expected.fingerprints.items():
        assert_bits_equal(found.fingerprints[name], marks)


def test_the_state_of_a_callback_comes_back_as_it_was(tmp_path):
    class Odd(tr.Callback):
        def get_state(self):
            return {"counts": {1: 2}}

    with pytest.raises(
        CheckpointError, match=r"dicts with string keys.*Odd.get_state\(\)\['counts'\]"
    ):
        trainer_of(tmp_path).fit(
            shuffled(), steps=2, checkpoint=tmp_path / "kept", callbacks=[Odd()]
        )
