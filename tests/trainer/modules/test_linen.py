"""The variables of a Linen module in place of parameters, against plain Linen training."""

import flax
import flax.linen as nn
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
from tailrace.errors import OptionError, ProgramError

ELEMENTS = regression(8)
X, Y = ELEMENTS[0]


class Block(nn.Module):
    """A layer with a state and random numbers."""

    rate: float

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(3, name="linear")(x))
        return nn.Dropout(self.rate, deterministic=not train)(jnp.tanh(x))


class Model(nn.Module):
    """Two of them, one called twice, and a head."""

    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train=True):
        first = Block(self.rate, name="first")
        x = Block(self.rate, name="second")(first(first(x, train), train), train)
        return nn.Dense(1, name="head")(x)[:, 0]


MODEL = Model()


def variables_of(model=MODEL):
    return model.init({"params": jax.random.key(0)}, X, train=False)


def loss_with(key, variables, x, y, model=MODEL):
    out, updates = model.apply(variables, x, rngs={"dropout": key}, mutable=["batch_stats"])
    return ((out - y) ** 2).mean(), (updates, {"mae": jnp.abs(out - y).mean()})


def loss_fn(variables, x, y):
    return loss_with(tr.key(), variables, x, y)


def trainer_of(variables, loss=loss_fn, **options):
    return tr.Trainer(loss, optax.sgd(0.1, momentum=0.9), variables, **options)


@pytest.fixture(scope="module")
def trained():
    taps = [tr.Tap(["param/*", "grad/*", "activation/*", "buffer/*"], reduce="tensor")]
    trainer = trainer_of(variables_of(), observe=taps, steps_per_execution=3)
    trainer.fit(ELEMENTS, steps=6, progress=False)
    return trainer


def test_equal_to_the_plain_linen_loop(trained):
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(carry, x, y):
        variables, state, number = carry

        def loss(params):
            return loss_with(key_of(number), {**variables, "params": params}, x, y)

        (value, (updates, _)), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        changes, state = optimizer.update(grads, state)
        params = optax.apply_updates(variables["params"], changes)
        return ({"params": params, **updates}, state, number + 1), value

    start = variables_of()
    carry = (start, optimizer.init(start["params"]), jnp.int32(0))
    (variables, _, _), losses = plain_scan(step, carry, ELEMENTS[:6])
    assert_bits_equal(trained.history.loss, losses)
    assert_bits_equal(trained.model, variables)
    assert_bits_equal(trained.params, variables["params"])
    assert_bits_equal(trained.model_state, {"batch_stats": variables["batch_stats"]})


def test_accumulation_and_replicas_by_the_book():
    model = Model(0.0)

    def loss(variables, x, y):
        return loss_with(jax.random.key(0), variables, x, y, model)

    trainer = trainer_of(variables_of(model), loss, accumulation=2, replicas=2)
    history = trainer.fit(ELEMENTS, steps=2, progress=False)
    start = variables_of(model)

    def by_hand(params, state, x, y):
        return loss({"params": params, **state}, x, y)

    params, losses, state = plain_accumulated_training(
        by_hand, optax.sgd(0.1, momentum=0.9), start.pop("params"), ELEMENTS,
        microbatches=2, replicas=2, model_state=start,
    )  # fmt: skip
    assert_close(history.loss, losses.mean((1, 2)))
    assert_close(trainer.params, params)
    assert_close(trainer.model_state, state)


def test_evaluation_reads_all_collections(trained):
    expected = jnp.concatenate([MODEL.apply(trained.model, x, train=False) for x, _ in ELEMENTS])
    found = trained.predict(ELEMENTS, lambda v, x, y: MODEL.apply(v, x, train=False))
    assert_close(found, expected)

    def loss(variables, x, y):
        return ((MODEL.apply(variables, x, train=False) - y) ** 2).mean()

    plain = np.mean([float(loss(trained.model, *element)) for element in ELEMENTS])
    assert trained.evaluate(ELEMENTS, loss)["loss"] == pytest.approx(plain, rel=1e-5)


def test_names_are_those_of_the_model(trained):
    names = trained.records.names
    parts = ["BatchNorm_0/bias", "BatchNorm_0/scale", "linear/bias", "linear/kernel"]
    assert [n for n in names if n.startswith("grad/")] == [
        *(f"grad/first/{part}" for part in parts),
        *("grad/head/bias", "grad/head/kernel"),
        *(f"grad/second/{part}" for part in parts),
    ]
    assert "buffer/batch_stats/first/BatchNorm_0/mean" in names
    scopes = {n.split("[")[0] for n in names if n.startswith("activation/") and ":" not in n}
    inside = [f"activation/{name}" for name in ("first", "first#1", "second")]
    assert scopes == {
        "activation/head",
        *inside,
        *(f"{s}/{part}" for s in inside for part in ("linear", "BatchNorm_0", "Dropout_0")),
    }
    last = {name: trained.records[name].values[5] for name in trained.records.names}
    layer = ELEMENTS[5][0] @ last["param/first/linear/kernel"] + last["param/first/linear/bias"]
    assert_close(last["activation/first/linear"], layer)


def test_variables_come_back_as_they_were_given():
    frozen = flax.core.freeze(variables_of())
    trainer = trainer_of(frozen)
    assert isinstance(trainer.model, flax.core.FrozenDict)
    trainer.tensors((X, Y))
    assert_bits_equal(trainer.model, frozen)


class Partitioned(nn.Module):
    """A layer whose parameter knows how it would be spread."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(1, kernel_init=init)(x)[:, 0]


def test_parameters_alone_and_boxed_ones():
    model = Partitioned()
    variables = model.init(jax.random.key(0), X)

    def loss(variables, x, y):
        return ((model.apply(variables, x) - y) ** 2).mean()

    trainer = trainer_of(variables, loss)
    names = trainer.tensors((X, Y)).names
    assert "grad/Dense_0/kernel" in names
    assert "activation/Dense_0" in names
    assert set(trainer.model) == {"params"}
    assert trainer.model_state is None


# -- what is refused ----------------------------------------------------------------------------


def test_collections_come_back():
    variables = variables_of()

    def without(variables, x, y):
        return loss_fn(variables, x, y)[0]

    with pytest.raises(ProgramError, match=r"returns \(loss, \(new_state, aux\)\)"):
        trainer_of(variables, without).tensors((X, Y))

    def wrong(variables, x, y):
        loss, (updates, aux) = loss_fn(variables, x, y)
        return loss, (aux, updates)

    with pytest.raises(
        ProgramError, match=r"some of \['batch_stats'\]. Received in its place: \['mae'\]"
    ):
        trainer_of(variables, wrong).tensors((X, Y))

    def partly(variables, x, y):
        loss, (updates, aux) = loss_fn(variables, x, y)
        return loss, ({"batch_stats": {"first": updates["batch_stats"]["first"]}}, aux)

    with pytest.raises(ProgramError, match="A step changes the values of collections, not which"):
        trainer_of(variables, partly).tensors((X, Y))


def test_collections_that_do_not_change_are_left_out():
    def loss(variables, x, y):
        return ((MODEL.apply(variables, x, train=False) - y) ** 2).mean(), ({}, None)

    trainer = trainer_of(variables_of(), loss)
    trainer.fit(ELEMENTS, steps=1, progress=False)
    assert_bits_equal(trainer.model_state["batch_stats"], variables_of()["batch_stats"])


def test_state_is_among_the_variables():
    with pytest.raises(
        OptionError, match=r"Received: variables with \['batch_stats', 'params'\], and"
    ):
        trainer_of(variables_of(), model_state={"batch_stats": {}})
