"""Which direction is better of a watched value: `best=` of checkpoints, and EarlyStopping."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from killed_fits import Kill, Killed
from tailrace.errors import OptionError
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.checkpoint import monitor_of

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(32, 2)
ROWS = tr.batches(X, 8)
DECIDED = {
    "loss": "min",
    "val_loss": "min",
    "head/loss": "min",
    "val_accuracy_head/loss": "min",
    "val_accuracy": "max",
    "loss_head/accuracy": "max",
}
OPEN = [
    "val_psnr",
    "acceleration_error",
    "val_acc",
    "f1",
    "accuracy/error",
    "my_loss",
    "Loss",
    "gloss",
]


def loss_fn(w, x):
    error = ((x - w) ** 2).mean()
    return error, {"psnr": -jnp.log(error), "acceleration_error": error}


def fit(checkpoint, callbacks=(), epochs=4):
    trainer = tr.Trainer(loss_fn, optax.sgd(0.2), jnp.full(2, 3.0), steps_per_execution=2)
    trainer.fit(
        ROWS,
        epochs=epochs,
        validation_data=ROWS,
        checkpoint=checkpoint,
        callbacks=callbacks,
        progress=False,
    )
    return trainer


def best_in(directory):
    """The step of the best checkpoint; one before may stay beside a plain one of its step."""
    names = [p.name for p in (directory / "fit-0").iterdir() if p.name.endswith("-best")]
    return max((int(name.split("-")[1]) for name in names), default=None)


@pytest.mark.parametrize(
    "watch", [tr.callbacks.EarlyStopping, lambda n: tr.Checkpoint("x", best=n)]
)
def test_a_name_decides_only_if_it_is_exactly_that(watch):
    for name, mode in DECIDED.items():
        found = watch(name)
        watched = found.watched if hasattr(found, "watched") else monitor_of(found)
        assert watched.mode == mode, name
    for name in OPEN:
        with pytest.raises(OptionError, match=rf"must be said. Received: '{name}' without mode="):
            watch(name)


def test_the_best_by_its_direction(tmp_path):
    """Values that fall and rise, whatever their names contain; the first validation is the worst."""
    names = {("val_psnr", "max"), ("val_acceleration_error", "min"), ("val_loss", "auto")}
    for name, mode in sorted(names):
        folder = tmp_path / name
        trainer = fit(tr.Checkpoint(folder, every=100, best=name, mode=mode))
        values = trainer.history[name]
        step = trainer.history.validated[(np.argmax if mode == "max" else np.argmin)(values)]
        assert best_in(folder) == step == 16
    with pytest.raises(OptionError, match="mode is 'auto', 'min' or 'max'"):
        tr.Checkpoint(tmp_path, best="loss", mode="best")
    with pytest.raises(OptionError, match="Received: mode='max' without best="):
        tr.Checkpoint(tmp_path, mode="max")


def test_a_resumed_fit_keeps_its_direction(tmp_path, caplog):
    """That of the checkpoint, with a note; another value begins anew, with a note."""

    def killed(folder, **watching):
        stopping = tr.callbacks.EarlyStopping("val_psnr", patience=9, mode="max")
        with pytest.raises(Killed):
            fit(tr.Checkpoint(folder, every=2, **watching), [stopping, Kill(5)])

    def resumed(folder, best, mode, monitor, early):
        stopping = tr.callbacks.EarlyStopping(monitor, patience=9, mode=early)
        return stopping, fit(tr.Checkpoint(folder, every=2, best=best, mode=mode), [stopping])

    killed(tmp_path / "a", best="val_psnr", mode="max")
    stopping, _ = resumed(tmp_path / "a", "val_psnr", "min", "val_psnr", "min")
    assert best_in(tmp_path / "a") == 16
    assert stopping.best_step == 16
    assert "best= of tr.Checkpoint of 'val_psnr': the checkpoint that is resumed" in caplog.text
    assert "monitor= of EarlyStopping of 'val_psnr': the checkpoint that is resumed" in caplog.text
    assert "mode='max', which stays. Received: mode='min'" in caplog.text
    killed(tmp_path / "b", best="val_psnr", mode="max")
    stopping, trainer = resumed(tmp_path / "b", "val_loss", "auto", "val_loss", "auto")
    assert best_in(tmp_path / "b") == 16
    assert stopping.best == trainer.history["val_loss"].min()
    assert "watches 'val_loss' now, and 'val_psnr' in the checkpoint that is resumed" in caplog.text


def test_checkpoints_that_do_not_say_a_direction(tmp_path, caplog, monkeypatch):
    """Those of earlier versions load; their best value counts where the name decides it."""
    write = orbax_files.write
    for name, mode, best in (("val_loss", "auto", -1e9), ("val_psnr", "max", 1e9)):
        folder, kept = tmp_path / name, name == "val_loss"

        def as_before(path, arrays, note, best=best, **options):
            said = {k: v for k, v in note["fit"].items() if k != "watched"}
            write(path, arrays, {**note, "fit": {**said, "best": best}}, **options)

        monkeypatch.setattr(orbax_files, "write", as_before)
        with pytest.raises(Killed):
            fit(tr.Checkpoint(folder, every=2, best=name, mode=mode), [Kill(5)])
        monkeypatch.undo()
        fit(tr.Checkpoint(folder, every=2, best=name, mode=mode))
        assert (best_in(folder) == 16) is not kept
    assert "'val_psnr': the checkpoint does not say what is better" in caplog.text
    assert "'val_loss': the" not in caplog.text
