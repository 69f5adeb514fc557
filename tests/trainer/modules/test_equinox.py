"""An Equinox module in place of parameters, against plain Equinox training."""

import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_keys import key_of

import tailrace as tr
from oracles import (
    assert_bits_equal,
    assert_close,
    plain_accumulated_training,
    plain_scan,
    regression,
)
from tailrace.errors import ProgramError

ELEMENTS = regression(8)
X, Y = ELEMENTS[0]


class Block(eqx.Module):
    """A layer with random numbers, an activation function and a number."""

    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    drop: eqx.nn.Dropout
    activation: object
    scale: float

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 3, key=key)
        self.norm = eqx.nn.LayerNorm(3)
        self.drop = eqx.nn.Dropout(0.5)
        self.activation = jnp.tanh
        self.scale = 0.5

    def __call__(self, x, key):
        return self.drop(self.activation(self.norm(self.linear(x))) * self.scale, key=key)


class Model(eqx.Module):
    """Two of them in a list, a head, and integers."""

    blocks: list[Block]
    head: eqx.nn.MLP
    order: jax.Array

    def __init__(self, seed=0):
        keys = jax.random.split(jax.random.key(seed), 3)
        self.blocks = [Block(key) for key in keys[:2]]
        self.head = eqx.nn.MLP(3, "scalar", 4, 1, key=keys[2])
        self.order = jnp.arange(3)[::-1]

    def __call__(self, x, key):
        x = x[self.order]
        for number, block in enumerate(self.blocks):
            x = block(x, jax.random.fold_in(key, number))
        return self.head(x)


def loss_with(key, model, x, y):
    error = jax.vmap(model)(x, jax.random.split(key, len(x))) - y
    return (error**2).mean(), {"mae": jnp.abs(error).mean()}


def loss_fn(model, x, y):
    return loss_with(tr.key(), model, x, y)


def trainer_of(model, loss=loss_fn, **options):
    return tr.Trainer(loss, optax.sgd(0.1, momentum=0.9), model, **options)


@pytest.fixture(scope="module")
def trained():
    trainer = trainer_of(Model(), steps_per_execution=3)
    trainer.fit(ELEMENTS, steps=6, progress=False)
    return trainer


@pytest.fixture(scope="module")
def observed():
    taps = [tr.Tap(["param/*", "grad/*", "activation/*"], reduce="tensor")]
    trainer = trainer_of(Model(), observe=taps)
    trainer.fit(ELEMENTS, steps=1, progress=False)
    return trainer


def test_equal_to_the_plain_equinox_loop(trained):
    params, static = eqx.partition(Model(), eqx.is_inexact_array)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(carry, x, y):
        params, state, number = carry

        def loss(params):
            return loss_with(key_of(number), eqx.combine(params, static), x, y)

        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state)
        return (eqx.apply_updates(params, updates), state, number + 1), value

    start = (params, optimizer.init(params), jnp.int32(0))
    (params, _, _), losses = plain_scan(step, start, ELEMENTS[:6])
    assert_bits_equal(trained.history.loss, losses)
    assert_bits_equal(trained.params, params)
    whole = eqx.combine(params, static)
    assert_bits_equal(eqx.filter(trained.model, eqx.is_array), eqx.filter(whole, eqx.is_array))
    assert type(trained.model) is Model
    assert trained.model.blocks[0].activation is jnp.tanh


def test_every_microbatch_of_every_replica_draws_its_own():
    trainer = trainer_of(Model(), accumulation=2, replicas=2, seed=3)
    history = trainer.fit(ELEMENTS, steps=2, progress=False)
    params, static = eqx.partition(Model(), eqx.is_inexact_array)

    def by_hand(params, x, y):
        return loss_fn(eqx.combine(params, static), x, y)

    plain = trainer_of(params, by_hand, accumulation=2, replicas=2, seed=3)
    assert_bits_equal(history.loss, plain.fit(ELEMENTS, steps=2, progress=False).loss)
    assert_bits_equal(trainer.params, plain.params)


def test_evaluation_is_in_inference_mode(trained, caplog):
    model = eqx.nn.inference_mode(trained.model)

    def predicted(model, x, y):
        return jax.vmap(model, (0, None))(x, key_of(0))

    expected = jnp.concatenate([predicted(model, *element) for element in ELEMENTS])
    assert_close(trained.predict(ELEMENTS, predicted), expected)
    plain = np.mean([float(loss_with(key_of(0), model, *element)[0]) for element in ELEMENTS])
    for values in (trained.evaluate(ELEMENTS), trained.evaluate(ELEMENTS, loss_fn)):
        assert values["loss"] == pytest.approx(plain, rel=1e-5)
    assert trained.model.blocks[0].drop.inference is False
    assert not caplog.records  # keys were drawn, and dropout is off


def test_a_module_in_inference_mode_is_noted(caplog):
    with caplog.at_level(logging.WARNING):
        trainer_of(eqx.nn.inference_mode(Model()))
    assert "The Equinox module is in inference mode" in caplog.text


# -- names --------------------------------------------------------------------------------------


def test_names_are_those_of_the_model(observed):
    names = observed.records.names
    parts = ["linear/weight", "linear/bias", "norm/weight", "norm/bias"]
    assert [n for n in names if n.startswith("grad/")] == [
        *(f"grad/blocks/{n}/{part}" for n in range(2) for part in parts),
        *(f"grad/head/layers/{n}/{part}" for n in range(2) for part in ("weight", "bias")),
    ]
    scopes = {n for n in names if n.startswith("activation/") and ":" not in n}
    inside = [f"activation/blocks/{n}" for n in range(2)]
    assert scopes == {
        *("activation/head", "activation/head/layers/0", "activation/head/layers/1"),
        *inside,
        *(f"{scope}/{part}" for scope in inside for part in ("linear", "norm", "drop")),
    }
    assert "cotangent/blocks/1/linear" in observed.tensors().names


