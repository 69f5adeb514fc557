"""Graphs of TensorFlow 1: what is described is computed when a session runs it, as TensorFlow does."""

import numpy as np
import pytest

from oracles import assert_close

pytest.importorskip("keras")
real = pytest.importorskip("tensorflow")

import tailrace.compat.tensorflow.compat.v1 as v1  # noqa: E402
from tailrace.compat import ipu  # noqa: E402
from tailrace.compat import tensorflow as compat  # noqa: E402
from tailrace.compat.ipu.errors import (  # noqa: E402
    FailedPreconditionError,
    IPURuntimeError,
    IPUValueError,
    OutOfRangeError,
)
from tailrace.compat.ipu.graph.deferred import describe_everywhere  # noqa: E402
from tailrace.compat.ipu.graph.named_variables import forget_variables  # noqa: E402
from tailrace.errors import OptionError  # noqa: E402

X = np.float32([[1.0, -2.0], [0.5, 3.0]])


def expressions_of_variables(tf, sess):
    v = tf.get_variable("v", initializer=1.0)
    w = tf.Variable([1.0, 2.0], name="w")
    x = tf.placeholder(tf.float32, [])
    found = [v * 2.0, 3.0 - w, np.float32(2.0) * v, x * v, tf.reduce_sum(w) + v, -w, w[1]]
    found += [v.read_value(), abs(w - 2.0), tf.cast(w > 1.5, tf.float32)]
    sess.run(tf.global_variables_initializer())
    before = sess.run(found, {x: 2.0})
    sess.run([v.assign(5.0), w.assign_sub([1.0, 0.5])])
    return before, sess.run(found, {x: 2.0}), sess.run([v, w])


def assignments_run_each_time(tf, sess):
    count = tf.get_variable("count", initializer=0)
    total = tf.Variable(0.0)
    more = count.assign_add(1)
    sums = total.assign_add(tf.cast(count, tf.float32))
    sess.run(tf.global_variables_initializer())
    found = []
    for _ in range(3):
        sess.run(more)
        found.append(sess.run(sums))
    return found, sess.run([count, total])


def control_dependencies(tf, sess):
    seen = tf.get_variable("seen", initializer=0.0)
    x = tf.placeholder(tf.float32, [])
    update = tf.assign_add(seen, x)
    with tf.control_dependencies([update]):
        y = tf.identity(x) * 2.0
        done = tf.no_op()
    both = tf.group(tf.assign_add(seen, 10.0), done)
    sess.run(tf.global_variables_initializer())
    found = [sess.run(y, {x: 3.0}), sess.run(seen)]
    sess.run(both, {x: 1.0})
    return found, sess.run(seen)


def operations_without_a_value(tf, sess):
    """`sess.run` takes each of them, does it and returns None for it."""
    w = tf.get_variable("w", initializer=2.0)
    start = tf.group(tf.global_variables_initializer(), tf.local_variables_initializer())
    sess.run([start, tf.tables_initializer(), tf.variables_initializer([])])
    change = tf.assign(w, 7.0)
    with tf.control_dependencies([change]):
        after = [tf.group(), tf.no_op("nothing"), tf.group([tf.identity(w)], name="read")]
    found = []
    for operation in after:
        found += [sess.run(operation) is None, sess.run(w)]
        sess.run(tf.group(tf.variables_initializer([w])))
    sess.run(change)
    with tf.control_dependencies([w.initializer]):
        found += [sess.run(tf.identity(w))]
    return found, sess.run(tf.variables_initializer([])) is None


def a_loss_beside_a_group_with_the_step(tf, sess):
    w = tf.get_variable("w", initializer=2.0)
    loss = (w - 3.0) ** 2
    train = tf.group(tf.train.GradientDescentOptimizer(0.1).minimize(loss), tf.no_op())
    with tf.control_dependencies([train]):
        later = tf.no_op()
    sess.run(tf.global_variables_initializer())
    return [sess.run([each, loss])[1] for each in (train, later, train)], sess.run(w)


def initializer_resets_variables_and_slots(tf, sess):
    w = tf.get_variable("w", initializer=np.float32([1.0, -2.0]))
    b = tf.Variable(0.5)
    loss = tf.reduce_sum((w - 3.0) ** 2) + b**2
    train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    start = tf.global_variables_initializer()
    found = []
    for _ in range(2):
        sess.run(start)
        for _ in range(2):
            sess.run(train)
        found += sess.run([w, b])
    sess.run(w.initializer)
    return found, sess.run([w, b])


