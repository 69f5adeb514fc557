"""The outfeed: modes and shapes, dequeue, iteration, streams, live records."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import DataExhausted, FeedError, OptionError

WAIT_S = 300  # only ever waited for when something is broken


def counting(outfeed, n=5, replicas=1, **options):
    """A program that sends {"i": step, "v": [replica, step]} n times."""

    def body(i):
        r = tr.replica()
        outfeed.enqueue({"i": i, "v": jnp.stack([r.astype(jnp.float32), i.astype(jnp.float32)])})
        return i + 1

    return tr.compile(lambda i: tr.repeat(n, body, i), replicas=replicas, **options)


@pytest.mark.parametrize(
    ("mode", "replicas", "shape"),
    [("all", 1, (5,)), ("all", 2, (5, 2)), ("last", 1, ()), ("last", 2, (2,))],
)
def test_shapes_by_mode_and_replicas(mode, replicas, shape):
    outfeed = tr.OutfeedQueue(mode)
    counting(outfeed, replicas=replicas)(jnp.int32(0))
    found = outfeed.dequeue()
    assert found["i"].shape == shape
    assert found["v"].shape == (*shape, 2)
    steps = np.arange(5, dtype=np.int32) if mode == "all" else np.int32(4)
    expected = np.broadcast_to(steps[..., None] if replicas == 2 else steps, shape)
    assert_bits_equal(found["i"], expected)
    if replicas == 2:
        assert found["v"][..., 0].reshape(-1, 2)[0].tolist() == [0, 1]


@pytest.mark.parametrize("replicas", [1, 2])
def test_executions_concatenate_until_they_are_dequeued(replicas):
    outfeed = tr.OutfeedQueue()
    program = counting(outfeed, n=2, replicas=replicas)
    for start in (0, 10, 20):
        program(jnp.int32(start))
    assert len(outfeed) == 6
    found = outfeed.dequeue()["i"].reshape(6, -1)[:, 0]
    assert found.tolist() == [0, 1, 10, 11, 20, 21]
    empty = outfeed.dequeue()
    lead = (0,) if replicas == 1 else (0, 2)
    assert {name: leaf.shape for name, leaf in empty.items()} == {"i": lead, "v": (*lead, 2)}
    assert empty["i"].dtype == np.int32
    assert len(outfeed) == 0
    assert outfeed
    program(jnp.int32(30))
    assert len(outfeed) == 2


def test_several_lengths_concatenate():
    outfeed = tr.OutfeedQueue()
    for n in (3, 0, 2):
        counting(outfeed, n=n)(jnp.int32(n))
    assert outfeed.dequeue()["i"].tolist() == [3, 4, 5, 2, 3]


def test_one_element_at_a_time():
    outfeed = tr.OutfeedQueue()
    program = counting(outfeed, n=3, replicas=2)
    program(jnp.int32(0))
    program(jnp.int32(5))
    elements = list(outfeed)
    assert [int(e["i"][0]) for e in elements] == [0, 1, 2, 5, 6, 7]
    assert elements[0]["v"].shape == (2, 2)
    assert list(outfeed) == []
    assert outfeed.dequeue()["i"].shape == (0, 2)


def test_last_is_of_the_latest_execution():
    outfeed = tr.OutfeedQueue("last")
    program = counting(outfeed)
    program(jnp.int32(0))
    program(jnp.int32(10))
    assert outfeed.dequeue()["i"] == 14
    with pytest.raises(FeedError, match=r"gives its value once.*run a program .* again"):
        outfeed.dequeue()
    program(jnp.int32(20))
    assert outfeed.dequeue()["i"] == 24


def test_what_waits_does_not_hold_the_device():
    """Of many executions, only the latest block is still on the device."""
    outfeed = tr.OutfeedQueue()
    program = counting(outfeed)
    for _ in range(4):
        program(jnp.int32(0))
    on_device = [block for block in outfeed._blocks if block._leaves]
    assert len(on_device) == 1


# -- sentences ----------------------------------------------------------------------------------


def test_before_anything_ran():
    with pytest.raises(FeedError, match="no program has sent anything to this outfeed"):
        tr.OutfeedQueue().dequeue()
    with pytest.raises(FeedError, match=r"only after a program has run .* Run the program first"):
        tr.OutfeedQueue("last").dequeue()
    assert list(tr.OutfeedQueue()) == []


@pytest.mark.parametrize("mode", ["first", 3, None])
def test_a_bad_mode(mode):
    with pytest.raises(OptionError, match=f"is one of 'all', 'last'. Received: {mode!r}"):
        tr.OutfeedQueue(mode)


def test_last_is_not_live_and_not_iterated():
    with pytest.raises(OptionError, match="a live outfeed delivers every element|A live outfeed"):
        tr.OutfeedQueue("last", live=True)
    outfeed = tr.OutfeedQueue(tr.OutfeedMode.LAST)
    for use, what in ((iter, "Iterating over"), (tr.OutfeedQueue.stream, "Streaming")):
        with pytest.raises(FeedError, match=rf"{what} an outfeed needs mode 'all'"):
            next(use(outfeed))


def test_another_number_of_replicas_while_elements_wait():
    outfeed = tr.OutfeedQueue()
    counting(outfeed)(jnp.int32(0))
    with pytest.raises(FeedError, match=r"leaf \['i'\] is int32\[\]. Received: int32\[2\]"):
        counting(outfeed, replicas=2)(jnp.int32(0))


def test_its_text():
    assert repr(tr.OutfeedQueue(live=True)) == "OutfeedQueue(mode='all', live=True)"


# -- streams ------------------------------------------------------------------------------------


def collect(outfeed):
    """Read the stream in a thread; returns (thread, list that fills)."""
    seen = []

    def read():
        stream = outfeed.stream(timeout_s=WAIT_S)
        seen.extend(int(np.ravel(e["i"])[0]) for e in stream)

    thread = threading.Thread(target=read)
    thread.start()
    return thread, seen


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_stream_that_starts_before_the_program(live, replicas):
    outfeed = tr.OutfeedQueue(live=live)
    program = counting(outfeed, n=20, replicas=replicas)
    thread, seen = collect(outfeed)
    program(jnp.int32(0))
    thread.join(WAIT_S)
    assert seen == list(range(20))


def test_a_stream_after_the_program_gives_what_waits_and_ends():
    outfeed = tr.OutfeedQueue()
    counting(outfeed)(jnp.int32(0))
    assert [int(e["i"]) for e in outfeed.stream()] == [0, 1, 2, 3, 4]


def test_a_stream_ends_when_the_program_fails():
    infeed, outfeed = tr.InfeedQueue([np.int32(0)] * 3), tr.OutfeedQueue(live=True)

    def body(i, x):
        outfeed.enqueue({"i": i})
        return i + 1

    program = tr.compile(lambda i: tr.repeat(5, body, i, infeed=infeed))
    thread, seen = collect(outfeed)
    with pytest.raises(DataExhausted):
        program(jnp.int32(0))
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert seen in ([0], [0, 1], [0, 1, 2])  # how far it got depends on how it was cut


def test_a_stream_of_nothing_gives_up():
    with pytest.raises(FeedError, match=r"was started within 0 seconds.*raise timeout_s"):
        next(tr.OutfeedQueue().stream(timeout_s=0))


# -- live ---------------------------------------------------------------------------------------


def test_live_in_a_loop_at_the_top_is_cut_into_pieces():
    """The first pass is a dispatch of its own, so its record is there before the others run."""
    live, plain = tr.OutfeedQueue(live=True), tr.OutfeedQueue()
    programs = [counting(live, n=40), counting(plain, n=40)]
    for program in programs:
        program(jnp.int32(0))
    assert programs[0].executions > 1
    assert programs[1].executions == 1
    assert_bits_equal(live.dequeue(), plain.dequeue())


def test_live_records_arrive_while_the_program_runs():
    """The infeed's producer waits for the record of the first pass: without it, nothing goes on."""
    outfeed, arrived = tr.OutfeedQueue(live=True), threading.Event()

    def elements():
        for i in range(6):
            if i == 2:
                assert arrived.wait(WAIT_S), "no record came while the program ran"
            yield np.int32(i)

    def body(v, x):
        outfeed.enqueue({"i": x})
        return v + x

    infeed = tr.InfeedQueue(elements(), prefetch=0)
    program = tr.compile(lambda v: tr.repeat(6, body, v, infeed=infeed))
    seen = []

    def read():
        for element in outfeed.stream(timeout_s=WAIT_S):
            seen.append(int(element["i"]))
            arrived.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert program(0) == 15
    thread.join(WAIT_S)
    assert seen == list(range(6))


