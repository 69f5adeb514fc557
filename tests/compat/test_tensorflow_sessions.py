"""The words of TensorFlow 1: sessions, placeholders, variables by name, optimizers, losses."""

import json
import threading

import numpy as np
import pytest

import tailrace as tr
from oracles import assert_close

pytest.importorskip("keras")
real = pytest.importorskip("tensorflow")

import tailrace.compat.tensorflow.compat.v1 as tf  # noqa: E402
from tailrace.compat import ipu  # noqa: E402
from tailrace.compat import tensorflow as tf2  # noqa: E402
from tailrace.compat.ipu import (  # noqa: E402
    ipu_compiler,
    ipu_infeed_queue,
    ipu_outfeed_queue,
    loops,
    pipelining_ops,
    scopes,
)


def test_a_training_loop_in_a_session():
    tf.disable_v2_behavior()
    ds = tf.data.Dataset.from_tensors(tf.constant(1.0, shape=[8]))
    ds = ds.map(lambda x: [x, x]).repeat()
    infeed_queue = ipu_infeed_queue.IPUInfeedQueue(ds)
    outfeed_queue = ipu_outfeed_queue.IPUOutfeedQueue()

    def body(x1, x2):
        return outfeed_queue.enqueue({"d1": x1 + x2, "d2": x1 - x2})

    def my_net():
        return loops.repeat(10, body, [], infeed_queue)

    with scopes.ipu_scope("/device:IPU:0"):
        run_loop = ipu_compiler.compile(my_net, inputs=[])
    dequeue_outfeed = outfeed_queue.dequeue()  # described before anything runs
    with tf.Session() as sess:
        sess.run(infeed_queue.initializer)
        sess.run(run_loop)
        result = sess.run(dequeue_outfeed)
    assert result["d1"].shape == (10, 8)
    assert np.all(result["d1"] == 2)
    assert np.all(result["d2"] == 0)


def test_results_during_execution_in_a_session():
    outfeed_queue = ipu_outfeed_queue.IPUOutfeedQueue()

    def my_net():
        def body(v):
            outfeed_queue.enqueue(v)
            return v + 1

        return loops.repeat(20, body, [0])

    run_loop = ipu_compiler.compile(my_net)
    dequeued = outfeed_queue.dequeue()
    found = []
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())

        def read():
            while len(found) < 20:
                found.extend(sess.run(dequeued))

        thread = threading.Thread(target=read)
        thread.start()
        sess.run(run_loop)
        thread.join(600)
    assert found == list(range(20))


def test_placeholders_variables_and_an_optimizer_of_a_pipeline():
    slope = tf.placeholder(np.float32, shape=[], name="rate")

    def stage1(lr, x, y):
        with tf.variable_scope("session_test", use_resource=True):
            w = tf.get_variable("w", initializer=2.0)
        return lr, w * x, y

    def stage2(lr, a, y):
        return lr, tf.losses.mean_squared_error(y, a)

    def optimizer_function(lr, loss):
        return pipelining_ops.OptimizerFunctionOutput(tf.train.GradientDescentOptimizer(lr), loss)

    losses = ipu_outfeed_queue.IPUOutfeedQueue()

    def net(lr, x, y):
        return pipelining_ops.pipeline(
            [stage1, stage2],
            gradient_accumulation_count=4,
            inputs=[lr, x, y],
            optimizer_function=optimizer_function,
            outfeed_queue=losses,
            device_mapping=[0, 0],
        )

    x, y = np.float32([1.0, 2.0]), np.float32([0.0, 0.0])
    op = ipu_compiler.compile(net, [slope, x, y])
    with tf.Session() as sess:
        sess.run(op, feed_dict={slope: 0.1})
        after = sess.run(tf.get_variable("session_test/w"))
        with pytest.raises(
            tr.TailraceError, match="You must feed a value for the placeholder 'rate'"
        ):
            sess.run(op)
    # the sum of four gradients of mean((w x)²): 4 · 2 · mean(x²) · w
    assert_close(after, np.float32(2.0 - 0.1 * 4 * 2 * 2.5 * 2.0))


def test_what_is_computed_from_a_placeholder():
    x = tf.placeholder(tf.float32, [None])
    y = tf2.reduce_sum(x * 2.0 + 1.0)
    with tf.Session() as sess:
        assert sess.run({"y": y, "x": [x]}, {x: [1.0, 2.0]})["y"] == 8.0
        assert y.eval({x: [0.0]}) == 1.0
    assert sess.run(tf.placeholder_with_default(3.0, [])) == 3.0


def test_the_benchmark_of_the_document():
    dataset = real.data.Dataset.from_tensor_slices(np.zeros((64, 4), np.float32)).batch(4).repeat()
    benchmark_op = ipu.dataset_benchmark.dataset_benchmark(dataset, 2, 8, print_stats=False)
    with tf2.Session() as sess:
        json_string = sess.run(benchmark_op)
        json_object = json.loads(json_string[0])
    assert len(json_object["epochs"]) == 2


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("GradientDescentOptimizer", [0.1]),
        ("MomentumOptimizer", [0.1, 0.9]),
        ("RMSPropOptimizer", [0.1, 0.9, 0.5]),
        ("AdagradOptimizer", [0.1]),
        ("AdamOptimizer", [0.1]),
    ],
)
def test_optimizers_follow_the_rules_of_tensorflow(name, args):
    start, grads = np.float32([1.0, -2.0]), np.float32([[0.5, 0.1], [0.2, -3.0], [0.0, 1.0]])
    theirs = real.Variable(start)
    optimizer = getattr(real.compat.v1.train, name)(*args)
    for grad in grads:
        optimizer.apply_gradients([(real.constant(grad), theirs)])

    ours = ipu.Variable(start)
    mine = getattr(tf.train, name)(*args)

    @tf2.function
    def step(grad):
        mine.apply_gradients([(grad, ours)])

    for grad in grads:
        step(grad)
    assert_close(np.asarray(ours), theirs.numpy())


def test_a_class_that_casts_gradients():
    """The fifth document's."""

    class CastGradientsSGD(tf2.keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, name=None):
            cast_grads_and_vars = [(tf2.cast(g, v.dtype), v) for (g, v) in grads_and_vars]
            return super().apply_gradients(cast_grads_and_vars, name)

    v = tf2.Variable([1.0, 2.0], dtype=tf2.float16)
    CastGradientsSGD(0.5).apply_gradients([(tf2.constant([1.0, 1.0]), v)])
    assert v.numpy().tolist() == [0.5, 1.5]
