"""The numeric examples of the reference (1.13), in our words."""

import jax.numpy as jnp
import numpy as np
import pytest

import tailrace as tr
from oracles import assert_bits_equal, inc


def add(v, x):
    return v + x


def add_pair(v, x, y):
    return v + x + y


def halves(n, repeat=100):
    """Elements (x, (x + 10) / 2) of inc(n)."""
    return [(x, (x + np.float32(10)) / np.float32(2)) for (x,) in inc(n, repeat=repeat)]


def run(n, body, start, dataset, **options):
    infeed = tr.InfeedQueue(dataset)
    return tr.compile(lambda v: tr.repeat(n, body, v, infeed=infeed), **options)(jnp.float32(start))


def test_twenty_passes_over_a_repeated_dataset():
    assert run(20, add, 1, inc(10)) == 91


def test_a_finite_dataset_read_to_its_end():
    assert run(10, add, 1, inc(10, repeat=1)) == 46


@pytest.mark.parametrize("mode", ["all", "last"])
def test_a_tuple_element_and_both_modes(mode):
    outfeed = tr.OutfeedQueue(mode)

    def body(v, x, y):
        v = v + x + y
        outfeed.enqueue(v)
        return v

    assert run(5, body, 0, halves(3)) == 31
    expected = {"all": [5, 11.5, 19.5, 24.5, 31], "last": 31}[mode]
    assert_bits_equal(outfeed.dequeue(), np.asarray(expected, np.float32))


def test_two_loops_read_one_infeed_in_turn():
    infeed = tr.InfeedQueue(inc(2))

    def both(v):
        v = tr.repeat(5, add, v, infeed=infeed)
        return tr.repeat(5, add, v, infeed=infeed)

    assert tr.compile(both)(jnp.float32(0)) == 5


def test_while_loop():
    infeed = tr.InfeedQueue(halves(3))

    def loop(state):
        return tr.while_loop(
            lambda s: s["i"] < 20,
            lambda s, x, y: {"i": s["i"] + 1, "v": s["v"] + x + y},
            state,
            infeed=infeed,
            maximum_iterations=20,
        )

    assert tr.compile(loop)({"i": 0, "v": jnp.float32(1)})["v"] == 129.5


def test_the_stream_keeps_its_place_across_programs():
    infeed = tr.InfeedQueue(inc(10))
    programs = {n: tr.compile(lambda v, n=n: tr.repeat(n, add, v, infeed=infeed)) for n in (0, 2)}
    results = [float(programs[n](jnp.float32(0))) for n in (0, 2, 2, 2)]
    assert results == [0, 1, 5, 9]


def test_two_outfeeds_in_nested_loops():
    outer, inner = tr.OutfeedQueue(), tr.OutfeedQueue()

    def inner_body(v):
        inner.enqueue(v)
        return v + 1

    def outer_body(v):
        outer.enqueue(v)
        return tr.repeat(10, inner_body, v)

    assert tr.compile(lambda v: tr.repeat(10, outer_body, v))(jnp.int32(0)) == 100
    assert outer.dequeue().tolist() == list(range(0, 100, 10))
    assert inner.dequeue().tolist() == list(range(100))


def test_sums_over_two_replicas():
    outfeed = tr.OutfeedQueue()

    def body(v, x):
        v = tr.cross_replica_sum(v + x)
        outfeed.enqueue(v)
        return v

    infeed = tr.InfeedQueue(inc(3, (2,)))
    program = tr.compile(lambda v: tr.repeat(5, body, v, infeed=infeed), replicas=2)
    program(jnp.zeros(2))
    expected = np.broadcast_to(np.float32([1, 4, 11, 23, 48])[:, None, None], (5, 2, 2))
    assert_bits_equal(outfeed.dequeue(), expected)


@pytest.mark.parametrize(
    ("dtype", "step", "expected"),
    [
        (np.int8, 1, [-4, -3, -2, -1, 0, 1, 2, 3, 4, 5]),
        (np.uint8, -1, [250, 251, 252, 253, 254, 255, 0, 1, 2, 3]),
    ],
)
def test_bytes_stay_bytes(dtype, step, expected):
    outfeed = tr.OutfeedQueue()
    values = (np.arange(10) - 5).astype(dtype)
    # -1 on unsigned bytes wraps around, on the host as on the device.
    moved = np.array(step).astype(dtype)

    def body(x):
        outfeed.enqueue(x + moved)

    infeed = tr.InfeedQueue(list(values))
    tr.compile(lambda: tr.repeat(10, body, infeed=infeed))()
    found = outfeed.dequeue()
    assert found.dtype == dtype

    assert found.tolist() == expected


def test_dequeue_gives_each_element_once():
    outfeed = tr.OutfeedQueue()
    infeed = tr.InfeedQueue([(np.full(2, i, np.float32), np.float32(i)) for i in range(15)])

    def body(x, y):
        outfeed.enqueue((x, y))

    ten = tr.compile(lambda: tr.repeat(10, body, infeed=infeed))
    five = tr.compile(lambda: tr.repeat(5, body, infeed=infeed))
    ten()
    assert [leaf.shape for leaf in outfeed.dequeue()] == [(10, 2), (10,)]
    assert [leaf.shape for leaf in outfeed.dequeue()] == [(0, 2), (0,)]
    five()
    assert [float(y) for _, y in outfeed] == [10, 11, 12, 13, 14]
    assert [leaf.shape for leaf in outfeed.dequeue()] == [(0, 2), (0,)]
