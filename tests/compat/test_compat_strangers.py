"""Small programs as their authors left them, with only the imports changed, against plain ones."""

import collections

import numpy as np
import pytest
from counting import run, use

from oracles import assert_close

pytest.importorskip("keras")

import optax

from tailrace.compat import ipu
from tailrace.compat import tensorflow as tf
from tailrace.compat.tensorflow.compat import v1

Pair = collections.namedtuple("Pair", "x y")


def test_dicts_go_in_by_name_and_come_out_in_their_order():
    data = [{"b": np.float32(i), "a": np.float32(10 * i)} for i in range(8)]
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    _ = infeed.initializer

    def body(total, a, b):
        outfeed.enqueue({"z": total, "y": a - b})
        return total + a + b

    program = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(4, body, [0.0], infeed))
    assert [float(program()[0]), float(program()[0])] == [66.0, 242.0], "the second call goes on"
    found = outfeed.dequeue()
    assert list(found) == ["z", "y"]
    assert found["y"].tolist() == [9.0 * i for i in range(8)]
    assert found["z"].tolist() == [0, 0, 11, 33, 0, 44, 99, 165]


def test_named_tuples_of_lists_come_out_as_they_went_in():
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def body(i):
        outfeed.enqueue(Pair(i, (i * 2, [i * 3])))
        return i + 1

    run(lambda: ipu.loops.repeat(3, body, [1]))
    found = outfeed.dequeue()
    assert isinstance(found, Pair)
    assert found.x.tolist() == [1, 2, 3]
    assert found.y[1][0].tolist() == [3, 6, 9]
    assert isinstance(found.y, tuple)


def rows(count, width):
    return np.random.default_rng(0).normal(size=(count, width)).astype(np.float32)


def plain_descent(data, momentum, rate, batches):
    """Two layers, the mean of the gradients of some batches, descent with momentum."""
    import jax
    import jax.numpy as jnp

    params = [jnp.full((4, 3), 0.1), jnp.full((3, 1), 0.2)]

    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params[0]) @ params[1] - y) ** 2)

    optimizer = optax.sgd(rate, momentum)
    state = optimizer.init(params)
    for start in range(0, len(data), batches):
        grads = [jax.grad(loss)(params, *pair) for pair in data[start : start + batches]]
        mean = jax.tree.map(lambda *each: sum(each) / batches, *grads)
        updates, state = optimizer.update(mean, state)
        params = optax.apply_updates(params, updates)
    return params


def test_a_pipeline_of_tensorflow_s_operations_with_its_optimizer():
    use(2)
    x, y = rows(16, 4), rows(16, 1)
    data = [(x[i : i + 2], y[i : i + 2]) for i in range(0, 16, 2)]
    first = ipu.Variable(np.full((4, 3), 0.1, np.float32), name="first")
    second = ipu.Variable(np.full((3, 1), 0.2, np.float32), name="second")
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    _ = infeed.initializer

    def optimizer_function(loss):
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    def training():
        return ipu.pipelining_ops.pipeline(
            [
                lambda x, y: (tf.tanh(x @ first), y),
                lambda h, y: tf.reduce_mean(tf.square(h @ second - y)),
            ],
            gradient_accumulation_count=4,
            repeat_count=2,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=optimizer_function,
            reduction_method="mean",
        )

    run(training)
    expected = plain_descent(data, 0.9, 0.1, batches=4)
    assert_close(first.numpy(), np.asarray(expected[0]))
    assert_close(second.numpy(), np.asarray(expected[1]))


def test_a_session_trains_a_compiled_function_of_placeholders():
    features, labels = rows(16, 4), np.arange(16, dtype=np.int32) % 3
    with v1.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 4])
        y = v1.placeholder(tf.int32, [None])

        def net(x, y):
            with v1.variable_scope("net", reuse=v1.AUTO_REUSE):
                width = x.get_shape().as_list()[1]
                w = v1.get_variable("w", [width, 3], initializer=v1.constant_initializer(0.1))
                b = v1.get_variable("b", [3], initializer=v1.zeros_initializer)
            logits = tf.matmul(x, w) + b
            loss = v1.losses.sparse_softmax_cross_entropy(labels=y, logits=logits)
            return loss, v1.train.GradientDescentOptimizer(0.5).minimize(loss)

        program = ipu.ipu_compiler.compile(net, [x, y])
        session.run(v1.global_variables_initializer())
        found = [session.run(program, {x: features, y: labels})[0] for _ in range(3)]

    w, b, expected = np.full((4, 3), 0.1), np.zeros(3), []
    for _ in range(3):
        logits = features @ w + b
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        expected.append(-np.log(shares[np.arange(16), labels]).mean())
        slope = (shares - np.eye(3)[labels]) / 16
        w, b = w - 0.5 * features.T @ slope, b - 0.5 * slope.sum(0)
    assert_close(np.float32(found), np.float32(expected))
