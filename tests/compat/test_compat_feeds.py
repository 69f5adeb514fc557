"""The closed-form examples of the original's feeds and loops."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from counting import Inc, infeed, run, use, with_half

import tailrace as tr
from tailrace.compat import ipu
from tailrace.compat.ipu import ipu_compiler, ipu_infeed_queue, loops
from tailrace.compat.ipu.ipu_infeed_queue import IPUInfeedQueue, IPUIterator
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
from tailrace.compat.ipu.ops import cross_replica_ops, internal_ops
from waits import LIMIT_S


def add(v, x):
    return v + x


def add_both(v, x, y):
    return v + x + y


# -- numbers --------------------------------------------------------------------------------------


def test_a_loop_adds_what_it_is_fed():
    queue = infeed(10)
    assert run(lambda v: loops.repeat(20, add, [v], queue), 1.0) == [91]
    assert queue.dequeued
    assert queue.number_of_tuple_elements == 1


def test_a_finite_dataset_may_be_used_up_and_no_further():
    queue = infeed(10, repeat=False)
    program = ipu_compiler.compile(lambda v: loops.repeat(10, add, [v], queue), [1.0])
    assert program() == [46]
    with pytest.raises(ipu.errors.OutOfRangeError, match="Infeed dataset iterator out of range"):
        program()


def test_a_tuple_and_both_modes_of_the_outfeed():
    every, last = IPUOutfeedQueue(), IPUOutfeedQueue(IPUOutfeedMode.LAST)
    queue = infeed(3, element=with_half)

    def body(v, x, y):
        v = v + x + y
        return v, every.enqueue(v), last.enqueue(v)

    assert run(lambda v: loops.repeat(5, body, [v], queue), 0.0) == [31]
    np.testing.assert_array_equal(every.dequeue(), np.float32([5, 11.5, 19.5, 24.5, 31]))
    assert np.ndim(value := last.dequeue()) == 0
    assert value == 31


def test_two_loops_read_one_after_the_other():
    queue = infeed(2)

    def net(v):
        return loops.repeat(5, add, [loops.repeat(5, add, [v], queue)], queue)

    assert run(net, 0.0) == [5]


@pytest.mark.parametrize("said", [20, None])
def test_a_while_loop(said):
    queue = infeed(3, element=with_half)

    def net(i, v):
        return loops.while_loop(
            lambda i, v: i < 20,
            lambda i, v, x, y: (i + 1, v + x + y),
            (i, v),
            queue,
            maximum_iterations=said,
        )

    program = ipu_compiler.compile(net, [0, 1.0])
    assert program() == [20, 129.5]
    # What it did not read is still there: 20 elements on, the next one is 20 % 3 = 2.
    assert run(lambda v: loops.repeat(1, add_both, [v], queue), 0.0) == [8]


def test_a_while_loop_that_wants_more_than_there_is():
    queue = infeed(5, repeat=False)
    with pytest.raises(ipu.errors.OutOfRangeError, match="wanted more than 5 passes"):
        run(lambda v: loops.while_loop(lambda v: v < 100, add, [v], queue), 0.0)


def test_the_place_in_the_stream_is_kept():
    queue = infeed(10)
    program = ipu_compiler.compile(lambda n: loops.repeat(n, add, [0.0], queue), [0])
    assert [program(n)[0] for n in (0, 2, 2, 2)] == [0, 1, 5, 9]


def test_a_loop_in_a_loop_with_an_outfeed_each():
    outer, inner = IPUOutfeedQueue(), IPUOutfeedQueue()

    def inner_body(v):
        return v + 1, inner.enqueue(v)

    def outer_body(v):
        sent = outer.enqueue(v)
        return loops.repeat(10, inner_body, v), sent

    assert run(lambda v: loops.repeat(10, outer_body, [v]), 0.0) == [100]
    np.testing.assert_array_equal(outer.dequeue(), np.arange(0, 100, 10, np.float32))
    np.testing.assert_array_equal(inner.dequeue(), np.arange(100, dtype=np.float32))


def test_replicas_get_elements_in_turn():
    use(2)
    queue, out = infeed(3, (2,)), IPUOutfeedQueue()

    def body(v, x):
        v = cross_replica_ops.cross_replica_sum(v + x)
        return v, out.enqueue(v)

    run(lambda v: loops.repeat(5, body, [v], queue), np.zeros(2, np.float32))
    found = out.dequeue()
    assert found.shape == (5, 2, 2)
    expected = np.broadcast_to(np.float32([1, 4, 11, 23, 48])[:, None, None], (5, 2, 2))
    np.testing.assert_array_equal(found, expected)
    use(1)
    with pytest.raises(ipu.errors.FailedPreconditionError, match="replication factor 2 when it"):
        run(lambda v: loops.repeat(1, add, [v], queue), np.zeros(2, np.float32))


def test_small_integers():
    def element(x):
        return ((x - 5).astype(np.int8), (x - 5).astype(np.int8).astype(np.uint8))

    queue, out = infeed(10, element=element), IPUOutfeedQueue()

    def body(a, b):
        return out.enqueue((a + jnp.int8(1), b - jnp.uint8(1)))

    assert run(lambda: loops.repeat(10, body, [], queue)) is None
    signed, unsigned = out.dequeue()
    assert signed.dtype == np.int8
    np.testing.assert_array_equal(signed, np.arange(-4, 6))
    np.testing.assert_array_equal(unsigned, [250, 251, 252, 253, 254, 255, 0, 1, 2, 3])


def test_an_element_that_is_a_dict_is_passed_by_name():
    queue = infeed(3, element=lambda x: {"b": x, "a": 10 * x})
    assert run(lambda v: loops.repeat(3, lambda v, a, b: v + a - b, [v], queue), 0.0) == [27]
    pair = infeed(3, element=lambda x: ({"b": x}, x))
    assert run(lambda v: loops.repeat(3, lambda v, d, x: v + d["b"] + x, [v], pair), 0.0) == [6]


# -- the outfeed on the host ----------------------------------------------------------------------


def test_dequeue_takes_everything_and_leaves_nothing():
    queue, out = infeed(5, element=lambda x: (np.full(2, x), x)), IPUOutfeedQueue()
    program = ipu_compiler.compile(
        lambda n: loops.repeat(n, lambda x, y: out.enqueue({"y": y, "x": x}), [], queue), [5]
    )
    program(5)
    program(5)
    found = out.dequeue()
    assert list(found) == ["y", "x"]
    assert found["x"].shape == (10, 2)
    assert out.dequeue()["x"].shape == (0, 2)
    assert list(out) == []
    program(5)
    elements = list(out)
    assert [element["y"] for element in elements] == [0, 1, 2, 3, 4]
    assert elements[3]["x"].shape == (2,)


def test_keys_of_any_kind():
    out = IPUOutfeedQueue()
    run(lambda: loops.repeat(2, lambda: out.enqueue({2: 1.0, "b": [2.0, (3.0,)]}), []))
    found = out.dequeue()
    assert list(found) == [2, "b"]
    assert found["b"][1][0].tolist() == [3, 3]


def test_a_queue_is_enqueued_once():
    out = IPUOutfeedQueue()

    def body(v):
        out.enqueue(v)
        return v, out.enqueue(v)

    with pytest.raises(ValueError, match="An outfeed can only be enqueued once"):
        run(lambda v: loops.repeat(2, body, [v]), 0.0)


def test_another_program_may_use_it_again():
    out = IPUOutfeedQueue()
    for start in (0.0, 5.0):
        run(lambda v: loops.repeat(2, lambda v: (v + 1, out.enqueue(v)), [v]), start)
    np.testing.assert_array_equal(out.dequeue(), np.float32([0, 1, 5, 6]))
    run(lambda v: loops.repeat(2, lambda v: (v + 1, out.enqueue(v)), [v]), 0.0)
    with pytest.raises(ipu.errors.FailedPreconditionError, match="different tensor shape or rep"):
        run(
            lambda v: loops.repeat(2, lambda v: (v + 1, out.enqueue(v)), [v]),
            np.zeros(3, np.float32),
        )


def test_before_anything_was_enqueued():
    assert IPUOutfeedQueue().dequeue() == []
    assert not IPUOutfeedQueue().enqueued
    out = IPUOutfeedQueue(IPUOutfeedMode.LAST)
    program = ipu_compiler.compile(
        lambda n: loops.repeat(n, lambda v: (v + 1, out.enqueue(v)), [0.0]), [0]
    )
    program(0)
    with pytest.raises(ipu.errors.FailedPreconditionError, match="before it was executed"):
        out.dequeue()
    with pytest.raises(RuntimeError, match="can only be iterated over if the outfeed_mode is"):
        iter(out)


def test_deleting():
    out = IPUOutfeedQueue()
    program = ipu_compiler.compile(lambda: loops.repeat(2, lambda: out.enqueue(1.0), []))
    program()
    assert out.enqueued
    out.deleter()
    assert out.dequeue() == []
    queue = infeed(10)
    take = ipu_compiler.compile(lambda: loops.repeat(3, add, [0.0], queue))
    assert take() == [3]
    assert queue.deleter() is None
    with pytest.raises(ipu.errors.FailedPreconditionError, match="Did you initialize the infeed"):
        take()
    with pytest.raises(ipu.errors.NotFoundError, match="Infeed with id="):
        queue.deleter  # noqa: B018
    queue.initializer()
    assert take() == [3]
    assert take() == [12]


def test_results_arrive_while_the_program_runs():
    out, seen = IPUOutfeedQueue(), []
    asked, arrived = threading.Event(), threading.Event()

    def watch():
        while sum(len(part) for part in seen) < 600:
            part = out.dequeue()
            asked.set()
            if len(part):
                seen.append(part)
                arrived.set()
            time.sleep(0.001)

    def elements():
        for number in range(600):
            if number == 590:  # the end of the program waits for its first results
                assert arrived.wait(LIMIT_S), "no result came while the program ran"
            yield np.float32(number)

    def body(v, x):
        return v + 1, out.enqueue(x)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    assert asked.wait(LIMIT_S)  # who asks before the program begins gets results while it runs
    queue = IPUInfeedQueue(elements)
    queue.initializer()
    run(lambda v: loops.repeat(600, body, [v], queue), 0.0)
    thread.join(LIMIT_S)
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(600, dtype=np.float32))
    assert len(seen) > 1


# -- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_ordinal": "x"}, ValueError, "Device ordinal must be an integer"),
        ({"device_ordinal": -1}, ValueError, "Device ordinal must be >= 0"),
        ({"prefetch_depth": -1}, ValueError, "prefetch_depth must be greater than zero"),
        ({"prefetch_depth": 256}, ValueError, "prefetch_depth must be less than 256"),
        ({"feed_name": "x"}, TypeError, "has no argument 'feed_name'"),
    ],
)
def test_arguments_of_an_infeed(options, error, message):
    with pytest.raises(error, match=message):
        IPUInfeedQueue(Inc(3), **options)
    assert IPUInfeedQueue(Inc(3), prefetch_depth=0).prefetch_depth == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outfeed_mode": "all"}, "Expected outfeed_mode value to be of ipu_outfeed_queue.IPUOutf"),
        ({"buffer_depth": 0}, "Outfeed buffer depth cannot be less than 1"),
        ({"buffer_depth": 256}, "Need prefetch_depth < 256"),
        ({"device_ordinal": 1.5}, "Device ordinal must be an integer"),
    ],
)
def test_arguments_of_an_outfeed(options, message):
    with pytest.raises(ValueError, match=message):
        IPUOutfeedQueue(**options)


def test_an_infeed_is_initialised_once_and_before_it_is_used():
    queue = IPUInfeedQueue(Inc(3))
    with pytest.raises(ipu.errors.FailedPreconditionError, match="which has not been created"):
        run(lambda: loops.repeat(1, add, [0.0], queue))
    assert queue.initializer() is None
    with pytest.raises(ValueError, match="can only be accessed once"):
        queue.initializer  # noqa: B018
    with pytest.raises(ValueError, match="obsolete"):
        queue.get_next()


def test_dtypes_that_no_feed_takes():
    queue = ipu_infeed_queue.IPUInfeedQueue([(np.float32(1), np.float64(1))])
    queue.initializer()
    message = "Unsupported datatype float64 on index 1 of feed operation"
    with pytest.raises(ipu.errors.FailedPreconditionError, match=message):
        run(lambda: loops.repeat(1, add_both, [0.0], queue))
    empty = ipu_infeed_queue.IPUInfeedQueue([np.zeros((0, 2), np.float32)])
    empty.initializer()
    message = "input tensor to an infeed queue with a dimension of size 0"
    with pytest.raises(ipu.errors.InvalidArgumentError, match=message):
        run(lambda: loops.repeat(1, add, [0.0], empty))
    message = "input tensor to an outfeed queue with a dimension of size 0"
    with pytest.raises(ipu.errors.InvalidArgumentError, match=message):
        run(lambda: loops.repeat(1, lambda: IPUOutfeedQueue().enqueue(jnp.zeros((0,))), []))


def test_a_dataset_of_tensorflow_has_static_shapes():
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.range(10).map(lambda x: tf.cast(x, tf.float32))
    with pytest.raises(
        ValueError, match="is not fully defined. If using tf.Dataset.batch, set dro"
    ):
        IPUInfeedQueue(dataset.batch(4))
    queue = IPUInfeedQueue(dataset.batch(5, drop_remainder=True).repeat())
    queue.initializer()
    assert run(lambda v: loops.repeat(2, add, [v], queue), np.zeros(5, np.float32))[0][4] == 13


def test_a_dataset_that_fails():
    def broken():
        yield np.float32(1)
        raise OSError("the disk is gone")

    queue = IPUInfeedQueue(broken)
    queue.initializer()
    with pytest.raises(tr.TailraceError, match="An infeed dataset iterator has failed.*disk"):
        run(lambda v: loops.repeat(2, add, [v], queue), 0.0)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (lambda v: v.astype(jnp.int32), TypeError, "Mismatch between input types and output types"),
        (lambda v: (v, v), TypeError, "Mismatch between input types and output types"),
        (lambda v, w: v, TypeError, "1 inputs, but the loop body needs exactly 2 arguments"),
        (lambda v, w, *rest: v, TypeError, "needs at least 2 arguments"),
        (lambda: 0, TypeError, "needs exactly 0 arguments"),
        (
            lambda v: (internal_ops.print_tensor(v), v),
            ValueError,
            "must return zero or more Tensor values followed by zero or more Operations",
        ),
    ],
)
def test_what_a_body_returns_and_takes(body, error, message):
    with pytest.raises(error, match=message):
        run(lambda v: loops.repeat(2, body, [v]), 0.0)


def test_what_a_fed_body_takes():
    queue = infeed(3, element=with_half)
    message = "1 inputs and 2 additional inputs from infeed, but the loop body needs exactly 2"
    with pytest.raises(TypeError, match=message):
        run(lambda v: loops.repeat(2, add, [v], queue), 0.0)
    with pytest.raises(TypeError, match="Supplied loop condition function cannot be called"):
        run(lambda v: loops.while_loop(lambda: True, lambda v: v, [v]), 0.0)
    with pytest.raises(TypeError, match="must be an IPUInfeedQueue"):
        run(lambda v: loops.repeat(2, add, [v], [1.0]), 0.0)


def test_a_loop_outside_of_a_program():
    with pytest.raises(tr.TailraceError, match="only inside a program"):
        loops.repeat(2, add, [0.0])


def test_what_a_program_returns():
    assert run(lambda: None) is None
    assert run(lambda v: v, 1.0) == [1]
    assert run(lambda v: (v, v + 1), 1.0) == [1, 2]
    assert run(lambda v: {"a": v, "b": [v]}, 1.0) == {"a": 1, "b": [1]}
    assert run(lambda v: loops.repeat(0, lambda v: v + 1, [v]), 3.0) == [3]
    with pytest.raises(ValueError, match="inputs is a list"):
        ipu_compiler.compile(lambda v: v, 1.0)


def test_logical_devices_and_scopes():
    from tailrace.compat.ipu import config

    cfg = config.IPUConfig()
    cfg.auto_select_ipus = [1, 1]
    cfg.configure_ipu_system()
    with ipu.scopes.ipu_scope("/device:IPU:1"):
        program = ipu_compiler.compile(lambda v: v + 1, [1.0])
    (found,) = program()
    assert [device.id for device in found.devices()] == [1]
    with (
        pytest.raises(ValueError, match="A device is named"),
        ipu.scopes.ipu_scope("/device:CPU:0"),
    ):
        pass


def test_an_iterator_is_read_in_a_program_only():
    iterator = IPUIterator(Inc(10))
    with pytest.raises(RuntimeError, match="can not be accessed in eager mode when inside"):
        next(iterator)
    with pytest.raises(NotImplementedError, match="get_next_as_optional"):
        iterator.get_next_as_optional()
    with pytest.raises(ValueError, match="Either dataset or both infeed_spec and element_spec"):
        IPUIterator()
    program = ipu_compiler.compile(lambda: [next(iterator)[0] + 10 * next(iterator)[0]])
    assert program() == [10]
    assert program() == [32]


def test_printing_from_a_program(capfd):
    run(lambda v: loops.repeat(2, lambda v: (v + 1, internal_ops.print_tensor(v, "v")), [v]), 1.0)
    printed = capfd.readouterr().err
    assert "v" in printed
    assert "2" in printed


def test_the_number_of_arguments_is_known_before_the_dataset_is_opened():
    real = pytest.importorskip("tensorflow")
    numbers = real.data.Dataset.from_tensor_slices(np.float32([1, 2]))
    forms = {1: lambda x: x, 2: lambda x: {"a": x, "b": x}, 3: lambda x: (x, {"a": x}, x)}
    for count, form in forms.items():
        queue = ipu.ipu_infeed_queue.IPUInfeedQueue(numbers.map(form))
        assert queue.number_of_tuple_elements == count
