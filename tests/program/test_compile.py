"""`tr.compile`: dispatches, pieces of long loops, and the caller's arrays."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_loss, regression
from tailrace.errors import DataExhausted, ProgramError
from tailrace.feeds import dispatch_table
from tailrace.program.running.dispatch_lengths import good_piece, piece_within, pieces

ELEMENTS = regression(24)


@pytest.fixture
def small_budget(monkeypatch):
    """Limit the bytes of elements that a loop stages at once."""

    def set_bytes(most):
        monkeypatch.setattr(dispatch_table, "most_bytes", lambda: most)

    return set_bytes


def training(n, outfeed, infeed, **options):
    def body(params, x, y):
        (loss, _), grads = jax.value_and_grad(mlp_loss, has_aux=True)(params, x, y)
        grads = tr.cross_replica_mean(grads)
        noise = jax.random.normal(tr.key(), ()) if options.get("replicas", 1) == 1 else 0.0
        outfeed.enqueue({"loss": loss, "step": tr.step(), "noise": jnp.float32(noise)})
        return jax.tree.map(lambda p, g: p - 0.1 * g + 0.001 * noise, params, grads)

    return tr.compile(lambda p: tr.repeat(n, body, p, infeed=infeed), **options)


@pytest.mark.parametrize("replicas", [1, 2])
def test_pieces_equal_one_dispatch_to_the_bit(small_budget, replicas):
    n = 24 // replicas
    results = []
    # 64 bytes an element (4 x 3 floats and 4 floats): 10 of them, then all.
    for most, executions in ((64 * 10, 3), (1 << 20, 1)):
        small_budget(most)
        infeed, outfeed = tr.InfeedQueue(ELEMENTS), tr.OutfeedQueue()
        program = training(n, outfeed, infeed, replicas=replicas)
        params = program(mlp())
        results.append((params, outfeed.dequeue()))
        assert program.executions == executions
        assert program.steps == n
        assert infeed.position == 24
    assert_bits_equal(results[0], results[1])


def test_pieces_that_do_not_divide_the_loop(small_budget):
    small_budget(64 * 7)
    infeed, outfeed = tr.InfeedQueue(ELEMENTS), tr.OutfeedQueue()
    program = training(23, outfeed, infeed)
    program(mlp())
    assert program.executions == 4
    assert outfeed.dequeue()["step"].tolist() == list(range(23))
    assert infeed.position == 23


def test_code_around_a_loop_that_runs_in_pieces(small_budget):
    def function(infeed, outfeed):
        def whole(v, scale):
            before = jnp.sin(v) * scale
            after = tr.repeat(
                24, lambda s, x, y: s + x.mean() * before + scale, before, infeed=infeed
            )
            last = tr.repeat(3, lambda s: outfeed.enqueue(s * 2), after)
            return {"all": (before, after, last), "v": v, "number": 3}

        return whole

    results = []
    for most, executions in ((64 * 8, 5), (1 << 20, 1)):
        small_budget(most)
        infeed, outfeed = tr.InfeedQueue(ELEMENTS), tr.OutfeedQueue()
        program = tr.compile(function(infeed, outfeed))
        results.append((program(jnp.float32(0.3), jnp.float32(2)), outfeed.dequeue()))
        assert program.executions == executions
    assert_bits_equal(results[0], results[1])


def test_two_long_loops_and_one_infeed(small_budget):
    small_budget(64 * 5)
    infeed = tr.InfeedQueue(ELEMENTS)
    add = lambda s, x, y: s + x.sum()  # noqa: E731

    def both(v):
        return tr.repeat(9, add, tr.repeat(11, add, v, infeed=infeed), infeed=infeed)

    program = tr.compile(both)
    found = program(jnp.float32(0))
    expected = jnp.float32(0)
    for x, _ in ELEMENTS[:20]:
        expected = expected + x.sum()
    assert program.executions == 6  # 5 + 5 + 1 and 3 + 3 + 3
    assert infeed.position == 20
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_loop_that_fails_in_its_middle_keeps_the_rest(small_budget):
    small_budget(64 * 4)
    infeed, outfeed = tr.InfeedQueue(ELEMENTS[:10]), tr.OutfeedQueue()
    program = training(12, outfeed, infeed)
    with pytest.raises(DataExhausted, match="Asked for 4, found 2"):
        program(mlp())
    assert infeed.position == 8
    assert outfeed.dequeue()["step"].tolist() == list(range(8))
    two = training(2, outfeed, infeed)
    two(mlp())
    assert infeed.position == 10


def test_last_mode_over_pieces(small_budget):
    """The last element that was made, in whichever piece that was."""
    small_budget(64 * 6)
    infeed, early, last = tr.InfeedQueue(ELEMENTS), tr.OutfeedQueue("last"), tr.OutfeedQueue("last")

    def body(i, x, y):
        jax.lax.cond(i < 3, lambda i: early.enqueue(i), lambda i: i, i)
        last.enqueue(i)
        return i + 1

    tr.compile(lambda i: tr.repeat(24, body, i, infeed=infeed))(jnp.int32(0))
    assert early.dequeue() == 2
    assert last.dequeue() == 23


def test_the_callers_arrays_survive(small_budget):
    small_budget(64 * 6)
    start = jax.tree.map(jnp.asarray, mlp())
    kept = jax.tree.map(np.array, start)
    infeed, outfeed = tr.InfeedQueue(ELEMENTS), tr.OutfeedQueue()
    program = training(12, outfeed, infeed)
    first = program(start)
    first_kept = jax.tree.map(np.array, first)
    second = program(first)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((start, first, second)))
    assert_bits_equal(start, kept)
    assert_bits_equal(first, first_kept)


def test_numpy_arguments_are_not_written_to(small_budget):
    small_budget(64 * 6)
    start = mlp()
    kept = jax.tree.map(np.copy, start)
    program = training(24, tr.OutfeedQueue(), tr.InfeedQueue(ELEMENTS))
    jax.block_until_ready(program(start))
    assert_bits_equal(start, kept)


def test_a_constant_of_the_function_survives(small_budget):
    small_budget(64 * 6)
    constant = jnp.arange(3.0)
    infeed = tr.InfeedQueue(ELEMENTS, prefetch=0)
    body = lambda s, x, y: s + x[0] * constant  # noqa: E731
    program = tr.compile(lambda: tr.repeat(12, body, constant, infeed=infeed))
    first, second = program(), program()
    assert not constant.is_deleted()
    assert not np.array_equal(first, second)


def test_each_form_of_arguments_is_traced_once():
    traced = []

    def function(x):
        traced.append(jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), x))
        return jax.tree.map(lambda leaf: leaf + 1, x)

    program = tr.compile(function)
    for x in (1.0, 2.0, np.float32(1), np.ones(3, np.float32), {"a": 1}, {"a": 5}, np.ones(3, int)):
        program(x)
    shapes = [((), "float32"), ((), "float32"), ((3,), "float32"), {"a": ((), "int32")}]
    assert traced == [*shapes, ((3,), "int32")]


def test_a_function_that_is_jitted_already():
    infeed = tr.InfeedQueue(ELEMENTS)
    function = jax.jit(lambda v: tr.repeat(3, lambda v, x, y: v + y.sum(), v, infeed=infeed))
    expected = sum(y.sum() for _, y in ELEMENTS[:3])
    np.testing.assert_allclose(tr.compile(function)(0.0), expected, rtol=1e-5)


def test_a_feed_where_nobody_can_look():
    outfeed = tr.OutfeedQueue()

    def program(v):
        return jax.pure_callback(lambda v: v, v, outfeed.enqueue(v))

    assert tr.compile(program)(jnp.float32(1)) == 1
    assert outfeed.dequeue().tolist() == [1]


NOT_ARRAYS = [
    ("x", "str. Leave"),
    ({"a": ["b"]}, r"str at \['a'\]\[0\]. Leave"),
    (object(), "object"),
]


@pytest.mark.parametrize(("given", "received"), NOT_ARRAYS)
@pytest.mark.parametrize(
    ("rule", "call"),
    [
        ("tr.stage_boundary takes", tr.stage_boundary),
        ("tr.recomputation_checkpoint takes", tr.recomputation_checkpoint),
        ("tr.cross_replica_sum takes", tr.cross_replica_sum),
        ("tr.cross_replica_mean takes", tr.cross_replica_mean),
        ("tr.repeat carries", lambda given: tr.repeat(2, lambda x: x, given)),
        (
            "The body of a loop returns",
            lambda given: tr.repeat(2, lambda _: given, jax.tree.map(lambda _: 1.0, given)),
        ),
        ("tr.while_loop carries", lambda given: tr.while_loop(bool, lambda x: x, given)),
        ("OutfeedQueue.enqueue sends", tr.OutfeedQueue().enqueue),
        ("A program returns", lambda given: given),
    ],
)
def test_functions_of_arrays_name_what_is_none(rule, call, given, received):
    expected = f"{rule} trees of arrays and numbers. Received: {received}"
    with pytest.raises(tr.TailraceError, match=expected):
        tr.compile(lambda: call(given))()


@pytest.mark.parametrize(
    "call",
    [
        tr.observe(lambda x: x, ["*"]),
        lambda x: tr.diff(jnp.sin, jnp.sin, x),
        lambda x: tr.balance(lambda p, x: x * p, jnp.ones(2), x, stages=1),
    ],
)
def test_calls_with_what_is_no_array(call):
    with pytest.raises(tr.TailraceError, match=r"takes trees of arrays .* Received: str at \["):
        call("x")


def test_what_jax_converts_to_an_array_is_one():
    class Variable:
        def __jax_array__(self):
            return jnp.float32(3)

    assert float(tr.compile(lambda: tr.repeat(2, lambda x: x + 1, Variable()))()) == 5
    assert float(tr.compile(lambda: tr.cross_replica_sum(Variable()))()) == 3


def test_arguments_that_are_no_arrays():
    with pytest.raises(ProgramError, match=r"Received: str at \[0\]\['name'\]"):
        tr.compile(lambda x: x["v"])({"v": 1.0, "name": "a"})


# -- how loops are cut --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 64, 97, 100, 1000])
@pytest.mark.parametrize("most", [1, 2, 9, 50, 2000])
@pytest.mark.parametrize("multiple", [1, 3])
def test_pieces_cover_the_loop(length, most, multiple):
    piece = good_piece(length, most, multiple)
    assert 1 <= piece <= max(most, multiple, 1)
    assert piece % multiple == 0 or piece == length
    cut = list(pieces(length, piece))
    assert sum(cut) == length
    assert all(part == piece for part in cut[:-1])
    if multiple == 1 and most > 1:
        best = max((d for d in range(1, most + 1) if length % d == 0), default=1)
        assert best <= most // 2 or piece >= best or length % piece == 0


def test_elements_without_bytes_do_not_limit():
    assert piece_within(1000, 0) == 1000
    assert piece_within(10, 1 << 40) == 1


QUEUES_OF_THEIR_OWN = """
import gc, threading, time, weakref
import jax, jax.numpy as jnp
import tailrace as tr

