"""Pipelines of modules: a module for each stage, or one that is cut."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tailrace as tr
from oracles import assert_bits_equal, assert_close, regression
from tailrace.errors import PipelineError

ELEMENTS = regression(8)
X, Y = ELEMENTS[0]


class Trunk(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(jnp.tanh(self.norm(self.linear(x))))


class Head(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.linear(x)[:, 0]


def trunk(module, x, y):
    return module(x), y


def head(module, x, y):
    return ((module(x) - y) ** 2).mean()


def pipeline_of(stages, device_mapping=None, **options):
    mapping = device_mapping or [0] * len(stages)
    return tr.Pipeline(stages, accumulation=4, device_mapping=mapping, **options)


@pytest.fixture(scope="module")
def staged():
    pipeline = pipeline_of([trunk, head], device_mapping=[0, 1])
    trainer = tr.Trainer(pipeline, optax.sgd(0.1), [Trunk(0), Head()], observe=["grad/*"])
    trainer.fit(ELEMENTS, steps=2, progress=False)
    return trainer


def test_a_module_for_each_stage(staged):
    def whole(modules, x, y):
        return head(modules[1], *trunk(modules[0], x, y))

    plain = tr.Trainer(whole, optax.sgd(0.1), [Trunk(0), Head()], accumulation=4)
    losses = plain.fit(ELEMENTS, steps=2, progress=False).loss
    assert_close(staged.history.loss, losses)
    assert_close(staged.params, [plain.params[n] for n in range(2)])
    assert_close(staged.model_state[0], plain.model_state[0])


def test_names_have_the_stage_in_front(staged):
    names = staged.tensors().names
    wanted = {"grad/0/linear/kernel", "activation/stage0/norm", "activation/stage1/linear"}
    assert wanted <= {name.split("[")[0] for name in names}
    assert staged.tensors()["activation/stage1/linear"].stage == 1


def test_evaluation_of_stages(staged):
    models = staged.model
    assert [type(model) for model in models] == [Trunk, Head]
    models[0].eval()
    expected = float(head(models[1], models[0](X), Y))
    assert staged.evaluate([(X, Y)])["loss"] == pytest.approx(expected, rel=1e-5)
    found = staged.predict([X], lambda modules, x: modules[1](modules[0](x)))
    assert_close(found, models[1](models[0](X)))


def test_verified_with_dropout_and_state():
    pipeline = pipeline_of([trunk, head])
    assert tr.verify(pipeline, [Trunk(0), Head()], (X, Y)).within(1e-6)


def test_stages_of_equinox_and_of_linen_and_plain_ones():
    layer = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    dense = nn.Dense(3)
    variables = dense.init(jax.random.key(1), X)
    weights = np.ones(3, np.float32)
    stages = [
        lambda layer, x, y: (jax.vmap(layer)(x), y),
        lambda variables, x, y: (jnp.tanh(dense.apply(variables, x)), y),
        lambda weights, x, y: ((x @ weights - y) ** 2).mean(),
    ]
    pipeline = pipeline_of(stages, schedule="sequential")
    trainer = tr.Trainer(pipeline, optax.sgd(0.1), [layer, variables, weights])
    history = trainer.fit(ELEMENTS, steps=1, progress=False)

    def loss(x, y):
        h = jnp.tanh(dense.apply(variables, jax.vmap(layer)(x)))
        return ((h @ weights - y) ** 2).mean()

    assert_close(history.loss[0], np.mean([loss(*element) for element in ELEMENTS[:4]]))
    assert set(trainer.model[1]) == {"params"}
    assert {"grad/0/weight", "grad/1/kernel", "grad/2"} <= set(trainer.tensors().names)


class Cut(nnx.Module):
    def __init__(self):
        self.trunk, self.head = Trunk(0), Head()

    def __call__(self, x, y):
        x, y = tr.stage_boundary((self.trunk(x), y))
        return ((self.head(x) - y) ** 2).mean()


def test_one_module_that_is_cut():
    def loss(model, x, y):
        return model(x, y)

    pipeline = pipeline_of(loss, device_mapping=[0, 0])
    trainer = tr.Trainer(pipeline, optax.sgd(0.1), Cut())
    found = trainer.fit(ELEMENTS, steps=2, progress=False).loss
    plain = tr.Trainer(loss, optax.sgd(0.1), Cut(), accumulation=4)
    assert_close(found, plain.fit(ELEMENTS, steps=2, progress=False).loss)
    assert_close(trainer.params, plain.params)
    assert "grad/trunk/linear/kernel" in trainer.tensors().names
    assert_bits_equal(trainer.model.head.linear.bias[...], trainer.params["head"]["linear"]["bias"])


@pytest.mark.parametrize(
    ("modules", "text"),
    [([Trunk(0), Head()], "Received: a list of 2"), (Cut(), "Received: a Cut.")],
)
def test_there_is_a_module_for_each_stage(modules, text):
    pipeline = pipeline_of([trunk, trunk, head], schedule="sequential")
    with pytest.raises(PipelineError, match=rf"The stages: \(1, 1, 1\). {text}"):
        tr.Trainer(pipeline, optax.sgd(0.1), modules)
