"""Small programs in TensorFlow's words: the same functions give what TensorFlow gives."""

import pathlib

import numpy as np
import pytest

pytest.importorskip("keras")
pytest.importorskip("malt")
real = pytest.importorskip("tensorflow")

from oracles import assert_close  # noqa: E402
from tailrace.compat import tensorflow as compat  # noqa: E402
from tailrace.errors import ProgramError  # noqa: E402

X = np.array([3.0, -1.0, 4.0, -1.5, 9.0], np.float32)


def while_with_break_and_continue(tf):
    @tf.function
    def run(x, limit):
        total, i = tf.constant(0.0), tf.constant(0)
        while i < limit:
            i += 1
            if x[i % 5] < 0:
                continue
            total += x[i % 5]
            if total > 20.0:
                break
        return total, i

    return [run(tf.constant(X), tf.constant(n)) for n in (0, 3, 50)]


def nested_branches(tf):
    @tf.function
    def run(x):
        if x > 0:
            if x > 3.5:  # noqa: SIM108  (a statement is what is tested)
                kind = 2
            else:
                kind = 1
        elif x < -1.2:
            kind = -2
        else:
            kind = -1
        return kind

    return [run(tf.constant(value)) for value in X]


def branch_with_early_return(tf):
    @tf.function
    def run(x):
        if tf.reduce_sum(x) > 10.0:
            return x * 2.0
        for i in tf.range(3):
            x = x + tf.cast(i, tf.float32)
        return -x

    return [run(tf.constant(X)), run(tf.constant(-X))]


def loop_over_rows_in_a_loop(tf):
    @tf.function
    def run(rows):
        out = tf.zeros([2])
        for row in rows:
            inner = tf.constant(0.0)
            for value in row:
                if value < 0.0:
                    continue
                inner += value
            out = out * 0.5 + inner
        return out

    return run(tf.constant(X[:4].reshape(2, 2)))


def conditions_with_and_or_not(tf):
    @tf.function
    def run(x):
        if (x > 0 and x < 5) or not x < 100:
            return tf.constant(1)
        return tf.constant(0)

    return [run(tf.constant(value)) for value in X]


def assertion_and_python_values(tf):
    @tf.function
    def run(x, names=("a", "b")):
        found = {}
        for name in names:
            found[name] = x * float(len(found) + 1)
        values = []
        for name in sorted(found):
            values.append(tf.reduce_sum(found[name]))
        return tf.stack(values)

    return run(tf.constant(X))


def variable_in_while(tf):
    count = tf.Variable(0)
    weight = tf.Variable(2.0)

    @tf.function
    def run():
        while weight < 100.0:
            weight.assign(weight * 1.5)
            count.assign_add(1)
        return weight.read_value()

    run()
    return [count.numpy(), weight.numpy()]


def tape_in_a_loop_with_a_branch(tf):
    weight = tf.Variable([1.0, -2.0])

    @tf.function
    def run(steps):
        loss = tf.constant(0.0)
        for _ in tf.range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight**2)
                if loss > 1.0:
                    loss = loss * 0.5
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return [run(tf.constant(5)), weight.numpy()]


def tape_over_a_while(tf):
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            i = 0
            while i < 3:
                y = y * x
                i += 1
        return tape.gradient(y, x)

    return [run(tf.constant(2.0)), tf.function(run)(tf.constant(2.0))]


def persistent_nested_tapes(tf):
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(x**3)
        first = inner.gradient(y, x)
        z = tf.reduce_sum(first * x)
    return [first, outer.gradient(y, x), outer.gradient(z, x)]