def test_live_deeper_inside_by_callback_in_order():
    inner, outer = tr.OutfeedQueue(live=True), tr.OutfeedQueue()

    def inner_body(i):
        inner.enqueue({"i": i, "square": i * i})
        return i + 1

    def outer_body(i):
        i = tr.repeat(3, inner_body, i)
        outer.enqueue(i)
        return i

    program = tr.compile(lambda i: tr.repeat(4, outer_body, i))
    thread, seen = collect(inner)
    assert program(jnp.int32(0)) == 12
    thread.join(WAIT_S)
    assert seen == list(range(12))
    assert outer.dequeue().tolist() == [3, 6, 9, 12]
    program(jnp.int32(100))
    found = inner.dequeue()
    assert found["i"].tolist() == list(range(100, 112))
    assert found["square"].tolist() == [i * i for i in range(100, 112)]


def test_live_inside_a_branch_and_gradient():
    outfeed = tr.OutfeedQueue(live=True)

    def loss(w, i):
        h = jax.lax.cond(i % 2 == 0, lambda h: outfeed.enqueue({"i": h})["i"], lambda h: h, w * 2)
        return h * h

    def body(s):
        i, w = s
        return i + 1, w - 0.125 * jax.grad(loss)(w, i)

    tr.compile(lambda w: tr.repeat(4, body, (jnp.int32(0), w)))(jnp.float32(8))
    # w goes 8, 0, 0, ...: its gradient is 8 w, an eighth of which is all of it.
    assert outfeed.dequeue()["i"].tolist() == [16.0, 0.0]


