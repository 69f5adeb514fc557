"""Trainers inside of `jax.set_mesh`: of that mesh, of another one, or of none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tailrace as tr
from oracles import assert_bits_equal, assert_close

START = {"w": np.full((8, 4), 0.1, np.float32)}
DATA = [np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8) + i for i in range(4)]


def loss_fn(params, x):
    return ((x @ params["w"]) ** 2).mean()


def step_fn(state, x):
    loss, grads = jax.value_and_grad(loss_fn)(state, x)
    return jax.tree.map(lambda p, g: p - 0.01 * g, state, tr.cross_replica_mean(grads)), loss


def mesh_of(count, kind=AxisType.Auto):
    return jax.make_mesh((count,), ("data",), axis_types=(kind,), devices=jax.devices()[:count])


def trainer(**options):
    return tr.Trainer(loss_fn, optax.sgd(0.01), START, **options)


def own(**options):
    return tr.Trainer.from_step(step_fn, START, eval_fn=loss_fn, **options)


def value(one, data=DATA, **options):
    return np.float32(one.evaluate(data, **options)["loss"])


MADE: dict[str, tuple[Any, Any, bool]] = {
    "own step": (own, dict, True),
    "own step on replicas": (own, lambda: {"replicas": 2}, True),
    "a device": (trainer, lambda: {"device": jax.devices()[1]}, True),
    "another mesh": (trainer, lambda: {"mesh": mesh_of(2), "shard": {"w": P("data")}}, True),
    "made outside": (trainer, lambda: {"ema": 0.9}, False),
    "made outside on replicas": (trainer, lambda: {"replicas": 2}, False),
}


def used(one, path):
    """What a trainer computes, by every way to use it."""
    losses = one.fit(DATA, progress=False, checkpoint=path / "kept").loss
    one.save(path / "saved")
    one.restore(path / "saved")
    one.state = one.state
    found = [losses, one.evaluate(DATA)["loss"], one.state]
    found.append(list(one.predict(DATA, loss_fn, live=True)))
    one.tensors(DATA[0])
    one.explain(DATA[0])
    assert one.replay(1, DATA, checkpoint=path / "kept").proved is not False
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("name", MADE)
def test_a_mesh_around_a_trainer_that_has_none_or_another(name, tmp_path):
    make, given, inside = MADE[name]
    options: dict[str, Any] = given()
    expected = used(make(**options), tmp_path / "plain")
    mesh = mesh_of(4, AxisType.Explicit)
    one = None if inside else make(**options)
    with jax.set_mesh(mesh):
        one = make(**options) if one is None else one
        assert_bits_equal(used(one, tmp_path / "inside"), expected)
        assert jax.sharding.get_mesh() == mesh


def test_between_results_that_are_read_live_the_mesh_is_the_callers():
    one, mesh = trainer(device=jax.devices()[0]), mesh_of(4)
    results = one.predict(DATA, loss_fn, live=True)
    with jax.set_mesh(mesh):
        for _ in results:
            assert jax.sharding.get_mesh() == mesh


def test_parameters_of_a_trainer_are_read_within_a_trace():
    one = trainer()
    assert_close(jax.jit(lambda x: loss_fn(one.params, x))(DATA[0]), loss_fn(START, DATA[0]))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_other_parameters_are_evaluated_on_the_mesh(kind):
    """Given whole, on another device, or sharded in another way."""
    one = trainer(mesh=mesh_of(4, kind), shard={"w": P("data")}, ema=0.9)
    one.fit(DATA, progress=False)
    expected = value(trainer())
    for params in (START, jax.device_put(START, jax.devices()[3])):
        assert_close(value(one, params=params), expected)
        assert len(one.predict(DATA, loss_fn, params=params)) == len(DATA)
    plain = trainer(ema=0.9)
    plain.fit(DATA, progress=False)
    for name in ("params", "ema_params"):
        found = value(one, params=getattr(one, name))
        assert_close(found, value(plain, params=getattr(plain, name)))


@pytest.mark.parametrize("count", [2, 4])
def test_a_key_in_an_element_is_no_batch(count):
    def noisy(params, key, x):
        return loss_fn(params, x + jax.random.normal(key, jnp.shape(x)))

    data = [(jax.random.key(i), x) for i, x in enumerate(DATA)]
    found = [
        tr.Trainer(noisy, optax.sgd(0.01), START, **options)
        for options in ({}, {"mesh": mesh_of(count), "shard": {"w": P("data")}})
    ]
    losses = [one.fit(data, progress=False).loss for one in found]
    assert_close(losses[1], losses[0])
    assert_close(value(found[1], data), value(found[0], data))


USES = {
    "evaluate": lambda one: one.evaluate(DATA, params=START),
    "predict": lambda one: one.predict(DATA, loss_fn, params=START),
    "ema_params": lambda one: one.ema_params,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_step_of_ones_own_has_no_parameters(use):
    one = own()
    with pytest.raises(tr.TailraceError, match=r"(params=|ema_params) .* Set trainer.state"):
        use(one)