def clipped_gradients_a_step_and_a_decay(tf, sess):
    x = tf.placeholder(tf.float32, [None, 2])
    w = tf.get_variable("w", [2, 1], initializer=tf.ones_initializer())
    step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(0.5, step, 2, 0.5, staircase=True)
    loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
    optimizer = tf.train.GradientDescentOptimizer(rate)
    pairs = optimizer.compute_gradients(loss, [w])
    clipped = [(tf.clip_by_value(grad, -0.5, 0.25), var) for grad, var in pairs]
    train = optimizer.apply_gradients(clipped, global_step=step)
    sess.run(tf.global_variables_initializer())
    found = [sess.run(pairs[0][0], {x: X})]
    for _ in range(4):
        sess.run(train, {x: X})
        found.append(sess.run([w, loss, rate, step], {x: X}))
    return found


def gradients_of_a_graph(tf, sess):
    x = tf.placeholder(tf.float32, [2, 2])
    w = tf.Variable(np.float32([2.0, -1.0]))
    hidden = x * w
    y = tf.reduce_sum(hidden**2)
    sess.run(tf.global_variables_initializer())
    grads = [*tf.gradients(y, [w, x]), tf.gradients(hidden, w, grad_ys=x)[0]]
    grads.append(tf.gradients(y, [hidden])[0])
    before = sess.run(grads, {x: X})
    sess.run(w.assign([1.0, 1.0]))
    return before, sess.run(grads, {x: X})


def branches_and_loops_over_described_values(tf, sess):
    x = tf.placeholder(tf.float32, [])
    v = tf.get_variable("v", initializer=2.0)
    either = tf.cond(x > v, lambda: x + 1.0, lambda: v - x)
    doubled = tf.while_loop(lambda y: y < 10.0 * v, lambda y: y * 2.0, [x])
    sess.run(tf.global_variables_initializer())
    return [[sess.run([either, doubled], {x: value}) for value in (1.0, 3.0)]]


def rates_of_steps(tf, sess):
    step = tf.placeholder(tf.int32, [])
    rates = [
        tf.train.exponential_decay(0.1, step, 10, 0.9),
        tf.train.natural_exp_decay(0.1, step, 10, 0.5),
        tf.train.inverse_time_decay(0.1, step, 10, 0.5, staircase=True),
        tf.train.polynomial_decay(0.1, step, 10, 0.01, power=2.0),
        tf.train.polynomial_decay(0.1, step, 10, 0.01, cycle=True),
        tf.train.cosine_decay(0.1, step, 20, alpha=0.1),
        tf.train.piecewise_constant(step, [5, 10], [0.1, 0.05, 0.01]),
    ]
    return [sess.run(rates, {step: number}) for number in (0, 5, 6, 10, 25)]


def shapes_of_what_is_described(tf, sess):
    x = tf.placeholder(tf.float32, [None, 2])
    w = tf.get_variable("w", [2, 3])
    y = tf.matmul(x, w)
    size = y.shape[1] * 2
    shapes = [y.shape, (w * 2.0).shape, tf.reduce_sum(y, axis=0).shape, tf.argmax(y, axis=1).shape]
    return [[-1 if n is None else int(n) for n in shape] for shape in shapes], int(size)


def initial_values_that_are_described(tf, sess):
    w = tf.Variable(tf.zeros([2]) + 3.0, name="w")
    v = tf.Variable(lambda: tf.random_uniform([2], 1.0, 1.0), trainable=False)
    sess.run(tf.global_variables_initializer())
    names = [variable.name.split(":")[0] for variable in tf.global_variables()]
    return sess.run([w, v]), names == ["w", "Variable"], len(tf.trainable_variables())


