"""Scripts that keep checkpoints: started in a folder, killed at a step, started again, compared.

Each takes the folder and the step at which it is killed, and returns what it has at its end. `TRAINED`
has the steps that were trained since it was cleared.
"""

import os

import numpy as np
import optax

import tailrace as tr
from killed_fits import Killed

EVERY, STEPS, KILLED_AT = 4, 8, 6
TRAINED: list[int] = []

X = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
Y = X.sum(axis=1)


class Watch(tr.Callback):
    """Notes the steps, and ends the fit at one of them, as if its process had been killed."""

    def __init__(self, kill=None):
        self.kill = kill

    def on_execution_end(self, trainer, execution):
        TRAINED.extend(range(trainer.step - 2, trainer.step))
        if trainer.step == self.kill:
            raise Killed


class Counting(Watch):
    """Has a state of its own: an array, and a list."""

    def __init__(self, kill=None):
        super().__init__(kill)
        self.sums, self.steps = np.zeros(3, np.float64), []

    def on_execution_end(self, trainer, execution):
        self.sums = self.sums * 0.5 + np.asarray(trainer.params["w"])
        self.steps.append(trainer.step)
        super().on_execution_end(trainer, execution)

    def get_state(self):
        return {"sums": self.sums, "steps": list(self.steps)}

    def set_state(self, state):
        self.sums, self.steps = state["sums"], list(state["steps"])


def loss_fn(params, x, y):
    return ((x @ params["w"] - y) ** 2).mean()


def trainer_of(**options):
    optimizer = optax.sgd(0.05, momentum=0.9)
    params = {"w": np.zeros(3, np.float32)}
    return tr.Trainer(loss_fn, optimizer, params, steps_per_execution=2, **options)


def data():
    return tr.batches((X, Y), 4, shuffle=True, seed=5, repeat=True)


def kept(folder, **options):
    return tr.Checkpoint(folder / "kept", every=EVERY, keep=9, **options)


def end_of(trainer, history):
    return {"w": np.asarray(trainer.params["w"]), "loss": np.asarray(history.loss)}


def plain(folder, kill=None):
    trainer = trainer_of()
    fit = {"steps": STEPS, "checkpoint": kept(folder), "progress": False}
    return end_of(trainer, trainer.fit(data(), callbacks=[Watch(kill)], **fit))


def best(folder, kill=None):
    trainer = trainer_of()
    fit = {"steps": STEPS, "checkpoint": kept(folder, best="val_loss"), "progress": False}
    fit |= {"validation_data": [(X[:8], Y[:8])], "validation_every": 2}
    history = trainer.fit(data(), callbacks=[Watch(kill)], **fit)
    return {**end_of(trainer, history), "val": np.asarray(history["val_loss"])}


def several(folder, kill=None):
    trainer = trainer_of()
    fit = {"checkpoint": kept(folder), "progress": False, "callbacks": [Watch(kill)]}
    first = np.asarray(trainer.fit(data(), steps=4, **fit).loss)
    return {**end_of(trainer, trainer.fit(data(), steps=4, **fit)), "first": first}


def recorded(folder, kill=None):
    run = folder / "run"
    trainer = trainer_of(run_dir=run, observe=[tr.Tap("grad/*", reduce="norm")])
    fit = {"steps": STEPS, "checkpoint": kept(folder), "progress": False}
    found = end_of(trainer, trainer.fit(data(), callbacks=[Watch(kill)], **fit))
    there = tr.open_run(run)
    (name,) = there.records
    return {**found, "run": there.history.loss, "norms": there.records[name].values}


def stateful(folder, kill=None):
    trainer, counting = trainer_of(), Counting(kill)
    fit = {"steps": STEPS, "checkpoint": kept(folder), "progress": False}
    found = end_of(trainer, trainer.fit(data(), callbacks=[counting], **fit))
    return {**found, "sums": counting.sums, "steps": np.asarray(counting.steps)}


def long(folder, kill=None):
    """The history is in a file of its own."""
    from tailrace.trainer.checkpoints import long_arrays

    before, long_arrays.LONG = long_arrays.LONG, 1
    try:
        return plain(folder, kill)
    finally:
        long_arrays.LONG = before


def keras_fit(folder, kill=None):
    """Killed in the middle of its second epoch."""
    import tailrace.keras as tk  # isort: skip
    import keras

    class KerasWatch(keras.callbacks.Callback):
        step = 0

        def on_train_batch_end(self, batch, logs=None):
            self.step = self.epoch * 3 + batch + 1
            TRAINED.append(self.step - 1)
            # Executions have one batch, and an epoch has three.
            if kill is not None and self.step == kill - 1:
                raise Killed

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def get_state(self):
            return {}

        def set_state(self, state):
            pass

    keras.utils.set_random_seed(3)
    with tk.Strategy().scope():
        layers = [keras.Input((3,)), keras.layers.Dropout(0.3, seed=7), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
    model.compile("adam", "mse")
    fit = {"epochs": 3, "batch_size": 16, "verbose": 0, "checkpoint": kept(folder)}
    history = model.fit(X, Y, callbacks=[KerasWatch()], **fit).history
    return {"w": model.get_weights()[0], "loss": np.asarray(history["loss"])}


def torch_calls(folder, kill=None):
    """A loop of calls that saves itself and loads the newest file."""
    import torch

    import tailrace.torch as tt

    torch.manual_seed(1)

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(3, 1)

        def forward(self, x, y):
            out = self.line(x)
            return out, torch.nn.functional.mse_loss(out, y)

    module = Line()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = tt.training_model(module, optimizer)
    files = {int(file.stem[4:]): file for file in sorted(folder.glob("call*.npz"))}
    begun = max(files, default=0)
    if files:
        model.load(files[begun])
    for call in range(begun, STEPS):
        x = torch.tensor(X[4 * call : 4 * call + 4])
        model(x, x.sum(1, keepdim=True))
        TRAINED.append(call)
        if call + 1 == kill:
            raise Killed
        if (call + 1) % EVERY == 0:
            model.save(folder / f"call{call + 1}.npz")
    model.copy_weights_to_host()
    found = {name: value.numpy().copy() for name, value in module.state_dict().items()}
    model.destroy()
    return found


def saved(folder, kill=None):
    """Saves by hand, and restores."""
    trainer = trainer_of()
    if "kept" in os.listdir(folder):
        trainer.restore(folder / "kept")
    else:
        trainer.fit(data(), steps=EVERY, progress=False, callbacks=[Watch()])
        trainer.save(folder / "kept")
    left = {"steps": STEPS - EVERY, "progress": False, "callbacks": [Watch(kill)]}
    return end_of(trainer, trainer.fit(data(), **left))


def together(folder, kill=None):
    """In several processes, each with its share of the data."""
    trainer, shared = trainer_of(replicas=2), tr.distributed.share(data(), 2)
    fit = {"steps": STEPS, "checkpoint": kept(folder), "progress": False}
    return end_of(trainer, trainer.fit(shared, callbacks=[Watch(kill)], **fit))


ALONE = (plain, best, several, recorded, stateful, long, saved, keras_fit, torch_calls)
PROGRAMS = {program.__name__: program for program in ALONE}
TOGETHER = {"together": together}
"""For two processes."""
