"""Every option of `tr.Trainer` beside a mesh: it works, or is refused with what to write."""

import inspect

import jax
import numpy as np
import optax
import pytest
from sharded_models import mesh_of

import tailrace as tr
from oracles import assert_close

X = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(16, 512)).astype(np.float32)


def loss_fn(params, x):
    return ((x @ params["w"]) ** 2).mean(), {"largest": x.max()}


def with_state(params, state, x):
    loss, aux = loss_fn(params, x)
    return loss, ({"mean": state["mean"] + x.mean(0)}, aux)


WORKS = {
    "steps_per_execution": {"steps_per_execution": 2},
    "accumulation": {"accumulation": tr.Accumulation(2, weight=lambda x: x.shape[0] * 1.0)},
    "replicas": {"replicas": 1},
    "offload_optimizer_state": {"offload_optimizer_state": False},
    "shard_optimizer_state": {"shard_optimizer_state": False},
    "offload_activations": {"offload_activations": False},
    "model_state": {"model_state": {"mean": np.zeros(16, np.float32)}},
    "replica_state": {"replica_state": "mean"},
    "seed": {"seed": 3},
    "observe": {"observe": ["reduced/*", "activation/*"]},
    "observe_bytes": {"observe": ["reduced/*"], "observe_bytes": 1 << 20},
    "loss_scale": {"loss_scale": 8.0},
    "precision": {"precision": "bfloat16"},
    "fingerprint": {"fingerprint": True},
    "sentinel": {"sentinel": 0.5},
    "on_nonfinite": {"on_nonfinite": "skip"},
    "run_dir": {"run_dir": "run"},
    "eval_fn": {"eval_fn": lambda params, x: {"mean": (x @ params["w"]).mean()}},
    "log": {"log": ["grad_norm", "examples_per_second"]},
    "config": {"config": {"name": "sharded"}},
    "rewrites": {"rewrites": {"boundaries": False}},
    "compiler_options": {"compiler_options": {"xla_cpu_enable_fast_math": False}},
    "ema": {"ema": 0.9},
    "mesh": {},
    "shard": {"shard": "fsdp"},
    "batch_axes": {"batch_axes": ()},
}
"""An option with a value that works."""

REFUSED = {
    "replicas": ({"replicas": 2}, "multiply the batch size"),
    "all replicas": ({"replicas": None}, "multiply the batch size"),
    "replica_state": ({"replica_state": "each"}, "one model state"),
    "shard_optimizer_state": ({"shard_optimizer_state": True}, "shard='fsdp'"),
    "offload_optimizer_state": ({"offload_optimizer_state": True}, "shard='fsdp'"),
    "offload_activations": ({"offload_activations": True}, "jax.checkpoint"),
    "device": ({"device": "first"}, "one of them out"),
}
"""An option with a value that does not, and what the message says."""

ARGUMENTS = {"self", "loss_fn", "optimizer", "params"}


def trainer(mesh, **options):
    loss = with_state if "model_state" in options else loss_fn
    return tr.Trainer(loss, optax.sgd(0.1), {"w": W}, mesh=mesh, **options)


def test_the_table_has_every_option():
    options = set(inspect.signature(tr.Trainer.__init__).parameters) - ARGUMENTS
    assert options == {*WORKS, "device"}


@pytest.mark.parametrize("name", WORKS)
def test_every_option_works_with_a_mesh_or_is_refused(name, tmp_path):
    options = dict(WORKS[name])
    found = []
    for mesh in (mesh_of((4, 2), ("fsdp", "model")), None):
        own = {
            k: v for k, v in options.items() if mesh is not None or k not in ("shard", "batch_axes")
        }
        if "run_dir" in own:
            own["run_dir"] = tmp_path / str(mesh is None)
        one = trainer(mesh, **own)
        one.fit(tr.batches(X, 16), steps=2, progress=False)
        value = one.evaluate(tr.batches(X, 16))
        found.append((one.history.loss, one.gather(), value))
    losses, params, values = zip(*found, strict=True)
    tolerances = (3e-2, 3e-3) if name == "precision" else None
    if tolerances:
        np.testing.assert_allclose(*losses, *tolerances)
        return
    assert_close(losses[0], losses[1])
    assert_close(params[0], params[1])
    assert_close(*(jax.tree.map(np.float32, value) for value in values))


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_a_mesh_excludes_are_refused(name):
    options, match = REFUSED[name]
    if "device" in options:
        options = {"device": jax.devices()[0]}
    with pytest.raises(tr.errors.OptionError, match=match):
        trainer(mesh_of((8,), ("data",)), **options)


@pytest.mark.parametrize("option", ["mesh", "shard", "batch_axes", "device"])
def test_pipelines_have_devices_of_their_own(option):
    def stage(params, x):
        return x @ params["w"]

    pipeline = tr.Pipeline([stage, lambda params, h: (h**2).mean()], accumulation=4)
    values = {"mesh": mesh_of((8,), ("data",)), "shard": "fsdp", "batch_axes": ()}
    given = {option: values.get(option, jax.devices()[0])}
    with pytest.raises(tr.errors.OptionError, match="tr.Pipeline"):
        tr.Trainer(pipeline, optax.sgd(0.1), [{"w": W}, {}], **given)
