"""A small model, and runs of it, for all tests of run directories."""

import jax
import numpy as np
import optax

import tailrace as tr

RNG = np.random.default_rng(0)
X = RNG.normal(size=(1024, 6)).astype(np.float32)
Y = X.sum(axis=1)
PARAMS = {
    "first": RNG.normal(size=(6, 5)).astype(np.float32),
    "second": RNG.normal(size=(5, 1)).astype(np.float32),
}


def loss_fn(params, x, y):
    with jax.named_scope("hidden"):
        h = jax.nn.relu(x @ params["first"])
    off = (h @ params["second"])[:, 0] - y
    return (off**2).mean(), {"mae": abs(off).mean()}


def make_trainer(run_dir=None, observe=("grad/*",), *, rate=0.01, params=PARAMS, **options):
    options.setdefault("steps_per_execution", 5)
    return tr.Trainer(
        loss_fn, optax.sgd(rate), params, observe=list(observe), run_dir=run_dir, **options
    )


def train(trainer, steps=20, batch=8):
    return trainer.fit(tr.batches((X, Y), batch, repeat=True), steps=steps, progress=False)


def assert_same_record(one, other):
    assert (one.name, one.kind) == (other.name, other.kind)
    for tag in ("steps", "microbatches", "replicas", "stages", "ran"):
        np.testing.assert_array_equal(getattr(one, tag), getattr(other, tag), err_msg=tag)
    assert jax.tree.structure(one.values) == jax.tree.structure(other.values)
    for mine, theirs in zip(
        jax.tree.leaves(one.values), jax.tree.leaves(other.values), strict=True
    ):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


def assert_same_records(one, other):
    assert set(one) == set(other)
    for key in one:
        assert_same_record(one[key], other[key])
