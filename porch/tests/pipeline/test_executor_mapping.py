"""Where stages live: concurrent ones, several on a device, any order, and inference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelined import SCHEDULES, check_pipeline, composed, dense_stages, elements, trained

import tailrace as tr
from oracles import assert_bits_equal, assert_close

RNG = np.random.default_rng(5)


def normal(*shape):
    return (RNG.normal(size=shape) * 0.5).astype(np.float32)


def towers():
    """[s0, [s1a, s1b], s2] with members of unlike shapes and parameters."""

    def first(p, x, y):
        return jnp.tanh(x @ p), y

    def left(p, h, y):
        return jnp.tanh(h @ p["kernel"] + p["bias"]), y

    def right(p, h, y):
        return jnp.sin(h).sum(-1, keepdims=True) * p

    def last(p, left, y, right):
        return ((left @ p + right[:, 0] - y) ** 2).mean()

    params = [
        normal(3, 4),
        [{"kernel": normal(4, 5), "bias": normal(5)}, normal(1)],
        normal(5),
    ]
    return [first, [left, right], last], params


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_concurrent_stages(schedule):
    stages, params = towers()
    found, _ = check_pipeline(stages, None, params, elements(12, 3), count=6, schedule=schedule)
    assert found.engine.placement.stages == 4


def test_concurrent_stages_first_on_replicas_recomputed():
    def left(p, x, y):
        return jnp.tanh(x @ p), y

    def right(p, x, y):
        return jnp.sin(x @ p)

    def last(p, left, y, right):
        return (((left * right) @ p - y) ** 2).mean()

    check_pipeline(
        [[left, right], last],
        None,
        [[normal(3, 4), normal(3, 4)], normal(4)],
        elements(16, 3),
        trainer={"replicas": 2},
        recompute=True,
    )


def test_concurrent_stages_on_one_device():
    stages, params = towers()
    found, _ = check_pipeline(
        stages, None, params, elements(12, 3), count=6, device_mapping=[0, [1, 1], 0]
    )
    assert found.engine.placement.stages == 2


def test_concurrent_stages_in_a_row_compute_the_same():
    stages, params = towers()
    first, (left, right), last = stages

    def left_in_a_row(p, h, y):
        return (h, *left(p, h, y))

    def right_in_a_row(p, h, made, y):
        return made, y, right(p, h, y)

    row = [first, left_in_a_row, right_in_a_row, last]
    data = elements(24, 3)
    concurrent = trained(tr.Pipeline(stages, accumulation=24), optax.sgd(0.05), params, data, 1)
    serial = trained(
        tr.Pipeline(row, accumulation=24),
        optax.sgd(0.05),
        [params[0], *params[1], params[2]],
        data,
        1,
    )
    assert_close(serial.params, [concurrent.params[0], *concurrent.params[1], concurrent.params[2]])


@pytest.mark.parametrize(
    ("mapping", "devices"),
    [([2, 0, 1], 3), ([0, 1, 0], 2), ([1, 1, 0], 2), ([0, 0, 0], 1), ([5, 3, 7], 3)],
)
def test_any_mapping_computes_the_same(mapping, devices):
    stages, params, loss = dense_stages([3, 5, 4, 2])
    data = elements(12, 3)
    found, _ = check_pipeline(stages, loss, params, data, count=6, device_mapping=mapping)
    assert found.engine.placement.stages == devices


def test_replicas_of_a_reordered_pipeline():
    stages, params, loss = dense_stages([3, 5, 4])
    check_pipeline(
        stages,
        loss,
        params,
        elements(16, 3),
        device_mapping=[1, 0],
        trainer={"replicas": 2},
    )


@pytest.mark.cpu
def test_replicas_fill_the_devices_there_are():
    stages, params, loss = dense_stages([3, 5, 4])
    trainer = tr.Trainer(
        tr.Pipeline(stages, loss, accumulation=4), optax.sgd(0.1), params, replicas=None
    )
    assert trainer.replicas == 4
    assert dict(trainer.engine.placement.mesh.shape) == {"replica": 4, "stage": 2}


def test_each_stage_holds_its_own_parameters_only():
    stages, params, loss = dense_stages([3, 40, 40, 2])
    pipeline = tr.Pipeline(stages, loss, accumulation=6)
    trainer = trained(pipeline, optax.sgd(0.01, momentum=0.9), params, elements(6, 3), 1)
    assembly = trainer.engine.runner.assembly
    sizes = [assembly.held_layout.used(device) for device in range(3)]
    own = [2 * sum(leaf.nbytes for leaf in p.values()) for p in params]
    assert sizes == own  # parameters and momentum; nothing of another stage


def test_evaluate_and_predict_use_what_was_trained():
    stages, params, loss = dense_stages([3, 5, 4])
    data = elements(8, 3)
    found, expected = check_pipeline(stages, loss, params, data)
    plain = composed(stages, loss)
    # Python's floats, of losses in float32 that each program adds up in its own order.
    in_float32 = functools.partial(jax.tree.map, np.float32)
    wanted = in_float32(expected.evaluate(data))
    assert_close(in_float32(found.evaluate(data)), wanted)
    assert_close(in_float32(found.evaluate(data, plain)), wanted)

    def outputs(params, x, y):
        h, y = stages[0](params[0], x, y)
        h, _ = stages[1](params[1], tr.stage_boundary(h), y)
        return h

    predicted = found.predict(data, outputs)
    assert_close(predicted, expected.predict(data, outputs))
    assert predicted.shape == (32, 4)
    live = list(found.predict(data, outputs, live=True))
    assert_bits_equal(np.concatenate(live), predicted)