def tape_with_stop_and_unconnected(tf):
    a, b = tf.Variable(2.0), tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = a * tf.stop_gradient(b)
    first = tape.gradient(y, [a, b], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(b)
        y = a * b
    return [*first, tape.gradient(y, b)]


def custom_gradient(tf):
    @tf.custom_gradient
    def clipped(x):
        def grad(upstream):
            return tf.clip_by_value(upstream, -0.1, 0.1)

        return x * 1.0, grad

    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(clipped(x) * 5.0)
    return tape.gradient(y, x)


def loop_in_words_of_operations(tf):
    i, total = tf.while_loop(
        lambda i, total: i < 4,
        lambda i, total: (i + 1, total + tf.cast(i, tf.float32)),
        (tf.constant(0), tf.constant(0.0)),
    )
    found = tf.cond(total > 5.0, lambda: total, lambda: -total)
    chosen = tf.switch_case(tf.constant(1), [lambda: 10, lambda: 20])
    return [
        i,
        total,
        found,
        chosen,
        tf.map_fn(lambda v: v * 2.0, tf.constant(X)),
        tf.scan(lambda a, v: a + v, tf.constant(X)),
    ]


def shapes_and_indices(tf):
    x = tf.reshape(tf.range(12), [3, 4])
    return [
        tf.gather(x, [2, 0]),
        tf.gather_nd(x, [[0, 1], [2, 3]]),
        tf.tensor_scatter_nd_update(x, [[1, 1]], [99]),
        tf.boolean_mask(x, x > 6),
        tf.where(x > 6, x, -x),
        tf.transpose(x)[::2, -1],
        tf.strided_slice(x, [0, 1], [3, 4], [2, 2]),
        x[..., tf.newaxis].shape[2],
        tf.shape(x)[0],
        tf.concat([x, x], 0),
        tf.stack(tf.unstack(x), 1),
        tf.split(x, 2, axis=1)[1],
        tf.one_hot([0, 2], 3),
        tf.pad(x, [[1, 0], [0, 1]]),
        tf.cumsum(x, axis=1, exclusive=True),
        tf.argsort(-x),
        tf.math.top_k(tf.constant(X), 2)[0],
    ]


def matrices(tf):
    a = tf.constant([[4.0, 1.0], [1.0, 3.0]])
    q, r = tf.linalg.qr(a)
    values, vectors = tf.linalg.eigh(a)
    return [
        tf.abs(q),
        tf.abs(r),
        values,
        tf.abs(vectors),
        tf.linalg.inv(a),
        tf.linalg.cholesky(a),
        tf.linalg.solve(a, tf.constant([[1.0], [2.0]])),
        tf.linalg.det(a),
        tf.einsum("ij,jk->ik", a, a),
        tf.tensordot(a, a, 1),
        tf.linalg.matmul(a, a, transpose_b=True),
        tf.linalg.norm(a),
        tf.linalg.trace(a),
        tf.linalg.diag_part(a),
        tf.linalg.band_part(a, 0, -1),
    ]


def constants_of_branches(tf):
    @tf.function
    def run(x):
        y = tf.cond(x > 2.0, lambda: tf.constant(7), lambda: tf.constant(8))
        if x > 0:  # noqa: SIM108
            z = tf.constant(1.5)
        else:
            z = 2.5
        return y, z, tf.case([(x > 5.0, lambda: 1), (x > 3.5, lambda: 2)], default=lambda: 3)

    return [run(tf.constant(value)) for value in X]


def integers_and_casts(tf):
    x = tf.constant([7, -7])
    return [
        x // 2,
        x % 3,
        tf.math.floormod(x, 3),
        tf.truncatediv(x, 2),
        tf.truncatemod(x, 3),
        tf.cast(tf.constant([1.7, -1.7]), tf.int32),
        tf.cast(x, tf.bool),
        tf.math.divide_no_nan(tf.constant([1.0, 2.0]), tf.constant([0.0, 4.0])),
        x / 2,
        tf.constant(3) ** 2,
        tf.reduce_mean(tf.constant([1, 2, 4])),
        tf.argmax(tf.constant([1, 5, 2])),
        tf.reduce_any(x > 0),
    ]


def sequence_of_a_session(tf):
    v1 = tf.compat.v1
    with v1.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        with v1.variable_scope("layer"):
            w = v1.get_variable("w_of_a_session", [2, 1], initializer=v1.ones_initializer())
        y = tf.reduce_mean((tf.matmul(x, w) - 1.0) ** 2)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(y)
        with v1.Session() as sess:
            sess.run(v1.global_variables_initializer())
            data = X[:4].reshape(2, 2)
            losses = [sess.run(y, feed_dict={x: data})]
            for _ in range(3):
                sess.run(train, {x: data})
                losses.append(sess.run(y, feed_dict={x: data}))
            return [np.array(losses), sess.run(w)]


def methods_of_a_module(tf):
    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable([[1.0], [2.0]], name="weight")

        @tf.function
        def __call__(self, x, *, scale=1.0, parts=None):
            y = tf.matmul(x, self.weight) * scale
            for name in parts or {}:
                y += parts[name]
            return {"y": y, "mean": tf.reduce_mean(y)}

    net = Net()
    x = tf.constant(X[:4].reshape(2, 2))
    first, second = net(x), net(x, scale=2.0, parts={"a": tf.constant(1.0)})
    return [first["y"], first["mean"], second["y"], len(net.trainable_variables)]


def loop_over_a_dataset(tf):
    total = tf.constant(0.0)
    dataset = tf.data.Dataset.from_tensor_slices(X).map(lambda v: v * 2.0).batch(2)
    for batch in dataset:
        total += tf.reduce_sum(batch)
    return [total, len(list(dataset.as_numpy_iterator()))]


def tensor_arrays(tf):
    @tf.function
    def in_a_loop(x):
        rows = tf.TensorArray(tf.float32, size=5)
        for i in tf.range(5):
            rows = rows.write(i, x[i] * x)
        return rows.stack(), rows.read(2), rows.gather([1, 3])

    @tf.function
    def in_branches(x):
        rows = tf.TensorArray(tf.float32, size=5, element_shape=[])
        more = tf.TensorArray(tf.float32, size=1)
        if tf.reduce_sum(x) > 0.0:  # noqa: SIM108
            more = more.write(0, x)
        else:
            more = more.write(0, -x)
        for i in tf.range(5):
            if x[i] > 0.0:
                rows = rows.write(i, x[i])
        return rows.stack(), more.concat()

    @tf.function
    def in_words(x):
        rows = tf.TensorArray(tf.float32, size=4)
        _, rows = tf.while_loop(
            lambda i, rows: i < 4, lambda i, rows: (i + 1, rows.write(i, x[i])), (0, rows)
        )
        return rows.stack()

    @tf.function
    def growing(x):
        rows = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        for i in range(3):
            rows = rows.write(i, x * float(i))
        parts = tf.TensorArray(tf.float32, size=5).unstack(x)
        return rows.stack(), rows.size(), parts.read(1)

    @tf.function
    def differentiated(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = tf.TensorArray(tf.float32, size=5)
            for i in range(5):
                rows = rows.write(i, x[i] ** 2)
            y = tf.reduce_sum(rows.stack())
        return tape.gradient(y, x)

    x = tf.constant(X)
    on_host = tf.TensorArray(tf.float32, size=2)
    on_host = on_host.write(0, 1.0).write(1, 2.0)
    parts = [f(x) for f in (in_a_loop, in_branches, in_words, growing, differentiated)]
    return [*parts, on_host.stack()]


def lengths_of_shapes(tf):
    @tf.function
    def run(x):
        n = tf.shape(x)[0]
        rows = tf.reshape(x, [n // 2, -1])
        flat = tf.reshape(rows, tf.concat([[1], [tf.reduce_prod(tf.shape(rows))]], 0))
        wide = tf.reshape(x, tf.stack([n // 2, 2, 1]))
        total = tf.zeros([n, 2]) + tf.cast(n, tf.float32)
        for _ in range(tf.size(x)):
            total += 1.0
        if tf.equal(tf.rank(rows), 2):
            total *= 2.0
        return (
            rows,
            flat,
            wide,
            total,
            tf.range(n),
            tf.ones(tf.shape(x)),
            tf.shape(x)[tf.cast(x[1], tf.int32)],
        )

    return run(tf.constant(np.float32([3.0, 0.0, 4.0, 1.0])))


def lists_in_place_of_tensors(tf):
    rows = [[1.0, 2.0], [3.0, 4.0]]

    @tf.function
    def run():
        return (
            tf.reduce_sum(rows, axis=[0]),
            tf.reduce_mean(rows, [0, 1]),
            tf.reverse([3.0, -1.0], [0]),
            tf.pad(rows, [[1, 0], [0, 1]]),
            tf.where([True, False], [1.0, 2.0], [3.0, 4.0]),
            tf.math.segment_sum([3.0, -1.0, 2.0], [0, 0, 1]),
            tf.math.in_top_k([0], [[1.0, 2.0]], 1),
            tf.sequence_mask([1, 3]),
            tf.searchsorted([1.0, 3.0, 5.0], [2.0, 5.0], side="right"),
            tf.ensure_shape(rows, [None, 2]),
        )

    return run()


def functions_of_python(tf):
    @tf.function
    def run(x, n):
        total = tf.constant(0)
        for i in range(n):
            total += i
        for i in range(8, n, -2):
            total += i
        return total, int(x[0]) + 1, float(n) / 2.0

    return run(tf.constant(X), tf.constant(4))


def checks_of_values(tf):
    @tf.function
    def run(x):
        tf.debugging.assert_equal(tf.shape(x)[0], 5)
        tf.debugging.assert_rank(x, 1)
        x = tf.debugging.assert_all_finite(x, "not finite")
        tf.debugging.assert_less(x, 100.0)
        tf.debugging.Assert(tf.reduce_all(x < 100.0), [x])
        return tf.debugging.check_numerics(x, "not finite") * 2.0

    return run(tf.constant(X))


def methods_of_tensors(tf):
    x = tf.constant(X.reshape(5, 1))
    w = tf.Variable(X)

    @tf.function
    def run(x):
        x.set_shape([5, 1])
        rows, columns = x.get_shape().as_list()
        return x * float(rows * columns) * float(w.shape.as_list()[0])

    found = run(x).numpy()
    best = tf.nn.top_k(w, 2)
    return [found, x.get_shape().as_list(), w.shape.rank, best.values.numpy(), best.indices]


PROGRAMS = [
    while_with_break_and_continue,
    nested_branches,
    branch_with_early_return,
    loop_over_rows_in_a_loop,
    conditions_with_and_or_not,
    assertion_and_python_values,
    variable_in_while,
    tape_in_a_loop_with_a_branch,
    tape_over_a_while,
    persistent_nested_tapes,
    tape_with_stop_and_unconnected,
    custom_gradient,
    loop_in_words_of_operations,
    shapes_and_indices,
    matrices,
    methods_of_a_module,
    loop_over_a_dataset,
    constants_of_branches,
    integers_and_casts,
    sequence_of_a_session,
    tensor_arrays,
    lengths_of_shapes,
    lists_in_place_of_tensors,
    functions_of_python,
    checks_of_values,
    methods_of_tensors,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=[one.__name__ for one in PROGRAMS])
def test_a_program_gives_what_tensorflow_gives(program):
    found = _leaves(program(compat))
    try:
        expected = _leaves(program(real))
    except real.errors.OperatorNotAllowedInGraphError:
        pytest.skip("TensorFlow's own AutoGraph does not know this Python")
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.shape(one) == np.shape(other)
        assert_close(np.asarray(one, np.float32), np.asarray(other, np.float32))


def _leaves(value):
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in _leaves(one)]
    return [np.asarray(value)]


def test_a_return_in_a_loop_leaves_it():
    """TensorFlow refuses it; the meaning is Python's."""

    @compat.function
    def first_above(x, wanted):
        for i in compat.range(5):
            if x[i] > wanted:
                return i
        return -1

    assert [int(first_above(X, compat.constant(v))) for v in (0.0, 3.5, 100.0)] == [0, 2, -1]


def test_arrays_do_not_grow_in_loops_of_the_device():
    @compat.function
    def squares(x):
        found = compat.TensorArray(compat.float32, size=0, dynamic_size=True)
        for i in compat.range(3):
            found = found.write(i, x * x)
        return found.stack()

    with pytest.raises(ProgramError, match="Give it the number of rows"):
        squares(compat.constant(2.0))


def test_errors_name_the_line_that_the_user_wrote():
    @compat.function
    def reshaped(x):
        if x[0] > 0:
            x = x + 1
        return compat.zeros([compat.cast(compat.reduce_sum(x), compat.int32)])  # this line

    written = pathlib.Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(written) if text.endswith("# this line"))
    with pytest.raises(TypeError, match=f"test_tensorflow_programs.py:{line}: it is known only"):
        reshaped(compat.constant(X))


def test_the_largest_and_the_smallest_of_values_of_a_program():
    """TensorFlow refuses them; the meaning is Python's."""

    @compat.function
    def run(x):
        return max(x[0], x[1]), min(x[0], x[1], x[3]), max(x)

    assert [float(each) for each in run(compat.constant(X))] == [3.0, -1.5, 9.0]


def test_a_condition_that_is_not_rewritten_is_named():
    @compat.function
    def positive(x):
        return [each for each in compat.unstack(x) if each > 0]

    with pytest.raises(
        ProgramError, match=r"test_tensorflow_programs.py:\d+: one in a comprehension"
    ):
        positive(compat.constant(X))


def test_a_layer_computes_shapes_from_those_of_its_inputs():
    """Keras asks for the shape of its result with a batch of unknown length."""

    class Halves(compat.keras.layers.Layer):
        def call(self, x):
            batch, length = compat.shape(x)[0], x.get_shape().as_list()[1]
            return compat.reshape(x, [batch, 2, length // 2])

    inputs = compat.keras.Input((4,))
    halves = Halves()(inputs)
    flat = compat.reshape(halves, [compat.shape(halves)[0], 4])
    model = compat.keras.Model(inputs, flat)
    assert halves.shape == (None, 2, 2)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert_close(model.predict(x, verbose=0), x)


def test_values_of_a_program_have_no_numpy():
    with pytest.raises(ProgramError, match="known only when the program runs. Return it"):
        compat.function(lambda x: x.numpy())(compat.constant(X))
