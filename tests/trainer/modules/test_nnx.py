"""An `nnx.Module` in place of parameters, against plain NNX training."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_keys import key_of

import tailrace as tr
from oracles import assert_bits_equal, assert_close, plain_accumulated_training, regression
from tailrace.errors import OptionError, ProgramError

ELEMENTS = regression(8)
X, Y = ELEMENTS[0]


class Block(nnx.Module):
    """A layer with a state and random numbers."""

    def __init__(self, rate, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.drop(jnp.tanh(self.norm(self.linear(x))))


class Model(nnx.Module):
    """Two of them in a list, and a head."""

    def __init__(self, rate=0.5, seed=0):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([Block(rate, rngs) for _ in range(2)])
        self.head = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0]


def loss_fn(model, x, y):
    error = model(x) - y
    return (error**2).mean(), {"mae": jnp.abs(error).mean()}


def trainer_of(model, loss=loss_fn, **options):
    return tr.Trainer(loss, optax.sgd(0.1, momentum=0.9), model, **options)


def params_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def statistics_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))


def reseeded(model, key):
    """Stream i, in the order of paths, starts from fold_in(key, i)."""
    for number, drop in enumerate(block.drop for block in model.blocks):
        # Not `key[...] = `, which scatters: compiling that crashes XLA of JAX 0.11.2 with replicas.
        drop.rngs.key.set_value(jax.random.fold_in(key, number))
        drop.rngs.count.set_value(jnp.zeros((), jnp.uint32))


@pytest.fixture(scope="module")
def trained():
    """A trainer after six steps, every tensor of its last ones recorded."""
    taps = [tr.Tap(["param/*", "grad/*", "activation/*", "buffer/*"], reduce="tensor")]
    trainer = trainer_of(Model(), observe=taps, steps_per_execution=3)
    trainer.fit(ELEMENTS, steps=6, progress=False)
    return trainer


def test_equal_to_the_plain_nnx_loop(trained):
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, key, x, y):
        reseeded(model, key)
        (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, key_of(t), *ELEMENTS[t]) for t in range(6)]
    assert_bits_equal(trained.history.loss, np.asarray(losses))
    assert_bits_equal(trained.params, params_of(model))
    assert_bits_equal(trained.model_state, statistics_of(model))


def by_hand(model):
    """Parameters, state and loss function without a module, keys written out."""
    graph, params, streams, state = nnx.split(model, nnx.Param, nnx.RngState, ...)

    def loss(params, state, x, y):
        model = nnx.merge(graph, nnx.State(params), streams, nnx.State(state), copy=True)
        if any(block.drop.rate for block in model.blocks):
            reseeded(model, tr.key())
        loss, aux = loss_fn(model, x, y)
        return loss, (statistics_of(model), aux)

    return nnx.to_pure_dict(params), nnx.to_pure_dict(state), loss


@pytest.mark.parametrize(("microbatches", "replicas"), [(2, 2), (4, 1)])
def test_accumulation_and_replicas_by_the_book(microbatches, replicas):
    trainer = trainer_of(Model(0.0), accumulation=microbatches, replicas=replicas)
    history = trainer.fit(ELEMENTS, steps=2, progress=False)
    params, state, loss = by_hand(Model(0.0))
    optimizer = optax.sgd(0.1, momentum=0.9)
    params, losses, state = plain_accumulated_training(
        loss, optimizer, params, ELEMENTS, microbatches=microbatches, replicas=replicas,
        model_state=state,
    )  # fmt: skip
    assert_close(history.loss, losses.mean((1, 2)))
    assert_close(trainer.params, params)
    assert_close(trainer.model_state, state)


def test_every_microbatch_of_every_replica_draws_its_own():
    trainer = trainer_of(Model(), accumulation=2, replicas=2, seed=3)
    history = trainer.fit(ELEMENTS, steps=2, progress=False)
    params, state, loss = by_hand(Model())
    plain = trainer_of(params, loss, model_state=state, accumulation=2, replicas=2, seed=3)
    assert_bits_equal(history.loss, plain.fit(ELEMENTS, steps=2, progress=False).loss)
    assert_bits_equal(trainer.params, plain.params)


# -- evaluation ---------------------------------------------------------------------------------


def test_the_module_comes_back_and_what_was_given_is_unchanged():
    given = Model()
    before = jax.tree.map(jnp.copy, (params_of(given), statistics_of(given)))
    trainer = trainer_of(given)
    trainer.fit(ELEMENTS, steps=2, progress=False)
    assert_bits_equal((params_of(given), statistics_of(given)), before)
    model = trainer.model
    assert type(model) is Model
    assert type(model.blocks[0].linear) is nnx.Linear
    assert_bits_equal(
        (params_of(model), statistics_of(model)), (trainer.params, trainer.model_state)
    )
    model.head.bias[...] += 1  # a copy: the trainer's is another
    assert_bits_equal(trainer.model.head.bias[...], trainer.params["head"]["bias"])
    assert_bits_equal(
        jax.random.key_data(model.blocks[0].drop.rngs.key[...]),
        jax.random.key_data(given.blocks[0].drop.rngs.key[...]),
    )


def test_evaluation_is_in_evaluation_mode(trained, caplog):
    model = trained.model
    assert not model.blocks[0].drop.deterministic
    model.eval()
    expected = jnp.concatenate([model(x) for x, _ in ELEMENTS])
    found = trained.predict(ELEMENTS, lambda model, x, y: model(x))
    assert_close(found, expected)
    plain = np.mean([float(loss_fn(model, *element)[0]) for element in ELEMENTS])
    for values in (trained.evaluate(ELEMENTS), trained.evaluate(ELEMENTS, loss_fn)):
        assert values["loss"] == pytest.approx(plain, rel=1e-5)
        assert "mae" in values
    assert trained.model.blocks[0].norm.use_running_average is False
    assert not caplog.records  # keys were drawn, and dropout is off


def test_a_part_in_evaluation_mode_stays_so(caplog):
    model = Model()
    model.blocks[0].eval()
    trainer = trainer_of(model)
    trainer.fit(ELEMENTS, steps=1, progress=False)
    first, second = (trainer.model_state["blocks"][n]["norm"]["mean"] for n in range(2))
    assert not np.any(first)
    assert np.any(second)
    assert not caplog.records
    model.eval()
    with caplog.at_level(logging.WARNING):
        trainer_of(model)
    assert "The nnx.Module is in evaluation mode" in caplog.text


# -- names --------------------------------------------------------------------------------------


def test_names_are_those_of_the_model(trained):
    names = trained.records.names
    parts = ["linear/bias", "linear/kernel", "norm/bias", "norm/scale"]
    blocks = [f"grad/blocks/{n}/{part}" for n in range(2) for part in parts]
    assert [n for n in names if n.startswith("grad/")] == [
        *blocks,
        "grad/head/bias",
        "grad/head/kernel",
    ]
    assert "buffer/blocks/1/norm/mean" in names
    scopes = {n.split("[")[0] for n in names if n.startswith("activation/") and ":" not in n}
    inside = [f"activation/blocks/{n}" for n in range(2)]
    assert scopes == {
        "activation/head",
        *inside,
        *(f"{scope}/{part}" for scope in inside for part in ("linear", "norm", "drop")),
    }
    assert "cotangent/head" in trained.tensors().names


def test_an_activation_is_what_the_layer_returns(trained):
    last = {name: trained.records[name].values[5] for name in trained.records.names}
    x = ELEMENTS[5][0]
    layer = x @ last["param/blocks/0/linear/kernel"] + last["param/blocks/0/linear/bias"]
    assert_close(last["activation/blocks/0/linear"], layer)
    kept = last["activation/blocks/0/drop"]
    assert {0.0} < set(kept.ravel().tolist())  # some are dropped


class Wrapped(nnx.Module):
    """Blocks behind transformations of Flax and of JAX."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs))(nnx.Rngs(0).fork(split=4))
        self.remade = nnx.Linear(3, 3, rngs=rngs)
        self.jitted = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        layer = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = layer(x, self.stack)
        x = nnx.remat(lambda layer, x: layer(x))(self.remade, x)
        call = nnx.jit(lambda layer, x: layer(x))
        for one in self.jitted:
            x = call(one, x)
        return x.sum(-1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_behind_transformations():
    trainer = trainer_of(Wrapped())
    names = trainer.tensors((X, Y)).names
    scopes = {n for n in names if n.startswith("activation/") and ":" not in n}
    jitted = {f"activation/jitted/{number}" for number in range(2)}
    assert {"activation/stack", "activation/remade", *jitted} <= scopes
    assert trainer.tensors((X, Y))["activation/stack"].shape == (4, 4, 3)


class Tied(nnx.Module):
    """One layer under two names, called twice."""

    def __init__(self):
        self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.second = self.first
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] += 1
        return self.second(self.first(x)).sum(-1)


