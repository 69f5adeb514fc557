"""Arrays on other devices keep their place or are refused, in every front door."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tailrace as tr
from tailrace.errors import OptionError, ProgramError

DATA = tr.batches(np.ones((32, 8), np.float32), 4)
W = np.ones((8, 4), np.float32)


def loss_fn(w, x):
    return ((x @ w) ** 2).mean()


def with_state(w, state, x):
    return loss_fn(w, x), ({"mean": state["mean"]}, None)


def trainer_of(params=W, **options):
    return tr.Trainer(loss_fn, optax.sgd(0.1), params, **options)


def mesh():
    return jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])


PLACES = {
    "sharded": (
        lambda a: jax.device_put(a, NamedSharding(mesh(), PartitionSpec("data"))),
        "over 2",
    ),
    "replicated": (lambda a: jax.device_put(a, NamedSharding(mesh(), PartitionSpec())), "over 2"),
    "on another device": (lambda a: jax.device_put(a, jax.devices()[3]), "on .*3"),
}


def of_nnx(array):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(array)

    return tr.Trainer(lambda m, x: ((x @ m.w[...]) ** 2).mean(), optax.sgd(0.1), Model())


def of_equinox(array):
    equinox = pytest.importorskip("equinox")

    class Model(equinox.Module):
        w: jax.Array

    return tr.Trainer(lambda m, x: ((x @ m.w) ** 2).mean(), optax.sgd(0.1), Model(array))


def set_state(array):
    trainer = trainer_of()
    trainer.state = trainer.state._replace(params=array)


DOORS = {
    "params": lambda a: trainer_of({"a": {"w": a}}),
    "replicas": lambda a: trainer_of(a, replicas=2),
    "shared optimizer state": lambda a: trainer_of(a, replicas=2, shard_optimizer_state=True),
    "model_state": lambda a: tr.Trainer(with_state, optax.sgd(0.1), W, model_state={"mean": a}),
    "trainer.state": set_state,
    "an NNX module": of_nnx,
    "an Equinox module": of_equinox,
    "arguments of a program": lambda a: tr.compile(lambda c: tr.repeat(2, lambda c: c * 2, c))(a),
    "closed over by a program": lambda a: tr.compile(lambda c: c @ a.T)(W),
    "closed over by the loss": lambda a: tr.Trainer(
        lambda w, x: ((x @ w - x @ a) ** 2).mean(), optax.sgd(0.1), W
    ).fit(DATA, steps=1, progress=False),
}


MODELS = ("params", "model_state", "an NNX module", "an Equinox module")
"""Doors through which a sharded model comes in and keeps its shardings."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("door", DOORS)
def test_arrays_that_would_be_moved_are_refused(door, place):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    put, text = PLACES[place]
    if place != "on another device" and door in MODELS:
        given = put(jnp.asarray(W))
        leaves = jax.tree.leaves(DOORS[door](given).state)
        assert given.sharding in [leaf.sharding for leaf in leaves]
        return
    if place != "on another device" and door in ("replicas", "shared optimizer state"):
        with pytest.raises(OptionError, match="sharded over a mesh has no replicas="):
            DOORS[door](put(jnp.asarray(W)))
        return
    if place == "on another device" and door in ("replicas", "shared optimizer state"):
        assert jax.devices()[3] not in trainer_of(replicas=2).engine.placement.devices
    if door.startswith("closed") and place == "replicated":
        pytest.skip("JAX says itself that meshes differ, or traces it as a literal")
    with pytest.raises(
        ProgramError, match=rf"not sharded by JAX or put elsewhere\. Received: .*{text}"
    ):
        DOORS[door](put(jnp.asarray(W)))


def test_what_may_be_given():
    """NumPy arrays, arrays without a place of their own, and those of other trainers."""
    first = trainer_of(replicas=2)
    first.fit(DATA, steps=2, progress=False)
    for params in (W, jnp.asarray(W), jax.device_put(W, jax.devices()[0]), first.params):
        for replicas in (1, 2):
            trainer_of(params, replicas=replicas).fit(DATA, steps=1, progress=False)
    trainer_of(jax.tree.map(lambda a: a * 2, first.params)).fit(DATA, steps=1, progress=False)
    with jax.default_device(jax.devices()[1]):
        made = jnp.asarray(W)  # not committed: it follows the computation
    trainer_of(made)


def test_a_default_device_is_refused():
    with jax.default_device(jax.devices()[1]):
        with pytest.raises(ProgramError, match=r"jax.default_device is not asked. Received: .*1"):
            trainer_of()
        with pytest.raises(ProgramError, match="choose the devices with tr.configure"):
            tr.compile(lambda x: x + 1)(W)
    with jax.default_device(jax.devices()[0]):
        trainer_of()
