"""Keys, model state, shared weights and accumulation in a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelined import (
    SCHEDULES,
    assert_same_bits,
    assert_same_training,
    check_pipeline,
    dense_stages,
    elements,
    trained,
)

import tailrace as tr
from oracles import assert_bits_equal

RNG = np.random.default_rng(4)


def normal(*shape):
    return (RNG.normal(size=shape) * 0.5).astype(np.float32)


def dropping():
    """Stages with dropout, in the first of them twice."""

    def drop(h):
        return jnp.where(jax.random.bernoulli(tr.key(), 0.7, h.shape), h / 0.7, 0.0)

    def first(w, x, y):
        return drop(jnp.tanh(drop(x) @ w)), y

    def second(w, h, y):
        return ((drop(h) @ w - y) ** 2).mean()

    return [first, second], [normal(3, 8), normal(8)]


def test_dropout_is_that_of_the_plain_step():
    stages, params = dropping()
    check_pipeline(stages, None, params, elements(8, 3), trainer={"seed": 5})
    check_pipeline(stages, None, params, elements(16, 3), trainer={"replicas": 2})


def test_dropout_has_the_same_bits_in_all_schedules_and_is_replayed_when_recomputed():
    stages, params = dropping()

    def run(schedule, recompute=False):
        pipeline = tr.Pipeline(stages, accumulation=4, schedule=schedule, recompute=recompute)
        return trained(pipeline, optax.sgd(0.05), params, elements(8, 3), 2)

    runs = [run(schedule) for schedule in SCHEDULES]
    for each in runs[1:]:
        assert_same_bits(each, runs[0])
    assert_same_training(run("grouped", recompute=True), runs[0])


def test_counters_are_those_of_the_plain_step():
    def first(w, x, y):
        return x @ w * (1.0 + tr.microbatch().astype(jnp.float32)), y

    def second(w, h, y):
        scale = 1.0 / (1.0 + tr.step().astype(jnp.float32))
        return ((h @ w * scale - y) ** 2).mean(), {"microbatch": tr.microbatch()}

    found, _ = check_pipeline([first, second], None, [normal(3, 2), normal(2)], elements(12, 3))
    np.testing.assert_array_equal(found.history.each("microbatch")[..., 0], [[0, 1, 2, 3]] * 3)


def normalising():
    """Stages that keep running means, as BatchNorm does, and count."""

    def layer(p, state, h, y):
        mean = h.mean(0)
        new = {"mean": 0.9 * state["mean"] + 0.1 * mean, "count": state["count"] + 1}
        return (jnp.tanh((h - new["mean"]) @ p), y), new

    def last(p, state, h, y):
        return (((h - state) @ p - y) ** 2).mean(), 0.5 * state + 0.5 * h.mean(0)

    params = [normal(3, 4), normal(4, 5), normal(5)]
    state = [
        {"mean": np.zeros(3, np.float32), "count": np.int32(0)},
        {"mean": np.zeros(4, np.float32), "count": np.int32(0)},
        np.zeros(5, np.float32),
    ]

    def plain(params, state, x, y):
        (h, y), first = layer(params[0], state[0], x, y)
        (h, y), second = layer(params[1], state[1], h, y)
        loss, third = last(params[2], state[2], h, y)
        return loss, ([first, second, third], None)

    return [layer, layer, last], params, state, plain


@pytest.mark.parametrize(
    ("schedule", "recompute"), [*zip(SCHEDULES, (False, True, False), strict=True)]
)
def test_model_state_advances_with_each_microbatch(schedule, recompute):
    stages, params, state, plain = normalising()
    found, _ = check_pipeline(
        stages,
        None,
        params,
        elements(12, 3),
        plain,
        count=6,
        trainer={"model_state": state},
        schedule=schedule,
        recompute=recompute,
    )
    assert [int(found.model_state[i]["count"]) for i in (0, 1)] == [12, 12]


def test_model_state_that_a_stage_does_not_change_or_does_not_use():
    def first(p, state, x, y):
        return (jnp.tanh(x @ p) * state["scale"], y), state

    def second(p, state, h, y):
        return ((h @ p - y) ** 2).mean(), {**state, "seen": state["seen"] + 1}

    def plain(params, state, x, y):
        (h, y), one = first(params[0], state[0], x, y)
        loss, two = second(params[1], state[1], h, y)
        return loss, ([one, two], None)

    state = [
        {"scale": np.float32(0.5), "idle": np.arange(3.0, dtype=np.float32)},
        {"seen": np.int32(0), "idle": np.ones((2, 2), np.float32)},
    ]
    found, expected = check_pipeline(
        [first, second],
        None,
        [normal(3, 4), normal(4)],
        elements(8, 3),
        plain,
        trainer={"model_state": state, "observe": [tr.Tap("buffer/*", reduce="tensor")]},
    )
    assert int(found.model_state[1]["seen"]) == 8
    assert sorted(found.records.names) == sorted(expected.records.names)
    for name in expected.records.names:
        assert_bits_equal(found.records[name].values, expected.records[name].values)


def test_model_state_over_replicas_is_averaged_or_each_its_own():
    stages, params, state, plain = normalising()
    for replica_state in ("mean", "each"):
        check_pipeline(
            stages,
            None,
            params,
            elements(24, 3),
            plain,
            count=6,
            trainer={"model_state": state, "replicas": 2, "replica_state": replica_state},
        )


def test_a_function_with_boundaries_has_a_model_state_too():
    stages, params, state, _ = normalising()

    def marked(params, state, x, y):
        (h, y), first = stages[0](params[0], state[0], x, y)
        (h, y), second = stages[1](params[1], state[1], tr.stage_boundary(h), y)
        loss, third = stages[2](params[2], state[2], tr.stage_boundary(h), y)
        return loss, ([first, second, third], {"norm": jnp.abs(h).sum()})

    found, _ = check_pipeline(
        marked, None, params, elements(12, 3), count=6, trainer={"model_state": state}
    )
    assert "norm" in found.history.names


# -- weights of several stages --------------------------------------------------------------------


def tied_stages():
    def embed(p, words, y):
        return jnp.tanh(p["table"][words].sum(1)), y

    def middle(p, h, y):
        return jnp.tanh(h @ p), y

    def read(p, h, y):
        logits = h @ p["table"].T + p["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    table = normal(7, 4)
    params = [{"table": table}, normal(4, 4), {"table": table, "bias": normal(7)}]
    data = [
        (RNG.integers(0, 7, (4, 3)).astype(np.int32), RNG.integers(0, 7, 4).astype(np.int32))
        for _ in range(12)
    ]
    return [embed, middle, read], params, data


def plainly_tied(stages):
    def plain(params, words, y):
        embed, middle, read = stages
        h, y = middle(params[1], *embed(params[0], words, y))
        return read({**params[2], "table": params[0]["table"]}, h, y)

    return plain


@pytest.mark.parametrize("mapping", [None, [0, 1, 0]])
def test_shared_weights_have_one_gradient(mapping):
    optimizer = optax.adam(0.01)
    stages, params, data = tied_stages()
    bare = [params[0], params[1], {"bias": params[2]["bias"]}]
    with jax.numpy_dtype_promotion("standard"):
        pipeline = tr.Pipeline(
            stages, accumulation=6, shared=[("0/table", "2/table")], device_mapping=mapping
        )
        found = trained(pipeline, optimizer, params, data, 2)
        expected = trained(plainly_tied(stages), optimizer, bare, data, 2, accumulation=6)
    tables = [found.params[0]["table"], found.params[2]["table"]]
    assert_bits_equal(*tables)
    for mine, theirs in (
        (tables[0], expected.params[0]["table"]),
        (found.params[1], expected.params[1]),
        (found.params[2]["bias"], expected.params[2]["bias"]),
    ):
        np.testing.assert_allclose(mine, theirs, 1e-6, 1e-7)
    np.testing.assert_allclose(found.history.loss, expected.history.loss, 1e-6)


def test_a_function_shares_weights_by_using_them_twice():
    stages, params, data = tied_stages()

    def loss(p, words, y):
        h, _ = stages[0](p, words, y)
        h, _ = stages[1](p["middle"], tr.stage_boundary(h), y)
        return stages[2](p, tr.stage_boundary(h), y)

    params = {"table": params[0]["table"], "middle": params[1], "bias": params[2]["bias"]}
    for replicas in (1, 2):
        check_pipeline(loss, None, params, data * replicas, count=6, trainer={"replicas": replicas})


def test_each_use_of_a_shared_weight_has_its_own_record():
    def loss(p, x, y):
        h = tr.stage_boundary(jnp.tanh(x @ p["w"]))
        return (((h @ p["w"].T).sum(-1) - y) ** 2).mean()

    taps = [tr.Tap(["grad/*", "accumulated/*"], reduce="tensor")]
    pipeline = tr.Pipeline(loss, accumulation=4)
    w = normal(3, 4)
    records = trained(pipeline, optax.sgd(0.1), {"w": w}, elements(4, 3), 1, observe=taps).records
    assert sorted(records.names) == ["accumulated/w", "grad/w@0", "grad/w@1"]
    assert [records[f"grad/w@{stage}"].stages.tolist() for stage in (0, 1)] == [[0] * 4, [1] * 4]
    both = records["grad/w@0"].values + records["grad/w@1"].values
    np.testing.assert_allclose(records["accumulated/w"].values[0], both.mean(0), 1e-5, 1e-7)
    assert records["grad/w@0"].values.shape == (4, *w.shape)


def test_replicas_may_share_the_optimizer_state_out():
    stages, params, loss_fn = dense_stages([3, 40, 40])
    check_pipeline(
        stages,
        loss_fn,
        params,
        elements(16, 3),
        optimizer=optax.sgd(0.05, momentum=0.9),
        trainer={"replicas": 2, "shard_optimizer_state": True},
    )


# -- accumulation ---------------------------------------------------------------------------------


def test_weighted_microbatches():
    stages, params, loss_fn = dense_stages([3, 4, 2])
    weighted = tr.Accumulation(4, weight=lambda x, y: jnp.abs(y).sum() + 1.0)
    for replicas in (1, 2):
        check_pipeline(
            stages,
            loss_fn,
            params,
            elements(8 * replicas, 3),
            accumulation=weighted,
            trainer={"replicas": replicas},
        )


def test_accumulators_have_their_dtype():
    stages, params, loss_fn = dense_stages([3, 4, 2])
    short = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    data = [(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)) for x, y in elements(8, 3)]
    seen = []

    def note(updates, state, params=None):
        seen.append({str(leaf.dtype) for leaf in jax.tree.leaves(updates)})
        return updates, state

    spy = optax.GradientTransformation(lambda params: (), note)
    pipeline = tr.Pipeline(stages, loss_fn, accumulation=tr.Accumulation(4, dtype=jnp.float32))
    with jax.numpy_dtype_promotion("standard"):  # optax adds the update to the parameter
        found = trained(pipeline, optax.chain(spy, optax.sgd(0.05)), short, data, 2)
    assert seen[-1] == {"float32"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(found.params)} == {"bfloat16"}