def test_a_shared_layer_has_one_gradient_and_is_called_twice():
    trainer = trainer_of(Tied(), observe=["grad/*", "activation/*"])
    trainer.fit(ELEMENTS, steps=3, progress=False)
    grads = [n for n in trainer.records.names if n.startswith("grad/")]
    assert grads == ["grad/first/bias", "grad/first/kernel"]
    assert {"activation/first", "activation/first#1"} <= set(trainer.records.names)
    assert int(trainer.model_state["count"]) == 3
    model = trainer.model
    assert model.first is model.second


class Summed(nnx.Module):
    """A model that maps over its parts, and over another model."""

    def __init__(self):
        self.parts = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(n)) for n in range(2)])

    def __call__(self, x):
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *self.parts)
        return mean(x).sum(-1)


class Opaque(nnx.Module, pytree=False):
    """A module that is no tree to JAX, and may hold a list."""

    def __init__(self):
        self.layers = [nnx.Linear(3, 3, rngs=nnx.Rngs(0))]

    def __call__(self, x):
        return self.layers[0](x).sum(-1)


def test_a_module_that_is_no_tree():
    assert "activation/layers/0" in trainer_of(Opaque()).tensors((X, Y)).names


def test_parts_that_are_mapped_over_keep_their_classes():
    other = nnx.Linear(3, 3, rngs=nnx.Rngs(2))

    def loss(model, x, y):
        away = jax.tree.map(lambda a, b: jnp.square(a - b).sum(), model.parts[0], other)
        return loss_fn(model, x, y)[0] + sum(jax.tree.leaves(away))

    trainer = trainer_of(Summed(), loss)
    trainer.fit(ELEMENTS, steps=1, progress=False)
    assert_close(trainer.history.loss[0], loss(Summed(), X, Y))


