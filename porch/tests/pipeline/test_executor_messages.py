"""What passes between stages: any shapes and dtypes, several values, values that skip stages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelined import SCHEDULES, check_pipeline, dense_stages, elements, trained

import tailrace as tr
from oracles import assert_bits_equal

RNG = np.random.default_rng(3)


def normal(*shape):
    return (RNG.normal(size=shape) * 0.5).astype(np.float32)


def test_values_of_many_shapes_and_dtypes():
    def embed(table, words, weights):
        vectors = table[words]  # integers in, [batch, words, features] out
        # Rounded by name: XLA may leave a mere conversion out of the plain, fused program.
        mean = jax.lax.reduce_precision(vectors.mean(1), 8, 7).astype(jnp.bfloat16)
        return vectors, mean, words > 3, words, weights

    def mix(p, vectors, mean, mask, words, weights):
        masked = jnp.where(mask[..., None], vectors, 0.0)
        hidden = jnp.tanh(masked.sum(1) @ p["kernel"])
        short = mean.astype(jnp.float32) @ p["short"]
        return hidden, short, words.sum(1), weights

    def read(p, hidden, short, total, weights):
        found = hidden @ p + short @ p[:2]
        return ((found - total.astype(jnp.float32) / 10.0) ** 2 * weights).mean()

    params = [normal(8, 3), {"kernel": normal(3, 5), "short": normal(3, 2)}, normal(5)]
    data = [
        (RNG.integers(0, 8, (4, 6)).astype(np.int32), RNG.random(4).astype(np.float32))
        for _ in range(12)
    ]
    check_pipeline([embed, mix, read], None, params, data, count=6)


def test_a_dict_of_inputs_and_a_single_output():
    def first(w, image, label):
        return {"hidden": jnp.tanh(image @ w), "label": label}

    def second(w, values):
        return ((values["hidden"] @ w - values["label"]) ** 2).mean()

    data = [{"image": x, "label": y} for x, y in elements(8, 3)]

    def plain(params, image, label):
        return second(params[1], first(params[0], image, label))

    check_pipeline([first, second], None, [normal(3, 4), normal(4)], data, plain)


def test_a_value_that_a_later_stage_uses_skips_the_stages_between():
    def loss(p, x, y):
        first = jnp.tanh(x @ p["a"])
        second = jnp.tanh(tr.stage_boundary(first) @ p["b"])
        third = jnp.tanh(tr.stage_boundary(second) @ p["c"]) + first  # over stage 1
        return ((tr.stage_boundary(third) @ p["d"] + x.sum(-1) - y) ** 2).mean()

    params = {"a": normal(3, 4), "b": normal(4, 5), "c": normal(5, 4), "d": normal(4)}
    for schedule in SCHEDULES[:2]:
        check_pipeline(loss, None, params, elements(16, 3), count=8, schedule=schedule)


def test_boundaries_inside_jit():
    @jax.jit
    def block(p, x):
        return tr.stage_boundary(jnp.tanh(x @ p))

    @jax.jit
    def loss(p, x, y):
        hidden = block(p["b"], block(p["a"], x))
        return ((hidden @ p["c"] - y) ** 2).mean()

    params = {"a": normal(3, 4), "b": normal(4, 5), "c": normal(5)}
    found, _ = check_pipeline(loss, None, params, elements(12, 3), count=6)
    assert found.engine.placement.stages == 3


def test_both_forms_compute_the_same_bits():
    stages, params, loss_fn = dense_stages([3, 4, 2])

    def marked(params, x, y):
        values = stages[0](params[0], x, y)
        return loss_fn(*stages[1](params[1], *tr.stage_boundary(values)))

    runs = [
        trained(made, optax.sgd(0.05), params, elements(8, 3), 2)
        for made in (
            tr.Pipeline(stages, loss_fn, accumulation=4),
            tr.Pipeline(marked, accumulation=4),
        )
    ]
    assert_bits_equal(runs[1].params, runs[0].params)


def test_labels_are_kept_where_they_are_used():
    """The labels of the element need not be threaded through the stages of a function."""

    def loss(p, x, y):
        wanted = jax.nn.one_hot(y, 4)  # traced in stage 0, used in stage 1
        hidden = tr.stage_boundary(jnp.tanh(x @ p["a"]))
        return -(wanted * jax.nn.log_softmax(hidden @ p["b"])).sum(-1).mean()

    data = [(normal(4, 3), RNG.integers(0, 4, 4).astype(np.int32)) for _ in range(8)]
    check_pipeline(loss, None, {"a": normal(3, 5), "b": normal(5, 4)}, data)


def test_a_stage_without_parameters_and_a_parameter_without_gradient():
    def double(_, h, y):
        return 2.0 * h, y

    stages, params, loss_fn = dense_stages([3, 4, 2])
    params = [{**params[0], "unused": np.ones(3, np.float32)}, None, params[1]]
    found, _ = check_pipeline(
        [stages[0], double, stages[1]], loss_fn, params, elements(12, 3), count=6
    )
    assert_bits_equal(found.params[0]["unused"], np.ones(3, np.float32))


def test_stages_that_only_pass_values_on():
    def same(_, h, y):
        return h, y

    (first, second), params, loss_fn = dense_stages([3, 4, 2])
    for stages, own in (
        ([first, same, second], [params[0], None, params[1]]),
        ([first, second, same], [*params, None]),
        ([same, first, second], [None, *params]),
    ):
        check_pipeline(stages, loss_fn, own, elements(6, 3), count=6)


def test_what_depends_on_parameters_alone_is_computed_where_it_is_used():
    def loss(p, x, y):
        weight = jnp.tanh(p["w"] * 2.0)  # used by both stages
        hidden = tr.stage_boundary(jnp.tanh(x @ weight))
        return ((hidden @ weight.T).sum(-1) - y).mean() ** 2

    check_pipeline(loss, None, {"w": normal(3, 4)}, elements(8, 3))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_control_flow_and_loops_inside_a_stage(schedule):
    def first(w, x, y):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
        return jax.lax.cond(y.sum() > 0, lambda h: h, lambda h: -h, h), y

    def second(w, h, y):
        return ((jax.checkpoint(lambda h: jnp.sin(h) @ w)(h) - y) ** 2).mean()

    check_pipeline(
        [first, second], None, [normal(3, 3, 3), normal(3)], elements(8, 3), schedule=schedule
    )


def test_inputs_come_before_the_element_and_may_be_threaded():
    def first(w, scale, offset, x, y):
        return jnp.tanh(x @ w * scale), offset, y

    def second(w, h, offset, y):
        return ((h @ w + offset - y) ** 2).mean()

    def plain(params, x, y):
        scale, offset = np.float32(0.5), np.float32(2.0)
        return second(params[1], *first(params[0], scale, offset, x, y))

    check_pipeline(
        [first, second],
        None,
        [normal(3, 4), normal(4)],
        elements(8, 3),
        plain,
        inputs=(np.float32(0.5), np.float32(2.0)),
    )


def test_the_loss_may_be_of_sixteen_bits():
    def first(w, x, y):
        return jnp.tanh(x @ w).astype(jnp.bfloat16), y

    def second(w, h, y):
        return ((h @ w.astype(jnp.bfloat16) - y.astype(jnp.bfloat16)) ** 2).mean()

    params = [normal(3, 4), normal(4)]
    pipeline = tr.Pipeline([first, second], accumulation=4)
    trainer = trained(pipeline, optax.sgd(0.05), params, elements(8, 3), 2)
    assert trainer.history.each("loss").dtype == jnp.bfloat16
    assert np.isfinite(trainer.history.loss.astype(np.float32)).all()