def test_an_activation_is_what_the_layer_returns(observed):
    seen = {name: observed.records[name].values[0] for name in observed.records.names}
    layer = X[:, ::-1] @ seen["param/blocks/0/linear/weight"].T + seen["param/blocks/0/linear/bias"]
    assert_close(seen["activation/blocks/0/linear"], layer)


class Wrapped(eqx.Module):
    """Layers behind transformations of Equinox and of JAX."""

    stack: eqx.nn.Linear
    remade: eqx.nn.Linear
    jitted: list[eqx.nn.Linear]

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 4)
        self.stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 3, key=key))(keys)
        self.remade = eqx.nn.Linear(3, 3, key=keys[0])
        self.jitted = [eqx.nn.Linear(3, 3, key=key) for key in keys[:2]]

    def __call__(self, x):
        arrays, static = eqx.partition(self.stack, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, own: (eqx.combine(own, static)(x), None), x, arrays)
        x = eqx.filter_checkpoint(lambda layer, x: layer(x))(self.remade, x)
        for layer in self.jitted:
            x = eqx.filter_jit(lambda layer, x: layer(x))(layer, x)
        return x.sum()


def test_names_behind_transformations():
    def loss(model, x, y):
        return ((jax.vmap(model)(x) - y) ** 2).mean()

    found = trainer_of(Wrapped(), loss).tensors((X, Y))
    scopes = {n for n in found.names if n.startswith("activation/") and ":" not in n}
    jitted = {f"activation/jitted/{number}" for number in range(2)}
    assert {"activation/stack", "activation/remade", *jitted} <= scopes
    assert found["activation/stack"].shape == (4, 4, 3)


def test_a_layer_of_equinox_is_a_model_itself():
    def loss(model, x, y):
        return ((jax.vmap(model)(x) - y) ** 2).mean()

    names = trainer_of(eqx.nn.MLP(3, "scalar", 2, 1, key=key_of(0)), loss).tensors((X, Y)).names
    assert "activation/layers/0" in names
    assert not any("eqx" in name for name in names)


def test_modules_that_are_mapped_over_keep_their_classes():
    start = eqx.nn.Linear(3, "scalar", key=key_of(0))

    def loss(model, x, y):
        away = jax.tree.map(lambda a, b: jnp.square(a - b).sum(), model, start)
        return ((jax.vmap(model)(x) - y) ** 2).mean() + sum(jax.tree.leaves(away))

    trainer = trainer_of(start, loss)
    trainer.fit(ELEMENTS, steps=1, progress=False)
    assert_close(trainer.history.loss[0], loss(start, X, Y))


def test_classes_are_left_alone():
    before = {kind: vars(kind)["__call__"] for kind in (eqx.nn.Linear, eqx.nn.Dropout, Block)}
    trainer_of(Model()).tensors((X, Y))
    assert {kind: vars(kind)["__call__"] for kind in before} == before


# -- state --------------------------------------------------------------------------------------


class Normed(eqx.Module):
    """A layer with a state."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        return x.sum(), state


def outputs(model, state, x):
    each = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return each(x, state)


def stateful_loss(model, state, x, y):
    out, state = outputs(model, state, x)
    return ((out - y) ** 2).mean(), (state, {"mean": out.mean()})


def values_of(state):
    return state.tree_flatten()[0]


@pytest.mark.parametrize(("microbatches", "replicas"), [(2, 2), (2, 1)])
def test_a_state_goes_from_step_to_step(microbatches, replicas):
    model, state = eqx.nn.make_with_state(Normed)()
    options = {"accumulation": microbatches, "replicas": replicas, "model_state": state}
    trainer = trainer_of(model, stateful_loss, **options)
    history = trainer.fit(ELEMENTS, steps=2, progress=False)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    _, structure = jax.tree.flatten(state)

    def by_hand(params, leaves, x, y):
        state = jax.tree.unflatten(structure, leaves)
        loss, (state, aux) = stateful_loss(eqx.combine(params, static), state, x, y)
        return loss, (jax.tree.leaves(state), aux)

    params, losses, leaves = plain_accumulated_training(
        by_hand, optax.sgd(0.1, momentum=0.9), params, ELEMENTS[: 4 * replicas],
        microbatches=microbatches, replicas=replicas, model_state=jax.tree.leaves(state),
    )  # fmt: skip
    assert_close(history.loss, losses.mean((1, 2)))
    assert_close(trainer.params, params)
    assert isinstance(trainer.model_state, eqx.nn.State)
    for found, expected in zip(jax.tree.leaves(trainer.model_state), leaves, strict=True):
        assert_close(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    if replicas == 1:
        expected, _ = outputs(eqx.nn.inference_mode(trainer.model), trainer.model_state, X)
        assert_close(trainer.predict([X], lambda m, s, x: outputs(m, s, x)[0]), expected)
    names = trainer.tensors((X, Y)).names
    assert "buffer/norm/batch_state_index/0" in names
    assert not any(name.startswith("grad/norm/batch") for name in names)


def test_a_state_comes_back():
    model, state = eqx.nn.make_with_state(Normed)()

    def loss(model, state, x, y):
        return stateful_loss(model, state, x, y)[0], (None, None)

    with pytest.raises(ProgramError, match="in the place of new_state: a NoneType"):
        trainer_of(model, loss, model_state=state).tensors((X, Y))

    def without(model, state, x, y):
        return stateful_loss(model, state, x, y)[0]

    with pytest.raises(ProgramError, match=r"returns \(loss, \(new_state, aux\)\)"):
        trainer_of(model, without, model_state=state).tensors((X, Y))
