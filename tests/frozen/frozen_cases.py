"""Small trainings of every front end and kind of fit: `write_frozen.py` kills them, tests go on.

What a case does must never change: its files were written by earlier code, and a resumed script must be
the one that was killed. Add new cases; leave old ones alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported by any case

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr

X = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
Y = np.sin(X.sum(axis=1))

End = dict[str, np.ndarray]
"""What a training leaves: arrays by name, `loss` among them."""


class Killer:
    """Kills the process at its n-th call, as `kill -9` would; None: never.

    It waits until a checkpoint of a later step than 0 is whole: such a one is to be resumed.
    """

    def __init__(self, after: int | None, fit: Path) -> None:
        self.left, self.fit = after, fit

    def __call__(self) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            while not any(self.fit.rglob("step-[1-9]*/commit_success.txt")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class Stop(tr.Callback):
    """Calls a killer at the end of each execution."""

    def __init__(self, after: int | None, fit: Path) -> None:
        self.killer = Killer(after, fit)

    def on_execution_end(self, trainer: Any, execution: Any) -> None:
        self.killer()


class Sum(tr.Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.total = 0.0

    def on_step_end(self, trainer: Any, step: int, values: Any) -> None:
        self.total += float(values["loss"])

    def get_state(self) -> dict[str, float]:
        return {"total": self.total}

    def set_state(self, state: dict[str, float]) -> None:
        self.total = state["total"]


def params() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "hidden": {"kernel": rng.normal(size=(3, 4)).astype(np.float32)},
        "out": rng.normal(size=(4,)).astype(np.float32),
    }


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ params["hidden"]["kernel"])
    error = h @ params["out"] - y
    return (error**2).mean(), {"mae": jnp.abs(error).mean()}


def data(size: int = 4) -> Any:
    return tr.batches((X, Y), size, shuffle=True, seed=5)


def ended(trainer: tr.Trainer, **more: Any) -> End:
    """State and history of a trainer."""
    leaves = jax.tree_util.tree_flatten_with_path(trainer.state)[0]
    end = {f"state{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}
    end |= {name: np.asarray(trainer.history[name]) for name in trainer.history}
    return {**end, **{name: np.asarray(value) for name, value in more.items()}}


# -- tr.Trainer -----------------------------------------------------------------------------------


def steps_trainer(folder: Path | None) -> tr.Trainer:
    return tr.Trainer(
        loss_fn,
        optax.adam(0.05),
        params(),
        steps_per_execution=2,
        observe=["grad/*"],
        fingerprint=True,
        run_dir=None if folder is None else folder / "run",
    )


def steps(folder: Path, stop: int | None) -> End:
    """By steps, with a run directory, taps and fingerprints."""
    trainer = steps_trainer(folder)
    kept = tr.Checkpoint(folder / "kept", every=2, keep=3)
    trainer.fit(data(), steps=12, checkpoint=kept, callbacks=[Stop(stop, folder)])
    return ended(trainer)


def epochs(folder: Path, stop: int | None) -> End:
    """By epochs, with the best state of a validation and a callback's state."""
    trainer = tr.Trainer(loss_fn, optax.adamw(0.05), params(), steps_per_execution=4)
    kept = tr.Checkpoint(folder / "kept", every=4, best="val_loss")
    total = Sum()
    trainer.fit(
        data(),
        epochs=3,
        validation_data=[(X[:8], Y[:8])],
        checkpoint=kept,
        callbacks=[Stop(stop, folder), total],
    )
    return ended(trainer, total=total.total)


def several(folder: Path, stop: int | None) -> End:
    """A finished fit, and one that is killed, of one trainer and one directory."""
    trainer = tr.Trainer(loss_fn, optax.sgd(0.05, momentum=0.9), params(), steps_per_execution=2)
    kept = tr.Checkpoint(folder / "kept", every=2)
    first = trainer.fit(data(), epochs=1, checkpoint=kept)
    before = np.asarray(first.loss)
    trainer.fit(
        data(), epochs=2, checkpoint=kept, callbacks=[Stop(stop, folder / "kept" / "fit-1")]
    )
    return ended(trainer, before=before)


def finished(folder: Path, stop: int | None) -> End:
    """A fit that ended; started again it returns at once."""
    trainer = tr.Trainer(loss_fn, optax.sgd(0.05), params(), steps_per_execution=4)
    trainer.fit(data(), steps=8, checkpoint=tr.Checkpoint(folder / "kept", every=4))
    return ended(trainer)