def several_results(tf, sess):
    x = tf.placeholder(tf.float32, [None, 2])
    w = tf.get_variable("w", [2, 2], initializer=tf.ones_initializer())
    left, right = tf.split(tf.matmul(x, w), 2, axis=1)
    mean, variance = tf.nn.moments(x, [0])
    total, grads = tf.reduce_sum(left * right), tf.unstack(x, num=2, axis=1)
    known = tf.matmul(x, w).get_shape().as_list() + w.get_shape().as_list()
    fetched = sess.make_callable([total, mean, variance, grads[1]], [x])
    sess.run(tf.global_variables_initializer())
    return fetched(X), [-1 if n is None else n for n in known], w.op.name


def elements_of_a_dataset(tf, sess):
    dataset = real.data.Dataset.from_tensor_slices({"x": X, "n": np.int32([1, 2])})
    once = tf.data.make_one_shot_iterator(dataset).get_next()
    again = tf.data.make_initializable_iterator(dataset.map(lambda row: (row["x"], row["n"])))
    x, n = again.get_next()
    found = [sess.run(once), sess.run([once["n"] * 10, once["x"]])]
    for _ in range(2):
        sess.run(again.initializer)
        found += [sess.run([x, n]), sess.run(n)]
    return [[one["n"], one["x"]] if isinstance(one, dict) else one for one in found]


def running_means(tf, sess):
    w = tf.Variable([1.0, 2.0], name="w")
    step = tf.get_variable("step", initializer=0)
    means = tf.train.ExponentialMovingAverage(0.9, num_updates=step)
    with tf.control_dependencies([w.assign_add([1.0, -1.0])]):
        moved = means.apply([w])
    sess.run(tf.global_variables_initializer())
    found = []
    for _ in range(2):
        sess.run(moved)
        sess.run(step.assign_add(1))
        found.append(sess.run(means.average(w)))
    return found


PROGRAMS = [
    several_results,
    elements_of_a_dataset,
    running_means,
    expressions_of_variables,
    assignments_run_each_time,
    control_dependencies,
    operations_without_a_value,
    a_loss_beside_a_group_with_the_step,
    initializer_resets_variables_and_slots,
    clipped_gradients_a_step_and_a_decay,
    gradients_of_a_graph,
    branches_and_loops_over_described_values,
    rates_of_steps,
    shapes_of_what_is_described,
    initial_values_that_are_described,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=[one.__name__ for one in PROGRAMS])
def test_a_graph_gives_what_tensorflow_gives(program):
    found, expected = (_run(program, tf) for tf in (v1, real.compat.v1))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.shape(one) == np.shape(other)
        assert_close(np.asarray(one, np.float32), np.asarray(other, np.float32))


def _run(program, tf):
    with tf.Graph().as_default(), tf.Session() as sess:
        return _leaves(program(tf, sess))


def _leaves(value):
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in _leaves(one)]
    return [np.asarray(hash(value) if isinstance(value, str) else value)]


@pytest.fixture
def whole_process():
    """A program that calls `disable_v2_behavior`; nothing of it stays."""
    forget_variables()
    v1.disable_v2_behavior()
    yield
    describe_everywhere(False)
    forget_variables()


def test_a_switch_for_the_whole_process(whole_process):
    v = v1.get_variable("v", initializer=1.0)
    y = v * 2.0
    session = v1.InteractiveSession()
    assert v1.get_default_session() is session
    session.run(v.assign(4.0))
    assert (y.eval(), v.eval()) == (8.0, 4.0)
    v1.global_variables_initializer().run()
    assert y.eval() == 2.0
    session.close()
    assert v1.get_default_session() is None
    v1.enable_v2_behavior()
    assert float(v * 2.0) == 2.0  # computed as it is written


def test_random_numbers_are_drawn_in_each_run(whole_process):
    drawn = compat.random.normal([3])
    w = compat.Variable(compat.random.normal([3]))
    twice = compat.Variable(w.initialized_value() * 2.0)
    with v1.Session() as sess:
        sess.run(v1.global_variables_initializer())
        assert np.array_equal(sess.run(w) * 2, sess.run(twice))
        first, again = sess.run([drawn, drawn * 1.0])
        assert np.array_equal(first, again)
        assert not np.array_equal(first, sess.run(drawn))
        assert sess.run(w).std() > 0


