"""Pipelines with shared optimizer state, and pipelines in several processes."""

import itertools
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_close, regression
from tailrace.pipeline.lowering import buffers
from tailrace.pipeline.running import stage_buffers
from tailrace.program.memory import activation_offload, host_memory, optimizer_state
from tailrace.program.running.loop_state import Buffer

OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "lamb": optax.lamb(1e-2),
    "clip, then adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
}


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        yield


def parts():
    """Three stages of unequal widths, their parameters, and the loss."""
    rng = np.random.default_rng(0)
    widths = [(3, 6), (6, 5), (5, 1)]
    params = [{"w": rng.normal(size=shape).astype(np.float32)} for shape in widths]

    def stage(p, h, y):
        return jax.numpy.tanh(h @ p["w"]), y

    def loss(h, y):
        return ((h[:, 0] - y) ** 2).mean()

    def plain(params, x, y):
        for p in params:
            x, y = stage(p, x, y)
        return loss(x, y)

    return [stage] * 3, params, loss, plain


@pytest.mark.parametrize(
    "name",
    ["clip, then adam", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("adam", "lamb"))],
)
def test_a_pipeline_with_shared_state_equals_the_plain_step(name, monkeypatch):
    monkeypatch.setattr(optimizer_state, "LEAST", 2)
    stages, params, loss, plain = parts()
    pipelined = tr.Trainer(
        tr.Pipeline(stages, loss, accumulation=6), OPTIMIZERS[name], params, replicas=2,
        shard_optimizer_state=True, observe=[tr.Tap("optimizer/*", reduce="tensor")],
    )  # fmt: skip
    pipelined.fit(regression(36), steps=3)
    expected = tr.Trainer(
        plain, OPTIMIZERS[name], params, replicas=2, accumulation=6,
        observe=[tr.Tap("optimizer/*", reduce="tensor")],
    )  # fmt: skip
    expected.fit(regression(36), steps=3)
    assert_close(pipelined.params, expected.params)
    assert_close(pipelined.state.optimizer_state, expected.state.optimizer_state)
    assert_close(pipelined.history.loss, expected.history.loss)
    assert sorted(pipelined.records.names) == sorted(expected.records.names)
    for record in expected.records.names:
        assert_close(pipelined.records[record].values, expected.records[record].values)
    pipelined.fit(regression(36, batch=2), steps=3)  # another program, from where it was
    expected.fit(regression(36, batch=2), steps=3)
    assert_close(pipelined.state.optimizer_state, expected.state.optimizer_state)


def test_each_replica_of_a_stage_holds_one_share(monkeypatch):
    monkeypatch.setattr(optimizer_state, "LEAST", 2)
    stages, params, loss, _ = parts()
    trainer = tr.Trainer(
        tr.Pipeline(stages, loss, accumulation=6), OPTIMIZERS["adam"], params, replicas=2,
        shard_optimizer_state=True,
    )  # fmt: skip
    trainer.fit(regression(12), steps=1)
    values = trainer.engine.loop_state.values.items()
    held = [v.shape for k, v in values if isinstance(k, Buffer) and k.kind == "held"]
    # Of the largest stage: 30 parameters for all; half of two moments of each for each replica.
    assert sorted(held) == [(2, 3, 30), (3, 30)]


# -- every option with every other --------------------------------------------------------------

STATE, SHARES, ACTIVATIONS = (
    "offload_optimizer_state",
    "shard_optimizer_state",
    "offload_activations",
)
USUAL = {(STATE,), (STATE, SHARES, ACTIVATIONS)}


