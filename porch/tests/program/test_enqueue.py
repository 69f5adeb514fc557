"""`enqueue` inside whatever JAX can put around it: the right values, once each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tailrace as tr
from oracles import assert_bits_equal, assert_close
from tailrace.errors import FeedError, ProgramError

XS = [np.float32(i + 1) for i in range(5)]


def run(body, start=0.5, **options):
    """Five passes over XS, `body(v, x) -> v`; returns the result."""
    infeed = tr.InfeedQueue(XS)
    program = tr.compile(lambda v: tr.repeat(5, body, v, infeed=infeed), **options)
    return program(jnp.float32(start))


def test_inside_value_and_grad():
    outfeed = tr.OutfeedQueue()

    def loss(w, x):
        h = outfeed.enqueue({"h": w * x})["h"]
        return h**2

    def body(w, x):
        _, grad = jax.value_and_grad(loss)(w, x)
        return w - 0.01 * grad

    found = run(body)
    w, hs = jnp.float32(0.5), []
    for x in XS:
        hs.append(w * x)
        w = w - 0.01 * jax.grad(lambda w, x: (w * x) ** 2)(w, x)
    assert_close(found, w)
    assert_close(outfeed.dequeue()["h"], np.asarray(hs))


def test_a_bare_call_inside_value_and_grad_is_enough():
    outfeed = tr.OutfeedQueue()

    def loss(w, x):
        outfeed.enqueue(w * x)
        return (w * x) ** 2

    run(lambda w, x: w - 0.0 * jax.grad(loss)(w, x))
    assert_bits_equal(outfeed.dequeue(), np.float32(0.5) * np.asarray(XS))


@pytest.mark.parametrize("around", ["jit", "remat", "remat_of_jit", "custom_vjp", "custom_jvp"])
@pytest.mark.parametrize("differentiated", [True, False])
def test_inside_transformed_functions_once_each(around, differentiated):
    outfeed = tr.OutfeedQueue()

    def inner(w, x):
        return jnp.sin(outfeed.enqueue(w * x)) * w

    def with_vjp(f):
        g = jax.custom_vjp(f)
        g.defvjp(lambda w, x: (f(w, x), (w, x)), lambda res, ct: (ct * res[0], ct * res[1]))
        return g

    def with_jvp(f):
        g = jax.custom_jvp(f)
        g.defjvp(lambda p, t: (f(*p), p[0] * t[1] + p[1] * t[0]))
        return g

    wrapped = {
        "jit": jax.jit,
        "remat": jax.checkpoint,
        "remat_of_jit": lambda f: jax.checkpoint(jax.jit(f)),
        "custom_vjp": with_vjp,
        "custom_jvp": with_jvp,
    }[around](inner)

    def body(w, x):
        made = jax.grad(wrapped)(w, x) if differentiated else wrapped(w, x)
        return w + 0.0 * made

    assert run(body) == 0.5
    assert_bits_equal(outfeed.dequeue(), np.float32(0.5) * np.asarray(XS))


def test_inside_vmap_the_batch_is_in_the_element():
    outfeed = tr.OutfeedQueue()
    offsets = jnp.arange(3, dtype=jnp.float32)

    def one(w, x, offset):
        return outfeed.enqueue(w * x + offset) * w

    def loss(w, x):
        return jax.vmap(one, (None, None, 0))(w, x, offsets).sum()

    run(lambda w, x: w - 0.0 * jax.grad(loss)(w, x))
    expected = np.float32(0.5) * np.asarray(XS)[:, None] + np.arange(3, dtype=np.float32)
    assert_bits_equal(outfeed.dequeue(), expected)


def test_inside_a_scan_of_the_model():
    outfeed = tr.OutfeedQueue()
    layers = jnp.float32([1, 2, 3])

    def loss(w, x):
        def layer(h, scale):
            h = outfeed.enqueue(jnp.tanh(h * scale * w))
            return h, None

        return jax.lax.scan(layer, x, layers)[0]

    run(lambda w, x: w - 0.0 * jax.grad(loss)(w, x))
    expected = []
    for x in XS:
        for scale in (1, 2, 3):
            x = np.tanh(x * np.float32(scale) * np.float32(0.5))
            expected.append(x)
    assert_close(outfeed.dequeue(), np.float32(expected))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_unused_in_a_scan_that_is_differentiated(wrap):
    outfeed = tr.OutfeedQueue()

    def loss(w, x):
        def layer(h, scale):
            outfeed.enqueue(h * scale)  # JAX would drop it: nothing is made of its result
            return wrap(lambda h: jnp.tanh(h * scale * w))(h), None

        return wrap(lambda x: jax.lax.scan(layer, x, jnp.float32([1, 2]))[0])(x)

    run(lambda w, x: w - 0.0 * jax.grad(loss)(w, x))
    expected = [s for x in XS for s in (x, 2 * np.tanh(x * np.float32(0.5)))]
    assert_close(outfeed.dequeue(), np.float32(expected))


def test_an_enqueue_that_custom_derivatives_drop_is_an_error_with_the_place():
    outfeed = tr.OutfeedQueue()

    @jax.custom_vjp
    def square(w):
        outfeed.enqueue(w)  # differentiation runs the function below instead
        return w * w

    square.defvjp(lambda w: (w * w, w), lambda w, ct: (2 * w * ct,))
    with pytest.raises(
        ProgramError,
        match=r"OutfeedQueue.enqueue at .*test_enqueue.py:\d+ is not in the traced program.*"
        r"forward function of its custom derivative",
    ):
        run(lambda w, x: w - 0.1 * jax.grad(lambda w: jax.jit(square)(w) * x)(w))


def test_inside_a_branch_only_what_was_made():
    outfeed, other = tr.OutfeedQueue(), tr.OutfeedQueue()

    def body(v, x):
        def large(x):
            outfeed.enqueue({"x": x, "twice": 2 * x})
            return x

        def small(x):
            other.enqueue(-x)
            return 0 * x

        return v + jax.lax.cond(x > 2.5, large, small, x)

    assert run(body, 0) == 12
    assert jax.tree.map(list, outfeed.dequeue()) == {"x": [3, 4, 5], "twice": [6, 8, 10]}
    assert other.dequeue().tolist() == [-1, -2]


def test_inside_nested_branches_and_loops():
    outfeed = tr.OutfeedQueue()

    def body(v, x):
        def inner(s):
            def send(s):
                return outfeed.enqueue(s)

            s = jax.lax.cond(s % 2 == 0, send, lambda s: s, s)
            return s + 1

        return tr.repeat(4, inner, v)

    assert run(body, 0) == 20
    assert outfeed.dequeue().tolist() == list(range(0, 20, 2))


def test_a_branch_in_mode_last_and_a_branch_never_taken():
    last, never = tr.OutfeedQueue("last"), tr.OutfeedQueue()

    def body(v, x):
        return jax.lax.switch(
            jnp.int32(x) % 3,
            [lambda x: last.enqueue(x), lambda x: x, lambda x: x],
            x,
        ) + jax.lax.cond(x > 100, lambda x: never.enqueue({"n": x})["n"], lambda x: x, x)

    run(body)
    assert last.dequeue() == 3
    assert never.dequeue()["n"].shape == (0,)


def test_inside_a_while_loop():
    outfeed = tr.OutfeedQueue()

    def body(v):
        outfeed.enqueue(v)
        return v * 2

    program = tr.compile(lambda v: tr.while_loop(lambda v: v < 50, body, v, maximum_iterations=10))
    assert program(jnp.int32(3)) == 96
    assert program(jnp.int32(40)) == 80
    assert outfeed.dequeue().tolist() == [3, 6, 12, 24, 48, 40]


def test_outside_of_any_loop():
    outfeed = tr.OutfeedQueue()
    program = tr.compile(lambda v: outfeed.enqueue({"v": v})["v"] + 1)
    assert [float(program(float(i))) for i in range(3)] == [1, 2, 3]
    assert outfeed.dequeue()["v"].tolist() == [0, 1, 2]


def test_integers_booleans_keys_of_dicts_and_numbers():
    outfeed = tr.OutfeedQueue()

    def body(v, x):
        outfeed.enqueue({2: x > 3, 1: (jnp.int8(x), 7, None)})
        return v

    run(body)
    found = outfeed.dequeue()
    assert found[2].dtype == bool
    assert found[2].tolist() == [False] * 3 + [True] * 2
    assert found[1][0].dtype == np.int8
    assert found[1][1].tolist() == [7] * 5
    assert found[1][2] is None


# -- sentences ----------------------------------------------------------------------------------


def test_twice_in_a_program_names_the_second_place():
    outfeed = tr.OutfeedQueue()

    def body(v, x):
        outfeed.enqueue(v)
        outfeed.enqueue(x)
        return v

    with pytest.raises(FeedError, match=r"once in a program.*again: .*test_enqueue.py:\d+"):
        run(body)


def test_once_in_each_of_two_loops_is_twice():
    outfeed = tr.OutfeedQueue()

    def program(v):
        v = tr.repeat(2, lambda v: outfeed.enqueue(v), v)
        return tr.repeat(2, lambda v: outfeed.enqueue(v), v)

    with pytest.raises(FeedError, match="An outfeed can be enqueued once in a program"):
        tr.compile(program)(0.0)


def test_outside_a_program():
    with pytest.raises(ProgramError, match=r"OutfeedQueue.enqueue means something only inside"):
        tr.OutfeedQueue().enqueue(1.0)


def test_nothing_to_send():
    outfeed = tr.OutfeedQueue()
    with pytest.raises(FeedError, match=r"needs at least one array. Received: enqueue\(\{\}\)"):
        tr.compile(lambda v: (outfeed.enqueue({}), v)[1])(0.0)


def test_what_cannot_leave_a_program():
    outfeed = tr.OutfeedQueue()
    with pytest.raises(FeedError, match=r"dim of size 0. Received: leaf \['e'\] of shape \(0, 2\)"):
        tr.compile(lambda v: (outfeed.enqueue({"e": jnp.zeros((0, 2))}), v)[1])(0.0)
    with pytest.raises(
        FeedError, match=r"the array, a random key. Send jax.random.key_data\(key\)"
    ):
        tr.compile(lambda v: (outfeed.enqueue(tr.key()), v)[1])(0.0)


def test_a_structure_that_another_program_did_not_use():
    outfeed = tr.OutfeedQueue()
    tr.compile(lambda v: outfeed.enqueue({"a": v})["a"])(0.0)
    with pytest.raises(FeedError, match=r"keeps elements of one structure.*one outfeed per kind"):
        tr.compile(lambda v: outfeed.enqueue((v, v))[0])(0.0)


def test_a_shape_that_does_not_fit_what_waits():
    outfeed = tr.OutfeedQueue()
    program = tr.compile(lambda v: outfeed.enqueue({"a": v})["a"])
    program(jnp.zeros(2))
    with pytest.raises(FeedError, match=r"\['a'\].*float32\[2\].*float32\[3\].*[Dd]equeue"):
        program(jnp.zeros(3))
    assert outfeed.dequeue()["a"].shape == (1, 2)
    program(jnp.zeros(3))
    assert outfeed.dequeue()["a"].shape == (1, 3)
