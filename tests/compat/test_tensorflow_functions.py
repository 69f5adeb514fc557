"""`tf.function`, loops and branches over values of the device, and tapes; against TensorFlow itself.

Each program is written once, with `tf` as an argument, and run with both.
"""

import numpy as np
import pytest

import tailrace as tr
from oracles import assert_close

real = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
pytest.importorskip("malt")

from tailrace.compat import ipu  # noqa: E402
from tailrace.compat import tensorflow as tf  # noqa: E402
from tailrace.compat.tensorflow.control import autograph  # noqa: E402

X = np.array([1.0, 3.0], np.float32)


def arrays(out):
    if isinstance(out, dict):
        return {key: arrays(value) for key, value in out.items()}
    if isinstance(out, list | tuple):
        return type(out)(arrays(value) for value in out)
    return None if out is None else np.asarray(out)


def both(make, *args):
    """A function made with each `tf`, called with the same arguments."""
    ours = arrays(make(tf)(*args))
    real.config.run_functions_eagerly(True)  # its own AutoGraph does not know every Python
    try:
        theirs = arrays(make(real)(*args))
    finally:
        real.config.run_functions_eagerly(False)
    assert_close(ours, theirs)
    return ours


# -- loops and branches -----------------------------------------------------------------------------


def counted(tf):
    @tf.function
    def f(x, n):
        total = tf.zeros_like(x)
        for i in tf.range(n):
            total += x * tf.cast(i, tf.float32)
        return total

    return f


def left_early(tf):
    @tf.function
    def f(x):
        total, seen = tf.constant(0.0), tf.constant(0)
        for i in tf.range(10):
            if i == 2:
                continue
            total += tf.reduce_sum(x)
            seen += 1
            if total > 12.0:
                break
        return total, seen

    return f


def until(tf):
    @tf.function(jit_compile=True)
    def f(x):
        count = 0
        while tf.reduce_sum(x) < 100.0:
            x = x * 2
            count += 1
            last = x - 1
        return {"x": x, "count": count, "last": last}

    return f


def chosen(tf):
    @tf.function
    def f(x):
        if tf.reduce_mean(x) > 2.5 and x[0] > 0:
            return x * 2
        elif not x[0] > 1.5:
            y = -x
        else:
            y = x + 100
        return y if x[1] < 100 else y * 0

    return f


def rows(tf):
    @tf.function
    def f(x):
        best = tf.constant(-1e9)
        for row in x:
            best = tf.maximum(best, tf.reduce_sum(row))
        return best

    return f


def helped(tf):
    def helper(x):
        for _ in tf.range(3):
            x = x + 1
        return x

    @tf.function
    def inner(x):
        return helper(x) * 2

    @tf.function
    def f(x):
        for _ in range(2):  # of Python: unrolled
            x = inner(x)
        return x

    return f


def nested(tf):
    @tf.function
    def f(x):
        total = tf.constant(0.0)
        for i in tf.range(3):
            for j in tf.range(i + 1):
                if j > 0:
                    total += x[0] * tf.cast(j, tf.float32)
        return total

    return f


@pytest.mark.parametrize("make", [left_early, until, chosen, nested], ids=lambda m: m.__name__)
def test_loops_and_branches(make):
    both(make, X)
    both(make, X * 7)


def test_a_loop_over_a_count():
    both(counted, X, 4)
    f = counted(tf)
    assert_close(np.asarray(f(X, tf.constant(4))), np.asarray(f(X, 4)))  # a length of the device


def test_a_loop_over_rows():
    both(rows, np.arange(12, dtype=np.float32).reshape(4, 3))


def test_functions_that_are_called_are_rewritten_too():
    both(helped, X)


def test_a_branch_that_leaves_two_kinds_is_refused():
    @tf.function
    def f(x):
        y = tf.constant(0)
        if x[0] > 0:
            y = tf.constant(0.5)
        return y

    with pytest.raises(
        tr.TailraceError, match=r"A branch over a value of the device must leave its names \(y\)"
    ):
        f(X)


def test_a_loop_that_changes_a_dtype_is_refused():
    @tf.function
    def f(x):
        y = 0
        for _ in tf.range(3):
            y = tf.cast(y, tf.float32) + x[0]
        return y

    with pytest.raises(
        tr.TailraceError, match=r"A loop over a value of the device must leave its names"
    ):
        f(X)


def test_variables_are_carried_by_loops_and_branches():
    v = tf.Variable(1.0)

    @tf.function
    def f(x):
        for i in tf.range(5):
            if i > 2:
                v.assign_add(x[0])
            else:
                v.assign(v * 2)
        return v + 0

    assert float(f(X)) == 10.0
    assert float(v.numpy()) == 10.0


def test_without_the_package_a_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr(autograph, "_malt", lambda: None)

    @tf.function
    def f(x):
        return x if x[0] > 0 else -x

    with pytest.raises(tr.TailraceError, match=r"diastatic-malt.*tailrace\[tensorflow\]"):
        f(X)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    @tf.function
    def loop(x):
        for _ in tf.range(3):
            x = x + 1
            outfeed.enqueue(x)
        return x

    strategy = ipu.ipu_strategy.IPUStrategy()
    with pytest.raises(
        tr.TailraceError, match=r"only be enqueued once.*diastatic-malt.*tailrace\[tensorflow\]"
    ):
        strategy.run(loop, args=[X])


