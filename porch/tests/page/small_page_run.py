"""A small training whose run has every kind of record."""

from types import SimpleNamespace

import jax
import numpy as np
import optax

import tailrace as tr


def loss_fn(params, x, y):
    with jax.named_scope("hidden"):
        h = jax.nn.relu(x @ params["first"])
    off = (h @ params["second"])[:, 0] - y
    return (off**2).mean(), {"mae": abs(off).mean()}


def train(directory, steps=20):
    """Train; the trainer's own records and history, and where the run is."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 6)).astype(np.float32)
    params = {
        "first": rng.normal(size=(6, 5)).astype(np.float32),
        "second": rng.normal(size=(5, 1)).astype(np.float32),
    }
    kinds = ("stats", "histogram", "norm", "tensor")
    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(0.01),
        params,
        observe=[tr.Tap("grad/*", reduce=kind) for kind in kinds],
        run_dir=directory,
        steps_per_execution=5,
    )
    data = tr.batches((x, x.sum(axis=1)), 8, repeat=True)
    history = trainer.fit(data, steps=steps, progress=False)
    return SimpleNamespace(run_dir=directory, records=trainer.records, history=history)
