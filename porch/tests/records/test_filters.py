"""Outfeeds with filters: what is chosen, and values that belong to another trace."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_loss, regression
from tailrace.errors import FeedError, OptionError, ProgramError
from tailrace.records.filtered_outfeed import MaybeOutfeedQueue, process_filters

KEYS = ["Dense_10/bias:0_grad", "Dense_10/kernel:0_grad", "Dense_128/bias:0_grad"]


def run(queue, keys=KEYS, passes=3):
    def body(x):
        for number, key in enumerate(keys):
            assert queue.maybe_outfeed(key, x + number) is not None
        queue.maybe_enqueue()
        return x + 10

    return tr.compile(lambda x: tr.repeat(passes, body, x))(jnp.float32(0))


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (None, KEYS),
        (["none"], KEYS),
        (["NoNe"], KEYS),
        ([""], KEYS),
        (["Dense_1"], KEYS),
        (["Dense_10"], KEYS[:2]),
        (["bias", "kernel"], KEYS),
        (["bias"], [KEYS[0], KEYS[2]]),
        (["dense"], []),
        (["none", "Dense_128"], KEYS[2:]),
        ([], []),
        (("kernel",), [KEYS[1]]),
    ],
)
def test_which_names_pass(filters, kept):
    queue = MaybeOutfeedQueue(filters=filters)
    run(queue)
    assert queue.enqueued == bool(kept)
    found = queue.maybe_dequeue()
    if not kept:
        assert found is None
        return
    assert list(found) == kept
    for key in kept:
        number = KEYS.index(key)
        assert_bits_equal(found[key], np.float32([0, 10, 20]) + np.float32(number))


def test_names_keep_their_order_and_a_second_value_replaces_the_first():
    queue = MaybeOutfeedQueue()

    def body(x):
        queue.maybe_outfeed("z", x)
        queue.maybe_outfeed("a", x + 1)
        queue.maybe_outfeed("z", x + 2)
        sent = queue.maybe_enqueue()
        assert list(sent) == ["z", "a"]
        return x

    tr.compile(lambda x: tr.repeat(2, body, x))(jnp.float32(0))
    found = queue.dequeue()
    assert list(found) == ["z", "a"]
    assert found["z"].tolist() == [2, 2]


def test_mode_last_and_trees():
    queue = MaybeOutfeedQueue(mode="last")
    assert "mode='last'" in repr(queue)
    queue_of_trees = MaybeOutfeedQueue()

    def body(x):
        queue.maybe_outfeed("x", x)
        queue.maybe_enqueue()
        queue_of_trees.maybe_outfeed("tree", {"b": x, "a": [x + 1]})
        queue_of_trees.maybe_enqueue()
        return x + 1

    tr.compile(lambda x: tr.repeat(3, body, x))(jnp.float32(0))
    assert queue.dequeue() == {"x": 2}
    found = queue_of_trees.dequeue()["tree"]
    assert found["b"].tolist() == [0, 1, 2]
    assert found["a"][0].tolist() == [1, 2, 3]


def test_before_anything_was_sent():
    queue = MaybeOutfeedQueue()
    assert queue.maybe_dequeue() is None
    with pytest.raises(FeedError, match="nothing to dequeue"):
        queue.dequeue()


def test_outside_a_program():
    with pytest.raises(ProgramError, match="maybe_outfeed means something only inside a program"):
        MaybeOutfeedQueue().maybe_outfeed("x", jnp.ones(3))
    with pytest.raises(ProgramError, match="maybe_enqueue means something only inside"):
        MaybeOutfeedQueue().maybe_enqueue()


@pytest.mark.parametrize("filters", ["Dense_1", [1, 2]])
def test_filters_are_a_list_of_strings(filters):
    with pytest.raises(OptionError, match="filters is a list of strings, or None"):
        process_filters(filters)


def test_activations_inside_a_differentiated_function():
    acts, grads = MaybeOutfeedQueue(), MaybeOutfeedQueue(filters=["w"])
    data = [np.float32(i + 1) for i in range(4)]

    def loss(params, x):
        h = acts.maybe_outfeed("h", params["w"] * x)
        out = acts.maybe_outfeed("out", jnp.sin(h) + params["b"])
        acts.maybe_enqueue()
        return out

    def body(params, x):
        grad = jax.grad(loss)(params, x)
        for name, value in grad.items():
            grads.maybe_outfeed(name, value)
        grads.maybe_enqueue()
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grad)

    infeed = tr.InfeedQueue(data)
    params = {"w": jnp.float32(0.5), "b": jnp.float32(0)}
    tr.compile(lambda p: tr.repeat(4, body, p, infeed=infeed))(params)
    found, found_grads = acts.dequeue(), grads.dequeue()
    assert list(found) == ["h", "out"]
    assert list(found_grads) == ["w"]
    w = np.float32(0.5)
    for i, x in enumerate(data):
        np.testing.assert_allclose(found["h"][i], w * x, rtol=1e-6)
        np.testing.assert_allclose(found_grads["w"][i], np.cos(w * x) * x, rtol=1e-5)
        w = w - np.float32(0.1) * found_grads["w"][i]


def test_a_second_program_and_a_second_trace_start_empty():
    queue = MaybeOutfeedQueue()

    def collects_only(x):
        queue.maybe_outfeed("left behind", x)
        return x + 1

    tr.compile(lambda x: tr.repeat(2, collects_only, x))(jnp.float32(0))
    assert not queue.enqueued
    run(queue, ["own"])
    assert list(queue.dequeue()) == ["own"]
    program = tr.compile(lambda x: tr.repeat(2, lambda x: _send(queue, x), x))
    program(jnp.float32(0))
    assert queue.dequeue()["own"].shape == (2,)
    program(jnp.zeros(3, jnp.float32))  # traced again
    assert queue.dequeue()["own"].shape == (2, 3)


def _send(queue, x):
    queue.maybe_outfeed("own", x)
    queue.maybe_enqueue()
    return x


def inside(kind, f):
    """A function that calls `f(x)` in a trace of its own."""
    return {
        "grad": lambda x: jax.grad(lambda y: jnp.sum(f(y)))(x),
        "jit": lambda x: jax.jit(f)(x),
        "scan": lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        "vmap": lambda x: jax.vmap(f)(x[None])[0],
        "cond": lambda x: jax.lax.cond(True, f, lambda y: y, x),
    }[kind]


@pytest.mark.parametrize("kind", ["grad", "jit", "scan", "vmap", "cond"])
def test_a_value_left_inside_is_an_error_that_teaches(kind):
    queue = MaybeOutfeedQueue()

    def body(x):
        x = inside(kind, lambda y: queue.maybe_outfeed("h", y * 2))(x)
        queue.maybe_enqueue()
        return x

    with pytest.raises(FeedError, match=r"(?s)collected and enqueued in one function.*'h'"):
        tr.compile(lambda x: tr.repeat(2, body, x))(jnp.float32(1))
    run(queue, ["fine"])  # nothing of the failed trace is left
    assert list(queue.dequeue()) == ["fine"]


def test_collecting_at_two_levels_is_an_error():
    queue = MaybeOutfeedQueue()

    def body(x):
        queue.maybe_outfeed("outside", x)
        return jax.jit(lambda y: queue.maybe_outfeed("inside", y))(x)

    with pytest.raises(FeedError, match=r"maybe_outfeed\('inside', ...\), while 'outside'"):
        tr.compile(lambda x: tr.repeat(2, body, x))(jnp.float32(1))


def test_names_that_are_not_chosen_may_stand_anywhere():
    queue = MaybeOutfeedQueue(filters=["outside"])

    def body(x):
        x = queue.maybe_outfeed("outside", x)
        jax.jit(lambda y: queue.maybe_outfeed("inner", y))(x)
        queue.maybe_enqueue()
        return x

    tr.compile(lambda x: tr.repeat(2, body, x))(jnp.float32(1))
    assert list(queue.dequeue()) == ["outside"]


def test_in_the_loss_function_of_a_trainer():
    queue = MaybeOutfeedQueue()

    def loss(params, x, y):
        queue.maybe_outfeed("x", x)
        queue.maybe_enqueue()
        return mlp_loss(params, x, y)

    data = regression(6)
    trainer = tr.Trainer(loss, optax.sgd(0.1), mlp(), steps_per_execution=3)
    trainer.fit(data, steps=6)
    assert_bits_equal(queue.dequeue()["x"], np.stack([x for x, _ in data]))
