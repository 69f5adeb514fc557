"""Words of older programs beyond the originals' own list: TensorFlow 1's graphs, Keras' backend."""

import numpy as np
import pytest

from oracles import assert_close

pytest.importorskip("keras")
real = pytest.importorskip("tensorflow")

import tailrace.compat.tensorflow.compat.v1 as tf  # noqa: E402
from tailrace.compat import ipu  # noqa: E402
from tailrace.compat import tensorflow as tf2  # noqa: E402
from tailrace.compat.ipu.errors import IPUValueError, NotFoundError  # noqa: E402
from tailrace.compat.ipu.graph.named_variables import forget_variables  # noqa: E402
from tailrace.compat.tensorflow.keras import backend as K  # noqa: E402

X = np.arange(12, dtype=np.float32).reshape(2, 2, 3) - 5.0


@pytest.fixture(autouse=True)
def _no_variable_outlives_its_test():
    forget_variables()
    yield
    forget_variables()


# -- variables by name --------------------------------------------------------------------------------


def test_a_variable_without_an_initializer_is_drawn_as_in_tensorflow():
    """Glorot's uniform numbers: within the same limit, spread over it, and the same in each process."""
    for shape in ([], [50], [40, 60], [3, 3, 8, 16]):
        w = np.asarray(tf.get_variable(f"w{len(shape)}", shape).value())
        field, (first, last) = np.prod(shape[:-2]), ([1, 1, *shape] * 2)[-2:] if shape else (1, 1)
        first = last if len(shape) == 1 else first
        limit = np.sqrt(6 / (field * first + field * last))
        assert np.abs(w).max() <= limit
        assert w.size < 9 or np.abs(w).max() > 0.8 * limit
    again = np.asarray(tf.get_variable("w2").value())
    forget_variables()
    assert np.array_equal(np.asarray(tf.get_variable("w2", [40, 60]).value()), again)
    assert np.asarray(tf.get_variable("count", [3], tf.int32).value()).tolist() == [0, 0, 0]


def test_scopes_have_names_and_initializers():
    with tf.variable_scope("a", initializer=tf.ones_initializer()) as outer:
        with tf.variable_scope("b", reuse=tf.AUTO_REUSE):
            w = tf.get_variable("w", [2], use_resource=True)
        assert tf.get_variable_scope().name == "a"
    with tf.variable_scope("elsewhere"), tf.variable_scope(outer, reuse=True) as again:
        again.reuse_variables()
        assert tf.get_variable("b/w") is w
    with tf.variable_scope(None, default_name="c"):
        assert tf.get_variable("v", [1]).name == "c/v"
    assert (w.name, np.asarray(w.value()).tolist()) == ("a/b/w", [1.0, 1.0])
    assert tf.get_collection(tf.GraphKeys.GLOBAL_VARIABLES, scope="a") == [w]
    assert tf.get_collection(tf.GraphKeys.UPDATE_OPS) == []
    with pytest.raises(IPUValueError, match="regularizer.*Add the penalty"):
        tf.get_variable("r", [1], regularizer=lambda w: w)


def test_each_graph_has_its_variables():
    one = tf.get_variable("w", initializer=1.0)
    graph = tf.Graph()
    with graph.as_default():
        other = tf.get_variable("w", [3], initializer=tf.zeros_initializer())
        assert tf.get_default_graph() is graph
    assert tf.get_variable("w") is one
    with tf.Session(graph=graph) as sess:
        assert sess.run(other).tolist() == [0.0, 0.0, 0.0]
    tf.reset_default_graph()
    assert tf.get_variable("w", [2]).shape == (2,)


def test_assignments_are_done_when_a_session_runs_them():
    w = tf.get_variable("w", initializer=1.0)
    x = tf.placeholder(tf.float32, [])
    more, less = tf.assign_add(w, x), tf.assign_sub(w, 0.5)
    with tf.Session() as sess:
        assert sess.run(w) == 1.0
        assert sess.run(more, {x: 2.0}) == 3.0
        assert sess.run(less) == 2.5
        assert sess.run(tf.assign(w, 7.0)) == 7.0


