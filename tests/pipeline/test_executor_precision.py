"""Pipelines with a scaled loss, and in 16 bits: equal to the plain accumulated step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelined import SCHEDULES, assert_same_training, check_pipeline, dense_stages, elements

import tailrace as tr
from oracles import assert_bits_equal, assert_close
from tailrace.pipeline.lowering import buffers
from tailrace.pipeline.running import stage_buffers
from tailrace.program.memory import host_memory, optimizer_state

SCALE = tr.LossScale(2.0**90, growth=2.0, backoff=0.5, interval=2)

STAGES, PARAMS, LOSS = dense_stages([6, 5, 4, 3])

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))


@pytest.fixture(autouse=True)
def _optax_mixes_dtypes():
    with jax.numpy_dtype_promotion("standard"):
        yield


def spiked(count, *at, by=1e14):
    """Elements of which some have labels of 1e14: times 2**90, their gradients are infinite."""
    found = elements(count, 6)
    for number in at:
        x, y = found[number]
        found[number] = (x, y + np.float32(by))
    return found


@pytest.mark.parametrize(
    ("schedule", "precision", "replicas"),
    [
        ("grouped", None, 1),
        ("interleaved", "bfloat16", 1),
        ("sequential", "float16", 1),
        ("grouped", "bfloat16", 2),
    ],
)
def test_equal_to_the_plain_step(schedule, precision, replicas):
    assert schedule in SCHEDULES
    # float16 holds neither such a scale nor such a label.
    scale, by = (tr.LossScale(interval=2), 200) if precision == "float16" else (SCALE, 1e14)
    found, expected = check_pipeline(
        STAGES, LOSS, PARAMS, spiked(36 * replicas, 8, by=by), count=6, schedule=schedule,
        optimizer=OPTIMIZER,
        trainer={"loss_scale": scale, "precision": precision, "replicas": replicas},
    )  # fmt: skip
    assert_bits_equal(found.state.loss_scale, expected.state.loss_scale)
    scales = found.history["loss_scale"]
    assert {-1, 1} <= set(np.sign(np.diff(scales)))


def stage_with_state(params, state, h, y):
    h = jnp.tanh(h @ params["kernel"] + params["bias"])
    return (h, y), {"mean": 0.9 * state["mean"] + 0.1 * h.mean().astype(state["mean"].dtype)}


def test_a_skipped_step_changes_nothing_on_any_stage():
    state = [{"mean": np.float32(0)} for _ in PARAMS]
    trainer = tr.Trainer(
        tr.Pipeline([stage_with_state] * 3, LOSS, accumulation=6),
        OPTIMIZER, PARAMS, model_state=state, loss_scale=SCALE, precision="bfloat16",
        observe=[tr.Tap(["update/*", "skipped", "grad/*"], reduce="tensor")],
    )  # fmt: skip
    trainer.fit(elements(12, 6), steps=2)
    assert trainer.records["grad/0/kernel"].values.dtype == np.float32
    before = trainer.state
    trainer.fit(spiked(6, 4), steps=1)
    after = trainer.state
    assert_bits_equal(after[:3], before[:3])
    assert (trainer.step, trainer.loss_scale) == (3, 2.0**90)
    assert trainer.records["skipped"].values.tolist() == [1.0]
    assert not any(trainer.records[f"update/{n}/kernel"].values.any() for n in range(3))
    trainer.fit(elements(6, 6), steps=1)
    assert trainer.model_state[2]["mean"] != before.model_state[2]["mean"]


def test_gradients_are_seen_without_the_scale():
    def train(**kwargs):
        pipeline = tr.Pipeline(STAGES, LOSS, accumulation=6)
        trainer = tr.Trainer(
            pipeline, optax.sgd(0.05), PARAMS, **kwargs,
            observe=[tr.Tap(["grad/*", "accumulated/*"], reduce="tensor")],
        )  # fmt: skip
        trainer.fit(elements(12, 6), steps=2)
        return trainer

    plain, scaled = train(), train(loss_scale=2.0**20)
    assert_bits_equal(scaled.history.loss, plain.history.loss)
    for name, _ in plain.records:
        assert_close(scaled.records[name].values, plain.records[name].values)


@pytest.mark.parametrize("option", ["shard_optimizer_state", "offload_optimizer_state"])
def test_the_optimizers_state_elsewhere(option, monkeypatch):
    monkeypatch.setattr(optimizer_state, "LEAST", 2)
    monkeypatch.setattr(host_memory, "LEAST_BYTES", 8)
    monkeypatch.setattr(host_memory, "obstacle", lambda device, guarded: None)
    monkeypatch.setattr(host_memory, "memory_moves", lambda: host_memory.NO_MOVES)
    monkeypatch.setattr(buffers, "to_host", lambda value: value)
    monkeypatch.setattr(buffers, "to_device", lambda value: value)
    monkeypatch.setattr(stage_buffers, "HOST_MEMORY", "device")

    def train(**kwargs):
        trainer = tr.Trainer(
            tr.Pipeline(STAGES, LOSS, accumulation=6), optax.adam(0.01), PARAMS, replicas=2,
            loss_scale=SCALE, **kwargs,
        )  # fmt: skip
        trainer.fit(spiked(36, 8, 31), steps=3)
        return trainer

    shared = train(**{option: True})
    assert_same_training(shared, train())
    assert int(shared.state.optimizer_state[0].count) == 1
