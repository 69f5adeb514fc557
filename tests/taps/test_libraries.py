"""Names in models of the libraries people use: paths of parameters, scopes of activations."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_close

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3)).astype(np.float32)
Y = RNG.normal(size=(4, 2)).astype(np.float32)


def observed(loss, params, select="*"):
    """One step; the trainer afterwards."""
    trainer = tr.Trainer(loss, optax.sgd(0.1), params, observe=[tr.Tap(select, reduce="tensor")])
    trainer.fit([(X, Y)], steps=1)
    return trainer


def assert_gradients(trainer, loss, params):
    """Every gradient is recorded under the path of its parameter."""
    grads = jax.grad(lambda p: loss(p, X, Y))(params)
    found = jax.tree_util.tree_flatten_with_path(grads)[0]
    recorded = [name for name in trainer.records.names if name.startswith("grad/")]
    assert len(found) == len(recorded)
    for name, (_, grad) in zip(recorded, found, strict=True):
        assert_close(trainer.records[name].values[0], np.asarray(grad))
    return recorded


def test_hand_written_jax():
    params = {"dense": {"w": RNG.normal(size=(3, 2)).astype("f4"), "b": np.zeros(2, "f4")}}

    def loss(params, x, y):
        with jax.named_scope("dense"):
            z = x @ params["dense"]["w"] + params["dense"]["b"]
        return ((z - y) ** 2).mean()

    trainer = observed(loss, params)
    assert assert_gradients(trainer, loss, params) == ["grad/dense/b", "grad/dense/w"]
    assert_close(trainer.records["activation/dense"].values[0], X @ params["dense"]["w"])


def test_flax_linen():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.relu(nn.Dense(5, name="up")(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            shared = Block(name="shared")
            h = shared(x)
            h = shared(nn.Dense(3, name="back")(h))
            return nn.Dense(2)(h)

    model = Model()
    variables = model.init(jax.random.key(0), X)
    params = variables["params"]

    def loss(params, x, y):
        return ((model.apply({"params": params}, x) - y) ** 2).mean()

    trainer = observed(loss, params)
    names = assert_gradients(trainer, loss, params)
    assert "grad/shared/up/kernel" in names
    _, state = model.apply(variables, X, capture_intermediates=True)
    inside = state["intermediates"]
    records = trainer.records
    scopes = [n for n in records.names if n.startswith("activation/") and ":" not in n]
    for suffix, value in {
        "Dense_0": inside["Dense_0"]["__call__"][0],
        "back": inside["back"]["__call__"][0],
        "shared/up": inside["shared"]["up"]["__call__"][0],
        "shared": inside["shared"]["__call__"][0],
        "shared#1": inside["shared"]["__call__"][1],
    }.items():
        (name,) = [n for n in scopes if n.endswith(f"/{suffix}") or n == f"activation/{suffix}"]
        assert_close(records[name].values[0], np.asarray(value))
        assert name.replace("activation/", "cotangent/") in records.names
    assert trainer.tensors((X, Y))[name].source.split(":")[0].endswith("test_libraries.py")


def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(3, 5, rngs=rngs)
            self.down = nnx.Linear(5, 2, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, params = nnx.split(Model(nnx.Rngs(0)))
        params = nnx.to_pure_dict(params)

    def loss(params, x, y):
        return ((nnx.merge(graph, nnx.State(params))(x) - y) ** 2).mean()

    trainer = observed(loss, params)
    names = assert_gradients(trainer, loss, params)
    assert names == [
        "grad/down/bias",
        "grad/down/kernel",
        "grad/up/bias",
        "grad/up/kernel",
    ]
    matmuls = [n for n in trainer.records.names if n.startswith("activation/") and "dot" in n]
    assert len(matmuls) == 2
    shapes = {trainer.records[name].values[0].shape for name in matmuls}
    assert shapes == {(4, 5), (4, 2)}


def test_nnx_state_is_a_tree_of_parameters_itself():
    nnx = pytest.importorskip("flax.nnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, params = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))

        def loss(params, x, y):
            return ((nnx.merge(graph, params)(x) - y) ** 2).mean()

        trainer = observed(loss, params)
    names = [name for name in trainer.records.names if name.startswith("grad/")]
    assert names == ["grad/bias", "grad/kernel"]


def test_gradients_of_an_equinox_module_are_named():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 2, width_size=5, depth=1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x, y):
        return ((jax.vmap(eqx.combine(params, static))(x) - y) ** 2).mean()

    trainer = observed(loss, params)
    names = assert_gradients(trainer, loss, params)
    assert "grad/layers/0/weight" in names
    h = jnp.maximum(X @ model.layers[0].weight.T + model.layers[0].bias, 0)
    z = h @ model.layers[1].weight.T + model.layers[1].bias
    wanted = {np.asarray(v).shape: np.asarray(v) for v in (h, z)}
    found = {
        record.values[0].shape: record.values[0]
        for name in trainer.records.names
        if name.startswith("activation/")
        for record in [trainer.records[name]]
        if record.values[0].shape in wanted
        and np.allclose(record.values[0], wanted[record.values[0].shape], 1e-5, 1e-6)
    }
    assert set(found) == set(wanted)  # both layers' results are there, numbered by operation