# -- functions ----------------------------------------------------------------------------------------


def test_a_function_is_compiled_once_for_a_form_and_returns_what_it_returns():
    traced = []

    class Model:
        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        def double(self, x):
            traced.append(x)
            return {"a": (x * 2, None)}

    model = Model()
    for value in ([1.0], [2.0]):
        out = model.double(np.array(value))
    assert out["a"][1] is None
    assert float(out["a"][0][0]) == 4.0
    assert out["a"][0].dtype == tf.float32
    assert len(traced) <= 2  # looked through, and traced


def test_arrays_in_containers_are_data():
    f = tf.function(lambda pair, flag=True: pair["a"] + pair["b"][0] if flag else pair["a"])
    for n in range(3):
        assert float(f({"a": np.float32(n), "b": [tf.constant(1.0)]})) == n + 1
    assert f.experimental_get_tracing_count() == 1
    assert float(f({"a": np.float32(1), "b": [tf.constant(1.0)]}, flag=False)) == 1
    assert f.experimental_get_tracing_count() == 2


def test_a_function_of_tensorflow_in_a_strategy_is_unwrapped():
    @real.function
    def f(x):
        return x * 2

    strategy = ipu.ipu_strategy.IPUStrategy()
    for _ in range(3):
        assert np.asarray(strategy.run(f, args=[real.constant([1.0, 2.0])])).tolist() == [2.0, 4.0]
    assert strategy.program_count == 1


# -- tapes --------------------------------------------------------------------------------------------


def tape_program(tf, mode):
    v, w = tf.Variable([1.0, -2.0]), tf.Variable(3.0)

    def run(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            hidden = tf.nn.relu(x * v) + tf.sin(w)
            loss = tf.reduce_mean(hidden**2)
            other = tf.reduce_sum(x)
        pair = tape.gradient(loss, {"v": v, "w": [w]})
        v.assign_sub(0.1 * pair["v"])  # the tape knows what it was before
        again = tape.gradient(loss, v)
        weighted = tape.gradient(hidden, x, output_gradients=tf.constant([2.0, 3.0]))
        several = tape.gradient([loss, other], x)
        return pair, again, weighted, several

    return tf.function(run) if mode == "function" else run


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_tapes(mode):
    ours = arrays(tape_program(tf, mode)(tf.constant(X)))
    theirs = arrays(tape_program(real, mode)(real.constant(X)))
    assert_close(ours, theirs)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_gradient_of_a_gradient(mode):
    def program(tf):
        return (tf.function(nest) if mode == "function" else nest)(tf, tf.constant(3.0))

    def nest(tf, x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = x * x * x
            first = inner.gradient(y, x)
        return first, outer.gradient(first, x)

    assert_close(arrays(program(tf)), arrays(program(real)))


def test_what_a_target_does_not_depend_on():
    def program(tf):
        a, b = tf.Variable(1.0), tf.Variable(2.0)
        with tf.GradientTape(persistent=True) as tape:
            y = a * 2
        zero = tf.UnconnectedGradients.ZERO
        return tape.gradient(y, [a, b]), tape.gradient(y, b, unconnected_gradients=zero)

    (first, none), zero = program(tf)
    (_, expected), _ = program(real)
    assert expected is None
    assert none is None
    assert float(first) == 2.0
    assert float(zero) == 0.0


def test_a_tape_gives_one_set_of_gradients():
    v = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = v * v
    assert [v.name for v in tape.watched_variables()] == [v.name]
    tape.gradient(y, v)
    with pytest.raises(tr.TailraceError, match="A non-persistent GradientTape can only be used"):
        tape.gradient(y, v)


def test_jacobians():
    def program(tf):
        x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x**3
        return tape.jacobian(y, x), tape.batch_jacobian(y, x)

    assert_close(arrays(program(tf)), arrays(program(real)))


def test_what_is_computed_while_a_tape_does_not_record():
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
        with tape.stop_recording():
            z = x * 10
        total = y + z
    assert float(tape.gradient(total, x)) == 6.0


def test_a_model_of_keras_under_a_tape_trains_as_keras_does():
    keras.utils.set_random_seed(0)
    x, y = np.random.default_rng(0).normal(size=(2, 8, 3)).astype("float32")
    model = keras.Sequential(
        [keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    )
    optimizer = keras.optimizers.SGD(0.1)
    with tf.GradientTape() as tape:  # the first call builds the model
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    before = [np.asarray(v) for v in model.trainable_variables]
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    import jax

    def oracle(values):
        out, _ = model.stateless_call(values, model.non_trainable_variables, x, training=True)
        return keras.ops.mean((out - y) ** 2)

    expected = jax.grad(oracle)(before)
    assert_close([np.asarray(g) for g in grads], [np.asarray(g) for g in expected])
    after = [b - 0.1 * np.asarray(g) for b, g in zip(before, expected, strict=True)]
    assert_close([np.asarray(v) for v in model.trainable_variables], after)