RULES = {
    "descent": lambda rate: tf.train.GradientDescentOptimizer(rate),
    "momentum": lambda rate: tf.train.MomentumOptimizer(rate, 0.9),
    "rmsprop": lambda rate: tf.train.RMSPropOptimizer(rate, momentum=0.5),
    "adagrad": lambda rate: tf.train.AdagradOptimizer(rate),
    "adam": lambda rate: tf.train.AdamOptimizer(rate),
    "accumulated": lambda rate: ipu.optimizers.GradientAccumulationOptimizerV2(
        tf.train.MomentumOptimizer(rate, 0.9), num_mini_batches=2
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rate_may_be_fed(name):
    """The rate is a placeholder: an input of the program, made of nothing when its slots are."""

    def trained(given, inputs, feed):
        forget_variables()

        def body(count, rate=None):
            w = tf.get_variable("w", initializer=np.float32([1.0, -2.0]))
            loss = tf.reduce_sum((w - 3.0) ** 2)
            train = RULES[name](given if rate is None else rate).minimize(loss)
            return [count + 1, *([] if rate is None else [rate]), train]

        program = ipu.ipu_compiler.compile(
            lambda *rate: ipu.loops.repeat(4, body, [0, *rate]), inputs=inputs
        )
        with tf.Session() as sess:
            sess.run(program, feed)
            return sess.run(tf.get_variable("w"))

    rate = tf.placeholder(tf.float32, [])
    fed = trained(None, [rate], {rate: 0.1})
    known = trained(0.1, [], None)
    assert_close(fed, known)
    assert not np.array_equal(fed, [1.0, -2.0])


def test_a_rate_of_keras_may_be_fed():
    """A Keras optimizer that a program makes with a rate which is an input: read at each update."""
    w = tf2.Variable([1.0, -2.0])

    def net(rate):
        def body(count, rate):
            loss = tf.reduce_sum((w - 3.0) ** 2)
            optimizer = tf2.keras.optimizers.SGD(rate, momentum=0.5)
            (grad,) = ipu.GradientTape().gradient(loss, [w])
            optimizer.apply_gradients([(grad, w)])
            return count + 1, rate

        return ipu.loops.repeat(2, body, [0, rate])

    rate = tf.placeholder(tf.float32, [])
    program = ipu.ipu_compiler.compile(net, inputs=[rate])
    expected, speed = np.array([1.0, -2.0]), 0.0
    with tf.Session() as sess:
        for fed in (0.1, 0.01):
            sess.run(program, {rate: fed})
            for _ in range(2):
                speed = 0.5 * speed - fed * 2 * (expected - 3.0)
                expected = expected + speed
    assert_close(np.asarray(w.value), expected.astype(np.float32))


def test_a_rate_of_keras_may_be_an_input_of_a_pipeline():
    """The optimizer function makes the optimizer with what reaches it through the stages."""
    w = tf2.Variable(1.0)
    out = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def net(rate):
        return ipu.pipelining_ops.pipeline(
            [lambda rate: (rate, w * 2.0), lambda rate, x: (rate, x * 1.0)],
            gradient_accumulation_count=4,
            inputs=[rate],
            outfeed_queue=out,
            optimizer_function=lambda rate, loss: ipu.pipelining_ops.OptimizerFunctionOutput(
                tf2.keras.optimizers.SGD(rate), loss, variables=[w]
            ),
        )

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    program = ipu.ipu_compiler.compile(net, inputs=[np.float32(0.5)])
    for rate in (0.5, 0.125):
        program(np.float32(rate))
    assert float(w.value) == 1.0 - 8.0 * 0.5 - 8.0 * 0.125


# -- files --------------------------------------------------------------------------------------------


def test_a_saver_writes_and_reads(tmp_path):
    w = tf.get_variable("layer/w", initializer=np.float32([1, 2]))
    step = tf.train.get_or_create_global_step()
    saver = tf.train.Saver(max_to_keep=2)
    with tf.Session() as sess:
        paths = []
        for number in (1, 2, 3):
            sess.run(tf.assign(step, number))
            paths.append(saver.save(sess, str(tmp_path / "model"), global_step=step))
        sess.run(tf.assign(w, [0.0, 0.0]))
        assert tf.train.latest_checkpoint(str(tmp_path)) == paths[-1] == str(tmp_path / "model-3")
        saver.restore(sess, paths[-1])
        assert sess.run(w).tolist() == [1.0, 2.0]
        tf.train.Saver({"layer/w": w}).restore(sess, paths[1])
        with pytest.raises(NotFoundError, match="There is no checkpoint .*model-1"):
            saver.restore(sess, paths[0])  # the oldest was removed
        with pytest.raises(NotFoundError, match="'other' is not in .*layer/w"):
            tf.train.Saver({"other": w}).restore(sess, paths[-1])
    assert tf.train.latest_checkpoint(str(tmp_path / "nothing")) is None


def test_a_saver_reads_checkpoints_of_tensorflow(tmp_path):
    path = real.train.Checkpoint(w=real.Variable([3.0, 4.0])).write(str(tmp_path / "real"))
    w = tf.get_variable("w", [2])
    tf.train.Saver({"w/.ATTRIBUTES/VARIABLE_VALUE": w}).restore(None, path)
    assert np.asarray(w.value()).tolist() == [3.0, 4.0]


def test_checkpoints_of_tensorflow_2(tmp_path):
    def made(value):
        model = tf2.keras.Sequential([tf2.keras.layers.Dense(2)])
        model.build((None, 3))
        model.set_weights([np.full((3, 2), value, "float32"), np.full(2, value, "float32")])
        optimizer = tf2.keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
        step = tf2.Variable(int(value))
        return model, tf2.train.Checkpoint(model=model, optimizer=optimizer, step=step)

    first, checkpoint = made(1.0)
    manager = tf2.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=2)
    assert manager.restore_or_initialize() is None
    paths = [manager.save() for _ in range(3)]
    assert manager.checkpoints == paths[1:]
    other, again = made(2.0)
    found = tf2.train.CheckpointManager(again, str(tmp_path), max_to_keep=2)
    assert found.restore_or_initialize() == paths[-1] == tf2.train.latest_checkpoint(str(tmp_path))
    assert all(map(np.array_equal, first.get_weights(), other.get_weights()))
    assert int(again.step) == 1
    assert found.save() == str(tmp_path / "ckpt-4")
    again.restore(paths[1]).expect_partial()
    with pytest.raises(NotFoundError, match="There is no checkpoint"):
        again.restore(paths[0])
    with pytest.raises(NotFoundError, match="lacks more"):
        tf2.train.Checkpoint(more=tf2.Variable(1.0)).restore(paths[1])
    with pytest.raises(IPUValueError, match="models, optimizers.*iterator=list_iterator"):
        tf2.train.Checkpoint(iterator=iter([1]))


def test_a_saver_without_variables_says_so(tmp_path):
    with pytest.raises(IPUValueError, match=r"No variables to save.*tf.get_variable"):
        tf.train.Saver().save(None, str(tmp_path / "model"))


# -- operations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "y"), [([7, -7], 2), ([7.0, -7.0], 2.0), ([7.0], [0.5])])
def test_div_divides_as_in_tensorflow_1(x, y):
    found, expected = tf.div(np.array(x), np.array(y)), real.compat.v1.div(x, y)
    assert_close(np.asarray(found, np.float32), np.asarray(expected, np.float32))


BACKEND = {
    "mean": lambda k, x: k.mean(x, axis=-1, keepdims=True),
    "sum of squares": lambda k, x: k.sum(k.square(x), axis=[0, 1]),
    "std": lambda k, x: k.std(x, axis=0),
    "argmax": lambda k, x: k.argmax(x),
    "clip": lambda k, x: k.clip(x, -1.0, 2.0),
    "dot": lambda k, x: k.dot(x, k.permute_dimensions(x, (0, 2, 1))),
    "dot of matrices": lambda k, x: k.dot(x[0], k.transpose(x[1])),
    "concatenate": lambda k, x: k.concatenate([x, x]),
    "permute_dimensions": lambda k, x: k.permute_dimensions(x, (2, 0, 1)),
    "batch_flatten": lambda k, x: k.batch_flatten(x),
    "softmax": lambda k, x: k.softmax(k.relu(x)),
    "l2_normalize": lambda k, x: k.l2_normalize(x, axis=1),
    "one_hot": lambda k, x: k.one_hot(np.array([0, 2]), 3),
    "switch": lambda k, x: k.switch(k.greater(x, 0.0), x, k.zeros_like(x)),
    "all": lambda k, x: k.all(k.not_equal(x, 100.0)),
    "reverse": lambda k, x: k.reverse(x, 1),
    "expand_dims": lambda k, x: k.expand_dims(x),
}


@pytest.mark.parametrize("name", BACKEND)
def test_keras_backend_computes_as_keras_did(name):
    """Against the functions that Keras keeps for TensorFlow alone."""
    legacy = pytest.importorskip("keras._tf_keras.keras.backend")
    found, expected = BACKEND[name](K, X), BACKEND[name](legacy, real.constant(X))
    assert np.shape(found) == np.shape(expected)
    assert_close(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def test_values_of_variables_by_the_backend():
    v = K.variable([1.0, 2.0], name="v")
    K.set_value(v, [3.0, 4.0])
    assert K.get_value(v).tolist() == [3.0, 4.0]
    K.batch_set_value([(v, [0.0, 1.0])])
    assert K.batch_get_value([v])[0].tolist() == K.eval(v).tolist() == [0.0, 1.0]
    assert (K.int_shape(v), K.ndim(v), K.floatx(), K.epsilon()) == ((2,), 1, "float32", 1e-7)


def test_words_that_keras_3_has_dropped():
    optimizer = tf2.keras.optimizers.SGD(0.5)
    optimizer.lr = 0.25
    K.set_value(optimizer.lr, 0.125)
    assert float(optimizer.learning_rate) == float(K.get_value(optimizer.lr)) == 0.125
    metric = tf2.keras.metrics.Mean()
    metric.update_state([1.0, 3.0])
    metric.reset_states()
    assert float(metric.result()) == 0.0
    loss = tf2.keras.losses.MeanSquaredError(reduction=tf2.keras.losses.Reduction.NONE)
    assert loss(np.ones((2, 3)), np.zeros((2, 3))).tolist() == [1.0, 1.0]