def test_a_function_of_tensorflow_2_in_a_graph(whole_process):
    v = compat.Variable(3.0)

    @compat.function
    def scaled(x):
        return x * v

    x = v1.placeholder(compat.float32, [2])
    y = scaled(x)
    with v1.Session() as sess:
        assert sess.run(y, {x: [1.0, 2.0]}).tolist() == [3.0, 6.0]
        sess.run(v.assign(2.0))
        assert sess.run(y, {x: [1.0, 2.0]}).tolist() == [2.0, 4.0]


def test_results_of_a_program_by_number(whole_process):
    runs = []

    def net(x):
        runs.append(1)
        return x + 1.0, x * 2.0

    x = v1.placeholder(compat.float32, [])
    program = ipu.ipu_compiler.compile(net, [x])
    more, twice = program[0], program[1]
    with v1.Session() as sess:
        assert sess.run([more, twice * 10.0, program], {x: 3.0}) == [4.0, 60.0, [4.0, 6.0]]
        traces = len(runs)
        assert sess.run(twice, {x: 4.0}) == 8.0
    assert len(runs) == traces
    with pytest.raises(IPURuntimeError, match=r"Take them by number: .*compile\(\.\.\.\)\[0\]"):
        (_only,) = program


def test_what_a_program_uses_without_being_given_it(whole_process):
    v = v1.get_variable("v", initializer=2.0)
    rate = v * 10.0  # described outside; a variable is read where the program uses it
    x = v1.placeholder(compat.float32, [], name="x")
    program = ipu.ipu_compiler.compile(lambda y: y + rate, [x])
    other = ipu.ipu_compiler.compile(lambda: rate + x, [])
    with v1.Session() as sess:
        assert sess.run(program, {x: 1.0}) == [21.0]
        sess.run(v.assign(3.0))
        assert sess.run(program, {x: 1.0}) == [31.0]
        with pytest.raises(IPURuntimeError, match="placeholder 'x' is used in a compiled program"):
            sess.run(other, {x: 1.0})


def test_gradients_outside_of_a_graph_are_refused():
    w = compat.Variable(2.0)
    with pytest.raises(IPURuntimeError, match=r"tf.gradients is for graphs.*disable_v2_behavior"):
        v1.gradients(w * w, [w])


def test_layers_by_name(whole_process):
    """TensorFlow itself has no `tf.layers` any more: Keras' layers are what they were."""
    from keras import layers

    x, ones = v1.placeholder(compat.float32, [None, 6, 6, 2]), v1.ones_initializer()
    tf = v1.layers
    h = tf.conv2d(x, 3, 3, strides=2, activation=v1.nn.relu, kernel_initializer=ones)
    h = tf.average_pooling2d(tf.max_pooling2d(h, 2, 1), (1, 1), (1, 1), padding="same")
    h = tf.dense(tf.flatten(h), 3, kernel_initializer=ones, bias_initializer=ones)
    y = tf.dense(tf.dropout(h), 3, kernel_initializer=ones, use_bias=False)  # another one
    with v1.variable_scope("again"):
        z = tf.dense(tf.dense(y, 3, name="a"), 3, name="a", reuse=True)
    names = sorted(variable.name for variable in v1.global_variables())
    expected = ["again/a/bias", "again/a/kernel", "conv2d/bias", "conv2d/kernel", "dense/bias"]
    assert names == [*expected, "dense/kernel", "dense_1/kernel"]
    assert z.shape == (None, 3)
    data = np.arange(144, dtype=np.float32).reshape(2, 6, 6, 2) / 100
    wanted = layers.Conv2D(3, 3, 2, activation="relu", kernel_initializer="ones")(data)
    wanted = layers.Flatten()(layers.MaxPooling2D(2, 1)(wanted))
    wanted = layers.Dense(3, kernel_initializer="ones", bias_initializer="ones")(wanted)
    wanted = layers.Dense(3, kernel_initializer="ones", use_bias=False)(wanted)
    with v1.Session() as sess:
        assert_close(sess.run(y, {x: data}), np.asarray(wanted))
    with pytest.raises(OptionError, match=r"tf.layers.dropout\(training=...\) is True or False"):
        tf.dropout(y, training=v1.placeholder(compat.bool, []))