def replicas(folder: Path, stop: int | None) -> End:
    """Two replicas, two microbatches, model state and a dynamic loss scale."""

    def with_state(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, aux = loss_fn(params, x, y)
        return loss, ({"mean": 0.9 * state["mean"] + 0.1 * x.mean()}, aux)

    trainer = tr.Trainer(
        with_state,
        optax.adam(0.05),
        params(),
        steps_per_execution=2,
        accumulation=2,
        replicas=2,
        model_state={"mean": np.float32(0.0)},
        loss_scale="dynamic",
        log=["grad_norm"],
    )
    kept = tr.Checkpoint(folder / "kept", every=2)
    trainer.fit(data(2), steps=6, checkpoint=kept, callbacks=[Stop(stop, folder)])
    return ended(trainer)


def pipeline(folder: Path, stop: int | None) -> End:
    """Two stages on two devices."""
    whole = params()

    def first(params: Any, x: Any, y: Any) -> Any:
        return jnp.tanh(x @ params["kernel"]), y

    def second(params: Any, h: Any, y: Any) -> Any:
        return h @ params["out"], y

    model = tr.Pipeline(
        [first, second], lambda out, y: ((out - y) ** 2).mean(), accumulation=4, schedule="grouped"
    )
    trainer = tr.Trainer(
        model,
        optax.adam(0.05),
        params=[whole["hidden"], {"out": whole["out"]}],
        steps_per_execution=2,
    )
    kept = tr.Checkpoint(folder / "kept", every=2)
    trainer.fit(data(2), steps=6, checkpoint=kept, callbacks=[Stop(stop, folder)])
    return ended(trainer)


def nnx_module(folder: Path, stop: int | None) -> End:
    """A module of Flax with dropout and BatchNorm."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.body = nnx.Linear(3, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.3, rngs=rngs)
            self.out = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(self.drop(jnp.tanh(self.norm(self.body(x)))))[:, 0]

    def loss(model: Any, x: Any, y: Any) -> Any:
        return ((model(x) - y) ** 2).mean()

    trainer = tr.Trainer(loss, optax.adam(0.05), Net(nnx.Rngs(0)), steps_per_execution=2)
    kept = tr.Checkpoint(folder / "kept", every=2)
    trainer.fit(data(), steps=6, checkpoint=kept, callbacks=[Stop(stop, folder)])
    state, history = trainer.state, trainer.history
    return {
        **{
            f"state{n}": np.asarray(leaf)
            for n, leaf in enumerate(map(_raw, jax.tree.leaves(state)))
        },
        "loss": np.asarray(history.loss),
    }


def _raw(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def saved(folder: Path, stop: int | None) -> End:
    """`trainer.save` and `trainer.restore`: the file of step 4, then four more steps."""
    trainer = tr.Trainer(loss_fn, optax.adam(0.05), params(), steps_per_execution=2)
    if (folder / "saved").exists():
        trainer.restore(folder / "saved")
    else:
        trainer.fit(data(), steps=4)
        trainer.save(folder / "saved")
    trainer.fit(data(), steps=4)
    return ended(trainer)


# -- Keras ----------------------------------------------------------------------------------------


def keras_layers() -> list[Any]:
    import keras

    return [
        keras.Input((3,)),
        keras.layers.Dense(4, activation="tanh", name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3, seed=7, name="drop"),
        keras.layers.Dense(1, name="out"),
    ]


def keras_stop(after: int | None, fit: Path) -> Any:
    import keras

    class KerasStop(keras.callbacks.Callback):
        """Calls a killer at the end of each execution."""

        def __init__(self) -> None:
            super().__init__()
            self.killer = Killer(after, fit)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.killer()

        def get_state(self) -> dict[str, Any]:
            return {}

        def set_state(self, state: Any) -> None:
            pass

    return KerasStop()


def keras_ended(model: Any, history: Any) -> End:
    """Variables and history of a Keras model."""
    variables = [*model.variables, *model.optimizer.variables]
    end = {f"variable{n}": np.asarray(v.value) for n, v in enumerate(variables)}
    return end | {name: np.asarray(rows) for name, rows in history.history.items()}


def keras_model(replicas: int = 1, kind: Any = None, **options: Any) -> Any:
    import keras

    import tailrace.keras as tk

    keras.utils.set_random_seed(3)
    with tk.Strategy(replicas).scope():
        model = (kind or keras.Sequential)(keras_layers())
    model.compile("adam", "mse", metrics=["mae"], steps_per_execution=2, **options)
    return model


def keras_epochs(folder: Path, stop: int | None) -> End:
    """Killed in the middle of an epoch; with fingerprints and a run directory."""
    model = keras_model(fingerprint=True)
    history = model.fit(
        X,
        Y,
        batch_size=4,
        epochs=2,
        verbose=0,
        checkpoint=tr.Checkpoint(folder / "kept", every=2),
        callbacks=[keras_stop(stop, folder)],
    )
    return keras_ended(model, history)


def keras_replicas(folder: Path, stop: int | None) -> End:
    """Two replicas and two microbatches."""
    import keras

    import tailrace.keras as tk

    keras.utils.set_random_seed(3)
    with tk.Strategy(2).scope():
        model = keras.Sequential(keras_layers())
    model.set_gradient_accumulation_options(2)
    model.compile("adam", "mse", steps_per_execution=8)
    history = model.fit(
        X,
        Y,
        batch_size=2,
        epochs=3,
        verbose=0,
        checkpoint=tr.Checkpoint(folder / "kept", every=2),
        callbacks=[keras_stop(stop, folder)],
    )
    return keras_ended(model, history)


def keras_own_step(folder: Path, stop: int | None) -> End:
    """A model whose `train_step` is its own."""
    import keras

    class OwnStep(keras.Sequential):
        def train_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().train_step(*args, **kwargs)

    model = keras_model(kind=OwnStep)
    history = model.fit(
        X,
        Y,
        batch_size=4,
        epochs=2,
        verbose=0,
        checkpoint=tr.Checkpoint(folder / "kept", every=2),
        callbacks=[keras_stop(stop, folder)],
    )
    return keras_ended(model, history)


def keras_backup(folder: Path, stop: int | None) -> End:
    """Keras' own `BackupAndRestore`."""
    import keras

    model = keras_model()
    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"), save_freq=2)
    history = model.fit(
        X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[backup, keras_stop(stop, folder)]
    )
    return keras_ended(model, history)


def ipu_keras(folder: Path, stop: int | None) -> End:
    """A Keras model in an `IPUStrategy`."""
    import keras

    from tailrace.compat import ipu

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()
    keras.utils.set_random_seed(3)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential(keras_layers())
    model.compile("adam", "mse", steps_per_execution=2)
    history = model.fit(
        X,
        Y,
        batch_size=4,
        epochs=2,
        verbose=0,
        checkpoint=tr.Checkpoint(folder / "kept", every=2),
        callbacks=[keras_stop(stop, folder)],
    )
    return keras_ended(model, history)


# -- PyTorch --------------------------------------------------------------------------------------


def torch_model() -> tuple[Any, Any]:
    import torch
    from torch import nn

    import tailrace.torch as tt

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
            self.head = nn.Linear(4, 1)

        def forward(self, x: Any, y: Any) -> Any:
            out = self.head(self.body(x))[:, 0]
            return out, nn.functional.mse_loss(out, y)

    torch.manual_seed(2)
    module = Net()
    adam = torch.optim.Adam(module.parameters(), lr=0.05)
    model = tt.training_model(module, adam, device_iterations=2, seed=5, fingerprint=True)
    return model, module


def torch_calls() -> list[tuple[Any, Any]]:
    import torch

    return [
        (torch.from_numpy(X[n : n + 8].copy()), torch.from_numpy(Y[n : n + 8].copy()))
        for n in range(0, 48, 8)
    ]


def torch_saved(folder: Path, stop: int | None) -> End:
    """`model.save` after three calls, and three more calls from its file."""
    model, module = torch_model()
    calls = torch_calls()
    losses = []
    if (folder / "3.npz").exists():
        model.load(folder / "3.npz")
    else:
        model.compile(*calls[0])
        model.save(folder / "0.npz")
        for x, y in calls[:3]:
            model(x, y)
        model.save(folder / "3.npz")
    for x, y in calls[3:]:
        losses.append(model(x, y)[1].detach().numpy())
    end = {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}
    return end | {"loss": np.concatenate([np.atleast_1d(x) for x in losses])}


CASES: dict[str, tuple[Callable[[Path, int | None], End], int | None]] = {
    "steps": (steps, 3),
    "epochs": (epochs, 4),
    "several": (several, 3),
    "finished": (finished, None),
    "replicas": (replicas, 1),
    "pipeline": (pipeline, 1),
    "nnx_module": (nnx_module, 1),
    "saved": (saved, None),
    "keras_epochs": (keras_epochs, 8),
    "keras_replicas": (keras_replicas, 1),
    "keras_own_step": (keras_own_step, 8),
    "keras_backup": (keras_backup, 8),
    "ipu_keras": (ipu_keras, 8),
    "torch_saved": (torch_saved, None),
}
"""name: the training, and after how many executions it was killed (None: not)."""