@pytest.fixture
def as_if_moved(monkeypatch):
    """The program of an accelerator, in which moving changes nothing."""
    monkeypatch.setattr(optimizer_state, "LEAST", 2)
    monkeypatch.setattr(host_memory, "LEAST_BYTES", 8)
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 8)
    monkeypatch.setattr(host_memory, "obstacle", lambda device, guarded: None)
    monkeypatch.setattr(host_memory, "memory_moves", lambda: host_memory.NO_MOVES)
    monkeypatch.setattr(buffers, "to_host", lambda value: value)
    monkeypatch.setattr(buffers, "to_device", lambda value: value)
    monkeypatch.setattr(stage_buffers, "HOST_MEMORY", "device")


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(chosen, marks=() if chosen in USUAL else pytest.mark.exhaustive)
        for count in (1, 2, 3)
        for chosen in itertools.combinations((STATE, SHARES, ACTIVATIONS), count)
    ],
    ids="+".join,
)
def test_every_option_with_every_other_in_a_pipeline(as_if_moved, chosen):
    stages, params, loss, plain = parts()
    optimizer, replicas = OPTIMIZERS["clip, then adam"], 2 if SHARES in chosen else 1
    pipelined = tr.Trainer(
        tr.Pipeline(stages, loss, accumulation=6), optimizer, params, replicas=replicas,
        **dict.fromkeys(chosen, True),
    )  # fmt: skip
    pipelined.fit(regression(36), steps=3)
    expected = tr.Trainer(plain, optimizer, params, replicas=replicas, accumulation=6)
    expected.fit(regression(36), steps=3)
    assert_close(pipelined.history.loss, expected.history.loss)
    assert_close(pipelined.params, expected.params)
    assert_close(pipelined.state.optimizer_state, expected.state.optimizer_state)
    messages = " ".join(pipelined.decisions)
    assert ("between updates" in messages) == (STATE in chosen)
    assert ("sharded over 2 replicas" in messages) == (SHARES in chosen)
    assert ("what forwards keep for backwards" in messages) == (ACTIVATIONS in chosen)
    assembly = pipelined.engine.runner.assembly
    assert any(assembly.held_layout.hosted) == (STATE in chosen)
    assert any(assembly.stash_layout.hosted) == (ACTIVATIONS in chosen)


def test_the_state_of_a_pipeline_is_updated_in_place(as_if_moved):
    """A copy of what is in host memory would take longer than moving it."""
    rng = np.random.default_rng(0)
    width = 72  # large enough for a buffer of its own, and found by its shape
    params = [rng.normal(size=(width, width)).astype(np.float32) / 9 for _ in range(2)]
    stages = [lambda p, h, y: (jax.numpy.tanh(h @ p), y)] * 2
    loss = lambda h, y: ((h.mean(1) - y) ** 2).mean()  # noqa: E731
    for mapping in ([0, 0], [0, 1]):
        pipeline = tr.Pipeline(stages, loss, accumulation=4, device_mapping=mapping)
        trainer = tr.Trainer(
            pipeline, optax.adam(0.1), params, offload_optimizer_state=True, steps_per_execution=1
        )
        trainer.fit(regression(4, features=width), steps=1)
        one = trainer.engine.runner
        (executable,) = [e for e in one.executables.values() if e.compiled is not None]
        copies = re.findall(
            rf"f32\[(?:1,)?{width},{width}\]\S* copy\(", executable.compiled.as_text()
        )
        assert len(copies) <= 2  # of accumulators; there are six leaves of that shape


def test_a_cpu_has_no_memory_to_keep_a_pipelines_state_in():
    stages, params, loss, _ = parts()
    pipeline = tr.Pipeline(stages, loss, accumulation=6)
    trainer = tr.Trainer(pipeline, optax.adam(0.1), params, offload_optimizer_state=True)
    assert "Optimizer state stays on the device: the device is a CPU" in trainer.decisions[0]
    trainer = tr.Trainer(pipeline, optax.sgd(0.1), params, offload_activations=True)
    assert "Activations stay on the device: the device is a CPU" in trainer.decisions[0]


@pytest.mark.parametrize(
    ("devices", "replicas", "share"), [(1, 1, False), (2, 2, True)], ids=["stages", "replicas"]
)
def test_pipelines_in_two_processes(devices, replicas, share):
    from launched import arrays, leaves, together

    script = Path(__file__).with_name("pipeline_together.py")
    code, said, text = together(script, 2, devices, replicas=replicas, shard_optimizer_state=share)
    assert code == 0, text
    assert len(said) == 2
    import pipeline_together

    stages, params, loss = pipeline_together.stages()
    trainer = tr.Trainer(
        tr.Pipeline(stages, loss, accumulation=4), optax.sgd(0.1, momentum=0.9), params,
        replicas=replicas,
    )  # fmt: skip
    trainer.fit(regression(32), steps=3)
    for one in said:
        assert_close(np.float32(one["each"]), trainer.history.each("loss"))
        assert_close(arrays(one["params"]), leaves(trainer.params))
        evaluated = trainer.evaluate(regression(32))
        assert_close(np.float32(one["evaluated"]["loss"]), np.float32(evaluated["loss"]))
