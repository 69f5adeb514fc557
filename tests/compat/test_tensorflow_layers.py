"""AutoGraph in the `call` of layers: branches and loops over values of the device."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("malt")
pytest.importorskip("tensorflow")

from oracles import assert_close  # noqa: E402
from tailrace.compat import ipu  # noqa: E402
from tailrace.compat import tensorflow as tf  # noqa: E402
from tailrace.errors import ProgramError  # noqa: E402

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


class Gate(tf.keras.layers.Layer):
    """A branch, a loop with a name that it gives a value, and a variable that a branch changes."""

    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(4, kernel_initializer="ones")
        self.positive = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="positive"
        )

    def call(self, x):
        if tf.reduce_sum(x) > 0:
            y = self.dense(x)
            self.positive.assign_add(1.0)
        else:
            y = -x
        for _ in tf.range(3):
            z = y + 1.0
            y = z
        return z


class Where(tf.keras.layers.Layer):
    """The same, written without branches."""

    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(4, kernel_initializer="ones")

    def call(self, x):
        return tf.where(tf.reduce_sum(x) > 0, self.dense(x), -x) + 3.0


@pytest.mark.parametrize("functional", [False, True])
def test_a_branch_in_a_layer_trains_like_a_choice(functional):
    ipu.config.reset_ipu_configuration()

    def trained(kind):
        with ipu.ipu_strategy.IPUStrategy().scope():
            if functional:
                inputs = keras.Input((4,), batch_size=4)
                model = keras.Model(inputs, keras.layers.Dense(1)(kind()(inputs)))
            else:
                model = keras.Sequential([kind(), keras.layers.Dense(1)])
            model.build((4, 4))
            model.set_weights([np.ones(w.shape, w.dtype) for w in model.get_weights()])
            model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=2)
            model.fit(X, X[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model

    found, plain = trained(Gate), trained(Where)
    gate = found.layers[1 if functional else 0]
    assert_close(gate.dense.get_weights(), plain.layers[1 if functional else 0].dense.get_weights())
    assert float(gate.positive.numpy()) == 3.0  # 1 at first, and one positive batch in each epoch


def test_a_branch_in_a_layer_of_a_device_function():
    gate = Gate()
    gate(keras.Input((4,), batch_size=4))
    strategy = ipu.ipu_strategy.IPUStrategy()

    @tf.function
    def step(x):
        return gate(x)

    for x, passes in ((X[4:], 1.0), (X[:4], 1.0)):
        plain = x @ np.ones((4, 4), np.float32) if x.sum() > 0 else -x
        assert_close(np.asarray(strategy.run(step, args=[x])), plain + 3.0)
        assert float(gate.positive.numpy()) == passes


def test_a_layer_on_the_host_is_python():
    gate = Gate()
    assert_close(np.asarray(gate(X[4:])), X[4:] @ np.ones((4, 4), np.float32) + 3.0)
    assert float(gate.positive.numpy()) == 1.0


class Plain(tf.keras.layers.Layer):
    """A layer that asks for its branches to stay Python's."""

    @tf.autograph.experimental.do_not_convert
    def call(self, x):
        return x if tf.reduce_sum(x) > 0 else -x


def test_a_layer_that_is_not_converted_says_so():
    with pytest.raises(ProgramError, match="Plain.call has a condition over a value of the device"):
        keras.Model(inputs := keras.Input((4,), batch_size=4), Plain()(inputs))
