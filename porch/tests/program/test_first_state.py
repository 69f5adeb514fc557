"""The state that an optimizer begins with: the same bits, and never all of it on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_loss, regression
from tailrace.program.memory import optimizer_state
from tailrace.program.memory.first_state import FirstState
from tailrace.program.running.executable import Placement

OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "a copy of the parameters": optax.ema(0.9, accumulator_dtype=jnp.bfloat16),
    "a random key": optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(0.1, momentum=0.9)),
    "masked": optax.masked(
        optax.adam(1e-2), lambda p: jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, p)
    ),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
}


class Computes:
    """Whose state takes arithmetic that XLA would contract, and operations shared by leaves."""

    def init(self, params):
        norm = jnp.sqrt(sum(jnp.vdot(p, p) for p in jax.tree.leaves(params)))
        return {
            "scaled": jax.tree.map(
                lambda p: p / norm * jnp.float32(0.3) + jnp.float32(0.1), params
            ),
            "count": jnp.int32(0),
            "fixed": np.arange(3, dtype=np.float32),
        }

    def update(self, grads, state, params):
        return jax.tree.map(lambda g: -g, grads), state


def bare(tree):
    """Random keys as their numbers."""

    def one(leaf):
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return jax.tree.map(one, tree)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        yield


@pytest.mark.parametrize("name", [*OPTIMIZERS, "computed"])
def test_the_same_bits(name):
    optimizer = Computes() if name == "computed" else OPTIMIZERS[name]
    params = jax.tree.map(jnp.asarray, mlp())
    first, expected = FirstState(optimizer.init, params), optimizer.init(params)
    structure = jax.tree.structure(expected)
    assert jax.tree.structure(first.forms) == structure
    assert_bits_equal(bare(jax.tree.unflatten(structure, list(first.leaves()))), bare(expected))
    forms = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(first.forms)]
    assert forms == [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(expected)]


def test_a_leaf_is_made_when_it_is_asked_for():
    params = [jnp.ones((31, 17 + i)) for i in range(6)]
    leaves = FirstState(optax.adam(0.1).init, params).leaves()
    del params

    def alive():
        return sum(array.nbytes for array in jax.live_arrays() if array.shape[:1] == (31,))

    before = alive()
    sizes = []
    for leaf in leaves:
        assert alive() - before <= leaf.nbytes
        sizes.append(leaf.nbytes)
        del leaf
    assert sum(sizes) > 2 * before - 100


@pytest.mark.parametrize(
    "options",
    [{}, {"replicas": 2}, {"replicas": 2, "shard_optimizer_state": True}],
    ids=["plain", "replicas", "shares"],
)
def test_a_trainer_puts_each_leaf_in_its_place(options, monkeypatch):
    monkeypatch.setattr(optimizer_state, "LEAST", 2)
    params = [np.ones((29, 11 + i), np.float32) for i in range(6)]
    on_one_device = []

    def watched(own):
        def place(self, value):
            # Besides what was placed, there are the parameters and the leaf that is placed now.
            alone = [a for a in jax.live_arrays() if len(a.devices()) == 1 and a.shape[:1] == (29,)]
            on_one_device.append(len(alone))
            return own(self, value)

        return place

    for name in ("own", "own_each"):
        monkeypatch.setattr(Placement, name, watched(getattr(Placement, name)))
    many = tr.Trainer(lambda p, x: x.sum(), optax.adam(0.1), params, **options)
    placed = 0 if options else 12 + 6
    assert max(on_one_device) <= 6 + placed + 1
    assert len(jax.tree.leaves(many.state.optimizer_state)) == 13


def test_training_starts_from_it():
    optimizer = OPTIMIZERS["a random key"]
    trainer = tr.Trainer(mlp_loss, optimizer, mlp())
    assert_bits_equal(bare(trainer.state.optimizer_state), bare(optimizer.init(trainer.params)))
    trainer.fit(regression(4), steps=2)