def test_layers_in_a_program_have_names_of_their_own(whole_process):
    """A program is traced more than once: its second layer must not become a third, or the first."""

    def net(x):
        def body(x):
            return v1.layers.dense(v1.layers.dense(x, 3), 3)

        return ipu.loops.repeat(2, body, [x])

    x = v1.placeholder(compat.float32, [2, 3])
    program = ipu.ipu_compiler.compile(net, [x])
    with v1.Session() as sess:
        found = sess.run(program, {x: np.ones((2, 3))})[0]
        names = [variable.name for variable in v1.global_variables()]
        first, second = (sess.run(v1.get_variable(f"{n}/kernel")) for n in ("dense", "dense_1"))
    assert names == ["dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"]
    assert_close(found, np.ones((2, 3), np.float32) @ first @ second @ first @ second)


def test_layers_of_keras_in_a_graph(whole_process):
    x = v1.placeholder(compat.float32, [None, 2])
    layer = compat.keras.layers.Dense(1, kernel_initializer="ones")
    y = layer(x)
    assert y.shape == (None, 1)
    train = v1.train.GradientDescentOptimizer(0.1).minimize(v1.reduce_sum(y))
    with v1.Session() as sess:
        assert_close(sess.run(y, {x: X}), X.sum(axis=1, keepdims=True))
        sess.run(train, {x: X})
        assert_close(sess.run(y, {x: X}), X @ (1 - 0.1 * X.sum(axis=0))[:, None] - 0.2)


def test_models_of_keras_beside_a_graph(whole_process):
    """Keras traces layers itself: what they compute from variables is not described."""

    class Scaled(compat.keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=shape[1:], initializer="ones")

        def call(self, x):
            return x * compat.square(self.scale) + compat.reduce_sum(self.scale)

    inputs = compat.keras.Input([2])
    model = compat.keras.Model(inputs, Scaled()(inputs))
    assert_close(model.predict(X, verbose=0), X + 2.0)
    model.compile(compat.keras.optimizers.SGD(0.5), "mse")
    model.fit(X, X + 2.0, verbose=0)
    assert_close(np.asarray(model.get_weights()[0]), np.ones(2, np.float32))


def test_summaries_of_a_graph(whole_process, tmp_path):
    x = v1.placeholder(compat.float32, [2])
    assert v1.summary.merge_all() is None
    v1.summary.scalar("mean", v1.reduce_mean(x))
    v1.summary.histogram("all", x)
    merged = v1.summary.merge_all()
    writer = v1.summary.FileWriter(str(tmp_path), graph=v1.get_default_graph())
    with v1.Session() as sess:
        for step in range(2):
            writer.add_summary(sess.run(merged, {x: [step, 3.0]}), step)
    writer.close()
    (path,) = tmp_path.iterdir()
    events = [e for e in real.compat.v1.train.summary_iterator(str(path)) if e.summary.value]
    found = [(e.step, v.tag) for e in events for v in e.summary.value]
    assert sorted(found) == [(0, "all"), (0, "mean"), (1, "all"), (1, "mean")]
    means = [
        real.make_ndarray(v.tensor) for e in events for v in e.summary.value if v.tag == "mean"
    ]
    assert [float(mean) for mean in means] == [1.5, 2.0]


def test_what_a_graph_does_not_have_is_refused(whole_process):
    v1.get_variable("w", initializer=2.0)
    with v1.Session() as sess:
        assert sess.run(["w:0", "w"]) == [2.0, 2.0]
        with pytest.raises(IPUValueError, match=r"Received: 'loss:0'. The graph has: w."):
            sess.run("loss:0")
    with pytest.raises(AttributeError, match="tf.metrics.accuracy kept sums in local variables"):
        v1.metrics.accuracy(labels=[1], predictions=[1])
    iterator = v1.data.make_initializable_iterator(real.data.Dataset.range(1))
    element = iterator.get_next()
    with v1.Session() as sess:
        with pytest.raises(FailedPreconditionError, match="Run its initializer first"):
            sess.run(element)
        sess.run(iterator.initializer)
        assert sess.run(element) == 0
        with pytest.raises(OutOfRangeError, match="End of sequence"):
            sess.run(element)


def test_a_tape_in_a_graph(whole_process):
    w = compat.Variable(2.0)
    with compat.GradientTape() as tape:
        y = w**3
    grad = tape.gradient(y, w)
    with v1.Session() as sess:
        assert sess.run(grad) == 12.0
        sess.run(w.assign(1.0))
        assert sess.run(grad) == 3.0
