"""Replicas: who gets which element, what is refused, and the arithmetic in the sentences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tailrace as tr
from oracles import assert_bits_equal, assert_close
from tailrace.errors import FeedError, ReplicaError


def numbers(count=100):
    return [np.float32(i) for i in range(count)]


def test_elements_are_dealt_out_in_turn():
    infeed, outfeed = tr.InfeedQueue(numbers()), tr.OutfeedQueue()

    def microbatch(x):
        outfeed.enqueue({"x": x, "r": tr.replica()})

    def step(_):
        tr.repeat(2, microbatch, infeed=infeed)
        return ()

    tr.compile(lambda: tr.repeat(3, step, ()), replicas=4)()
    found = outfeed.dequeue()
    assert_bits_equal(found["x"], np.arange(24, dtype=np.float32).reshape(6, 4))
    assert_bits_equal(found["r"], np.tile(np.arange(4, dtype=np.int32), (6, 1)))


def test_mean_and_sum():
    infeed, outfeed = tr.InfeedQueue(numbers()), tr.OutfeedQueue("last")

    def body(v, x):
        tree = {"a": x, "b": (x * 2, jnp.stack([x, x]))}
        mean, total = tr.cross_replica_mean(tree), tr.cross_replica_sum(tree)
        outfeed.enqueue({"mean": mean, "sum": total})
        return v + mean["a"]

    found = tr.compile(lambda v: tr.repeat(2, body, v, infeed=infeed), replicas=4)(0.0)
    assert found == 1.5 + 5.5
    last = outfeed.dequeue()
    assert last["mean"]["a"].tolist() == [5.5] * 4
    assert last["sum"]["b"][0].tolist() == [44.0] * 4
    assert last["sum"]["b"][1].shape == (4, 2)


def test_one_replica_reduces_to_itself():
    program = tr.compile(lambda x: (tr.cross_replica_mean(x), tr.cross_replica_sum(x)))
    assert jax.tree.map(float, program(3.0)) == (3.0, 3.0)


def test_the_gradient_of_a_reduction():
    """Of the mean over replicas of (w x)^2, each replica computes the whole gradient."""
    infeed = tr.InfeedQueue(numbers())

    def loss(w, x):
        return tr.cross_replica_mean((w * x) ** 2)

    def body(w, x):
        return w - 0.01 * tr.cross_replica_mean(jax.grad(loss)(w, x))

    found = tr.compile(lambda w: tr.repeat(1, body, w, infeed=infeed), replicas=2)(1.0)
    x = np.arange(2, dtype=np.float32)
    assert_close(found, np.float32(1 - 0.01 * (2 * x**2).mean()))


def test_r_replicas_equal_one_with_the_large_batch():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 8, 3)), rng.normal(size=(8, 8))
    x, y = x.astype(np.float32), y.astype(np.float32)

    def body(w, x, y):
        grads = jax.grad(lambda w: ((x @ w - y) ** 2).mean())(w)
        return w - 0.1 * tr.cross_replica_mean(grads)

    def train(elements, replicas):
        infeed = tr.InfeedQueue(elements)
        n = len(elements) // replicas
        program = tr.compile(lambda w: tr.repeat(n, body, w, infeed=infeed), replicas=replicas)
        return program(jnp.ones(3))

    halves = [(x[i, h : h + 4], y[i, h : h + 4]) for i in range(8) for h in (0, 4)]
    assert_close(train(halves, 2), train(list(zip(x, y, strict=True)), 1))
    assert_bits_equal(train(halves, 2), train(halves, 2))


@pytest.mark.cpu
def test_as_many_as_there_are_devices():
    outfeed = tr.OutfeedQueue()
    program = tr.compile(lambda: (outfeed.enqueue(tr.replica()), None)[1], replicas=None)
    program()
    assert outfeed.dequeue().tolist() == [list(range(8))]


def test_results_and_arguments_of_replicated_programs():
    program = tr.compile(lambda tree: jax.tree.map(lambda x: x * 2, tree), replicas=2)
    found = program({"a": np.arange(4.0, dtype=np.float32), "b": 3})
    assert_bits_equal(found, {"a": np.float32([0, 2, 4, 6]), "b": np.int32(6)})
    again = program(found)
    assert_bits_equal(again["a"], np.float32([0, 4, 8, 12]))


# -- sentences ----------------------------------------------------------------------------------


def refused(function, *args, text, error=ReplicaError, replicas=2):
    with pytest.raises(error, match=text):
        tr.compile(function, replicas=replicas)(*args)


def test_drift_names_the_leaf():
    infeed = tr.InfeedQueue(numbers())

    def body(s, x):
        return {"same": s["same"] + 1, "layers": [s["layers"][0] + x]}

    refused(
        lambda s: tr.repeat(2, body, s, infeed=infeed),
        {"same": 0.0, "layers": [0.0]},
        text="'layers/0' is computed from each replica's own elements and would drift apart.*"
        "tr.cross_replica_mean.*send it to an outfeed",
    )
    refused(lambda: tr.replica(), text="'its result' is computed from each replica's own")


def test_drift_through_keys_calls_loops_and_branches():
    refused(lambda: jax.random.normal(tr.key(), ()), text="drift apart")
    refused(lambda: jax.jit(lambda: tr.replica() + 1)(), text="drift apart")
    infeed = tr.InfeedQueue(numbers())

    def late(s, x):  # reaches the second leaf in the second pass only
        return x, s[0]

    refused(lambda: tr.repeat(3, late, (0.0, 0.0), infeed=infeed), text="drift apart")
    refused(
        lambda v: jax.lax.cond(tr.replica() > 0, lambda v: v + 1, lambda v: v, v),
        0.0,
        text="drift apart",
    )
    refused(
        lambda v: jax.lax.while_loop(lambda v: v < tr.replica(), lambda v: v + 1, v),
        jnp.int32(0),
        text="drift apart",
    )


def test_what_is_equal_again_is_allowed():
    infeed = tr.InfeedQueue(numbers())

    def body(v, x):
        mean = tr.cross_replica_mean(x)
        return v + jax.lax.cond(mean > 1, lambda m: m, lambda m: -m, mean)

    found = tr.compile(lambda v: tr.repeat(2, body, v, infeed=infeed), replicas=2)(0.0)
    assert found == -0.5 + 2.5


def test_reductions_where_some_replicas_would_not_come():
    refused(
        lambda v: jax.lax.cond(tr.replica() > 0, lambda v: tr.cross_replica_sum(v), lambda v: v, v),
        0.0,
        text="is inside a branch whose predicate differs between replicas: some would wait",
    )
    refused(
        lambda v: jax.lax.while_loop(
            lambda v: v < tr.replica(), lambda v: tr.cross_replica_sum(v) + 1, v
        ),
        jnp.int32(0),
        text="is inside a while loop whose condition differs between replicas",
    )


def test_an_outfeed_where_only_some_replicas_send():
    outfeed = tr.OutfeedQueue()

    def program(v):
        jax.lax.cond(tr.replica() > 0, lambda v: outfeed.enqueue(v), lambda v: v, v)
        return v

    refused(program, 0.0, text="outfeed.*branch whose predicate differs between replicas")


@pytest.mark.parametrize("replicas", [0, -1, True, 2.0, "2"])
def test_bad_counts(replicas):
    with pytest.raises(ReplicaError, match=f"at least 1. Received: replicas={replicas!r}"):
        tr.compile(lambda x: x, replicas=replicas)


def test_more_replicas_than_devices_shows_the_arithmetic():
    text = (
        r"take 9 x 1 = 9 devices, and there are 8. Use replicas=8 at most.*configure\(devices=9\)"
    )
    with pytest.raises(ReplicaError, match=text):
        tr.compile(lambda x: x, replicas=9)


def test_an_infeed_belongs_to_its_number_of_replicas():
    infeed = tr.InfeedQueue(numbers())

    def function(v):
        return v + 0 * tr.cross_replica_mean(tr.repeat(2, lambda v, x: v + x, 0.0, infeed=infeed))

    tr.compile(function, replicas=2)(0.0)
    refused(
        function,
        0.0,
        text="was used with 2, and now with 1. Make another InfeedQueue",
        error=FeedError,
        replicas=1,
    )


def test_a_failing_program_does_not_bind_an_infeed():
    """A count that does not fit the devices, or a body that does not trace, decides nothing."""
    infeed = tr.InfeedQueue(numbers())

    def broken(v):
        return tr.repeat(2, lambda v, x: undefined, v, infeed=infeed)  # noqa: F821

    with pytest.raises(NameError):
        tr.compile(broken, replicas=2)(0.0)
    found = tr.compile(lambda v: tr.repeat(2, lambda v, x: v + x, v, infeed=infeed))(0.0)
    assert found == 1