def test_classes_are_left_alone():
    before = {kind: vars(kind)["__call__"] for kind in (nnx.Linear, nnx.BatchNorm, Block)}
    trainer_of(Model()).tensors((X, Y))
    assert {kind: vars(kind)["__call__"] for kind in before} == before


# -- states of variables ------------------------------------------------------------------------


def test_states_that_were_split_by_hand():
    graph, params, streams, rest = nnx.split(Model(0.0), nnx.Param, nnx.RngState, ...)

    def loss(params, rest, x, y):
        model = nnx.merge(graph, params, streams, rest, copy=True)
        loss, aux = loss_fn(model, x, y)
        return loss, (nnx.state(model, nnx.BatchStat), aux)

    taps = ["grad/*", "buffer/*"]
    trainer = trainer_of(params, loss, model_state=rest, observe=taps)
    history = trainer.fit(ELEMENTS, steps=3, progress=False)
    whole = trainer_of(Model(0.0))
    assert_close(history.loss, whole.fit(ELEMENTS, steps=3, progress=False).loss)
    assert isinstance(trainer.params, nnx.State)
    assert isinstance(trainer.model_state, nnx.State)
    model = nnx.merge(graph, trainer.params, streams, trainer.model_state)
    # Two programs: XLA may fuse them differently, which shows in a last bit.
    assert_close((params_of(model), statistics_of(model)), (whole.params, whole.model_state))
    wanted = {"grad/blocks/0/linear/kernel", "buffer/blocks/1/norm/var"}
    assert wanted <= set(trainer.records.names)


# -- what is refused ----------------------------------------------------------------------------


def test_state_is_in_the_module():
    with pytest.raises(OptionError, match="An nnx.Module holds its state itself"):
        trainer_of(Model(), model_state={"a": jnp.ones(1)})


class Growing(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.extra = nnx.BatchStat(x.mean())
        return self.linear(x)[:, 0]


def test_variables_are_made_at_the_beginning():
    with pytest.raises(ProgramError, match=r"new \['extra'\], missing \[\]. Create variables in"):
        trainer_of(Growing()).tensors((X, Y))


class Clipping(nnx.Module):
    """A layer that writes into its own parameter."""

    def __init__(self):
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        self.linear.kernel[...] = jnp.clip(self.linear.kernel[...], -0.1, 0.1)
        return self.linear(x)[:, 0]


def test_assigning_to_parameters_is_noted(caplog):
    with caplog.at_level(logging.WARNING):
        trainer_of(Model()).tensors((X, Y))
        assert not caplog.records
        trainer_of(Clipping()).tensors((X, Y))
    assert "The module assigned to ['linear/kernel']" in caplog.text


def test_without_a_module_there_is_no_model():
    trainer = tr.Trainer(
        lambda w, x, y: ((x @ w - y) ** 2).mean(), optax.sgd(0.1), np.zeros(3, "f4")
    )
    with pytest.raises(ProgramError, match="trainer.model is the module that was given"):
        _ = trainer.model


# -- around the steps ---------------------------------------------------------------------------


def test_validation_and_checkpoints(tmp_path):
    def error_of(model, x, y):
        return {"error": jnp.abs(model(x) - y).max()}

    trainer = trainer_of(Model(), eval_fn=error_of)
    data, held_out = ELEMENTS[:4], ELEMENTS[4:]
    history = trainer.fit(data, epochs=2, progress=False, validation_data=held_out)
    found = trainer.evaluate(held_out)
    assert history["val_error"][-1] == pytest.approx(found["error"])
    trainer.save(tmp_path / "saved")
    again = trainer_of(Model(seed=1))
    again.restore(tmp_path / "saved")
    assert_bits_equal((again.params, again.model_state), (trainer.params, trainer.model_state))
    assert again.step == 8