def run():
    infeed, outfeed = tr.InfeedQueue([jnp.float32(i) for i in range(8)]), tr.OutfeedQueue()

    def body(w, x):
        loss, gradient = jax.value_and_grad(lambda w: w * x)(w)
        outfeed.enqueue(loss)
        return w - gradient

    tr.compile(lambda w: tr.repeat(4, body, w, infeed=infeed))(jnp.float32(0))
    return weakref.ref(infeed), weakref.ref(outfeed)

alive = run()
give_up = time.monotonic() + 120  # what is staged just now holds its queue until it is done
while threading.active_count() > 1 and time.monotonic() < give_up:
    gc.collect()
    time.sleep(0.01)
assert [ref() for ref in alive] == [None, None], alive
assert threading.active_count() == 1, threading.enumerate()
"""


def test_queues_and_their_threads_go_with_the_program():
    """JAX's caches outlive a program; in a process of its own, because ours watches its queues."""
    subprocess.run([sys.executable, "-c", QUEUES_OF_THEIR_OWN], check=True, timeout=600)


def test_an_observed_loop_without_enough_elements_consumes_none():
    infeed = tr.InfeedQueue([np.int32(i) for i in range(7)])
    body = lambda t, x: t + x  # noqa: E731
    loop = lambda t: tr.repeat(8, body, t, infeed=infeed)  # noqa: E731
    program = tr.compile(loop, observe=[tr.Tap("activation/*:add", mode=tr.every(2))])
    with pytest.raises(DataExhausted, match="Asked for 8, found 7"):
        program(jnp.int32(0))
    assert infeed.position == 0
    assert int(tr.compile(lambda t: tr.repeat(7, body, t, infeed=infeed))(jnp.int32(0))) == 21