def test_live_inside_a_recomputation_is_sent_once():
    outfeed = tr.OutfeedQueue(live=True)

    @jax.checkpoint
    def loss(w, i):
        return jnp.sin(outfeed.enqueue({"i": w * i})["i"])

    def body(s):
        i, w = s
        return i + 1, w + 0 * jax.grad(loss)(w, i.astype(jnp.float32))

    # In a function of its own, so that it is not at the top of the program.
    inner = lambda s: tr.repeat(3, body, s)  # noqa: E731
    program = tr.compile(lambda w: tr.repeat(2, inner, (jnp.int32(0), w)))
    assert program(jnp.float32(2))[1] == 2
    assert outfeed.dequeue()["i"].tolist() == [0, 2, 4, 6, 8, 10]


def test_live_deeper_inside_with_replicas_is_refused():
    outfeed = tr.OutfeedQueue(live=True)

    def outer(i):
        return tr.repeat(2, lambda i: outfeed.enqueue(i) + 1, i)

    with pytest.raises(FeedError, match=r"With several replicas a live outfeed must .*live=False"):
        tr.compile(lambda i: tr.repeat(2, outer, i), replicas=2)(jnp.int32(0))


@pytest.mark.parametrize("replicas", [1, 2])
def test_live_at_the_top_with_replicas_and_an_infeed(replicas):
    outfeed = tr.OutfeedQueue(live=True)
    infeed = tr.InfeedQueue([np.int32(i) for i in range(30)])

    def body(v, x):
        outfeed.enqueue({"i": x})
        return v + tr.cross_replica_sum(x)

    program = tr.compile(lambda v: tr.repeat(15, body, v, infeed=infeed), replicas=replicas)
    total = 15 * replicas
    assert program(0) == sum(range(total))
    assert outfeed.dequeue()["i"].reshape(-1).tolist() == list(range(total))
    assert infeed.position == total
