"""Taps in programs of one's own, live taps, and the gradients that `tr.observe` finds by itself."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, assert_close, mlp, mlp_loss, regression


def test_periodic_taps_cut_a_program_where_they_look():
    def body(x):
        with jax.named_scope("double"):
            return x * 2 % 1000

    taps = [tr.Tap("activation/double", mode=tr.every(4), reduce="tensor")]
    program = tr.compile(lambda x: tr.repeat(10, body, x), observe=taps)
    plain = [1.0]
    for _ in range(20):
        plain.append(plain[-1] * 2 % 1000)
    result = program(1.0)
    assert float(result) == plain[10]
    assert program.records["activation/double"].steps.tolist() == [3, 7]
    assert program.records["activation/double"].values.tolist() == [plain[4], plain[8]]
    program(result)  # the second call starts at step 10, in the middle of a period
    assert program.records["activation/double"].steps.tolist() == [11, 15, 19]
    assert program.records["activation/double"].values.tolist() == [plain[12], plain[16], plain[20]]


def network(w, x, perturbation):
    h = x
    for number in range(3):
        with jax.named_scope("layer"):
            h = jnp.tanh(h @ w) + perturbation[number]
    with jax.named_scope("head"):
        return (h * h[::-1]).sum() + (h**3).sum()


def test_observe_finds_gradients_of_scopes():
    w, x = jnp.eye(4) * 0.5, jnp.arange(8.0).reshape(2, 4) / 8
    none = jnp.zeros((3, 2, 4))

    def step(w, x):
        return jax.value_and_grad(network)(w, x, none)

    observed = tr.observe(step, [tr.Tap("cotangent/layer*", reduce="tensor")])
    output, records = observed(w, x)
    assert_bits_equal(output, jax.jit(step)(w, x))
    expected = jax.grad(network, argnums=2)(w, x, none)
    for number, name in enumerate(("layer", "layer#1", "layer#2")):
        assert_close(records[f"cotangent/{name}"].values[0], expected[number])


def test_a_gradient_that_could_be_two_is_not_listed():
    def step(w):
        def loss(w):
            with jax.named_scope("pair"):
                a, b = w * 2, w * 3
            return (a * b).sum()

        return jax.grad(loss)(w)

    names = tr.observe(step, ["input/*"]).tensors(jnp.ones(3)).names
    assert {"activation/pair[0]", "activation/pair[1]"} <= set(names)
    assert not [name for name in names if name.startswith("cotangent/")]


def test_live_records_arrive_in_order_while_training_runs():
    seen, running = [], []
    trainer = tr.Trainer(
        mlp_loss, optax.sgd(0.1), mlp(), observe=[tr.Tap("loss", reduce="tensor", live=True)]
    )

    def read():
        for record in trainer.records.stream(timeout_s=600):
            running.append(thread_runs.is_set())
            seen.extend(zip(record.steps.tolist(), record.values.tolist(), strict=True))

    thread_runs = threading.Event()
    thread_runs.set()
    thread = threading.Thread(target=read)
    thread.start()
    data = regression(4) * 100
    history = trainer.fit(data, steps=400)
    thread_runs.clear()
    thread.join(timeout=600)
    assert [step for step, _ in seen] == list(range(400))
    assert_bits_equal(np.float32([value for _, value in seen]), history.loss)
    assert trainer.executions > 1
    plain = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp())
    plain.fit(data, steps=400)
    assert_bits_equal(trainer.params, plain.params)


@pytest.mark.parametrize("replicas", [1, 2])
def test_model_state_of_each_replica(replicas):
    def loss_fn(w, state, x):
        mean = 0.9 * state["mean"] + 0.1 * x.mean(axis=0)
        return ((x @ w - 1) ** 2).mean(), ({"mean": mean, "count": state["count"] + 1}, None)

    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    state = {"mean": jnp.zeros(4), "count": jnp.int32(0)}

    def trained(kind):
        trainer = tr.Trainer(
            loss_fn,
            optax.sgd(0.1),
            jnp.zeros(4),
            model_state=state,
            replicas=replicas,
            replica_state=kind,
            steps_per_execution=2,
        )
        trainer.fit(tr.batches(x, 4), steps=3)
        return trainer

    each, mean = trained("each"), trained("mean")
    assert_bits_equal(each.params, mean.params)
    if replicas == 1:
        assert_bits_equal(each.model_state, mean.model_state)
        return
    expected = np.zeros((2, 4), np.float32)
    for step in range(3):
        for replica in range(2):
            rows = x[(2 * step + replica) * 4 :][:4]
            expected[replica] = 0.9 * expected[replica] + 0.1 * rows.mean(axis=0)
    assert_close(each.model_state["mean"], expected)
    assert each.model_state["count"].tolist() == [3, 3]
    assert_close(mean.model_state["mean"], expected.mean(axis=0))
    assert each.evaluate(tr.batches(x, 4)).keys() == {"loss"}
    each.fit(tr.batches(x, 8), steps=1)  # another program takes the state over
    assert each.model_state["mean"].shape == (2, 4)
    with pytest.raises(tr.errors.OptionError, match="replica_state is 'mean' or 'each'"):
        trained("both")
