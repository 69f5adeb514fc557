"""Names of TensorFlow, Keras and the originals' packages: here, passed on, or refused."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest

import tailrace as tr
from oracles import assert_close

keras = pytest.importorskip("keras")

from tailrace.compat import ipu, popdist  # noqa: E402
from tailrace.compat import ipu_tensorflow_addons as addons  # noqa: E402
from tailrace.compat import tensorflow as tf  # noqa: E402
from tailrace.compat.tensorflow import host  # noqa: E402


def test_names_that_are_not_here_name_the_nearest():
    for name, text in (
        ("reduce_men", r"tf\.reduce_men is no name of TensorFlow\. Did you mean tf\.reduce_mean"),
        ("relu", r"It is tf\.nn\.relu"),
    ):
        with pytest.raises(AttributeError, match=text) as caught:
            getattr(tf, name)
        assert isinstance(caught.value, tr.TailraceError)
    with pytest.raises(AttributeError, match=r"Did you mean tf\.nn\.softmax"):
        tf.nn.softmx  # noqa: B018
    with pytest.raises(ImportError, match=r"Did you mean tf\.reduce_mean"):
        from tailrace.compat.tensorflow import reduce_men  # noqa: F401
    assert not hasattr(tf, "reduce_men")
    assert getattr(tf.nn, "nothing", 3) == 3
    with pytest.raises(AttributeError, match="TensorFlow has removed estimators"):
        tf.estimator  # noqa: B018
    with pytest.raises(AttributeError, match=r"keras.*Did you mean.*layers"):
        tf.keras.layer  # noqa: B018


def test_what_tensorflow_has_and_programs_do_not_is_said():
    pytest.importorskip("tensorflow")
    with pytest.raises(
        AttributeError, match="tf.nn.ctc_loss is not available in programs of the device"
    ):
        tf.nn.ctc_loss  # noqa: B018


def test_the_host_s_part_is_tensorflow_s():
    real = pytest.importorskip("tensorflow")
    assert tf.data.Dataset is real.data.Dataset
    assert tf.io.decode_png is real.io.decode_png
    assert tf.data.experimental.AUTOTUNE == real.data.experimental.AUTOTUNE
    assert tf.summary.create_file_writer is real.summary.create_file_writer


def test_without_tensorflow_the_host_s_part_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(
        tr.TailraceError, match=r"tf\.data\.Dataset is done on the host by TensorFlow"
    ):
        host.named("data.Dataset")


def test_modules_are_imported_by_their_dotted_names():
    from tailrace.compat.tensorflow.keras.layers import Dense
    from tailrace.compat.tensorflow.keras.optimizer_v2 import optimizer_v2
    from tailrace.compat.tensorflow.keras.preprocessing import sequence
    from tailrace.compat.tensorflow.python.framework import dtypes
    from tailrace.compat.tensorflow.python.keras.engine.sequential import Sequential
    from tailrace.compat.tensorflow.python.ops import math_ops
    from tailrace.compat.tensorflow.python.training.optimizer import Optimizer

    import tailrace.compat.tensorflow.keras as tf_keras
    from tailrace.compat.tensorflow.python import ipu as same

    assert Dense is keras.layers.Dense
    assert Sequential is keras.Sequential
    assert same is ipu
    assert optimizer_v2.OptimizerV2 is keras.optimizers.Optimizer
    assert sequence.pad_sequences([[1], [1, 2]]).tolist() == [[0, 1], [1, 2]]
    assert tf_keras.ipu.PipelineStage is ipu.keras.PipelineStage
    assert math_ops.reduce_mean is tf.reduce_mean
    assert dtypes.float32 == tf.float32
    assert issubclass(Optimizer, ipu.optimizers.Optimizer)
    assert keras.layers.__spec__.name == "keras.layers"  # Keras' modules stay what they are


def test_dtypes_are_taken_everywhere():
    assert np.zeros(2, tf.int32).dtype == np.int32
    assert keras.Input((3,), dtype=tf.int32).dtype == "int32"
    assert tf.float32 == "float32"
    assert tf.float32 != tf.int32
    assert tf.as_dtype(np.int8) == tf.int8
    assert tf.float16.is_floating
    assert tf.int32.max == 2**31 - 1
    assert tf.bool.is_bool
    assert tf.cast([1.7], tf.int32).dtype == tf.int32
    with pytest.raises(tr.TailraceError, match="Cannot convert 'text' to a dtype"):
        tf.cast([1], "text")


# -- Keras -------------------------------------------------------------------------------------------


def test_arguments_that_keras_has_dropped_are_taken():
    assert tf.keras.Input(shape=(80)).shape == (None, 80)
    assert tf.keras.layers.Input(7).shape == (None, 7)
    assert float(tf.keras.optimizers.SGD(lr=0.25).learning_rate) == 0.25
    assert float(tf.keras.optimizers.Adam(lr=0.5).learning_rate) == 0.5
    falling = tf.keras.optimizers.SGD(0.5, decay=1.0)
    falling.build([])
    assert float(falling.learning_rate) == 0.5
    assert tf.keras.layers.Embedding(3, 2, input_length=4).output_dim == 2

    class Scaled(tf.keras.layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight("factor", shape=[1], initializer="ones")

        def call(self, x):
            return x * self.factor

    assert Scaled()(np.ones((2, 3), "float32")).shape == (2, 3)


def test_operations_make_functional_models():
    x = tf.keras.Input((4,))
    model = tf.keras.Model(x, tf.reduce_mean(tf.nn.relu(x) * 2.0, axis=-1))
    assert model(np.array([[1.0, -1.0, 3.0, 0.0]], "float32")).tolist() == [2.0]


def test_the_layers_of_the_addons():
    layers = addons.keras.layers
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")
    keras.utils.set_random_seed(1)
    ours = layers.PopnnLSTM(4, return_sequences=True, options={"a": "b"})(x)
    keras.utils.set_random_seed(1)
    assert np.array_equal(ours, keras.layers.LSTM(4, return_sequences=True)(x))
    keras.utils.set_random_seed(1)
    turned = layers.LSTM(4, return_sequences=True, time_major=True)(x.swapaxes(0, 1))
    assert np.array_equal(np.swapaxes(turned, 0, 1), ours)
    assert layers.GRU(4)(x).shape == (2, 4)
    assert layers.Embedding(10, 4, serialization_factor=2)(np.array([[1, 2]])).shape == (1, 2, 4)
    normal = layers.GroupNormalization(groups=3)(x)
    assert np.allclose(normal, keras.layers.GroupNormalization(3)(x), atol=1e-6)
    instance = np.asarray(layers.InstanceNormalization()(x))
    assert np.allclose(instance.mean(axis=1), 0, atol=1e-5)
    assert layers.SerialDense(4, serialization_factor=2, serialization_dimension="kernel_rows")(
        x
    ).shape == (2, 5, 4)
    assert np.array_equal(layers.Dropout(0.5, seed=[1, 2])(x), x)
    checkpoint = layers.RecomputationCheckpoint()
    a, b = checkpoint([keras.Input((3,)), keras.Input((4,))])
    assert a.shape == (None, 3)
    assert b.shape == (None, 4)


def test_popdist_of_one_process(monkeypatch):
    import tailrace.compat.popdist.tensorflow
    from tailrace.compat.ipu.distributed import popdist_strategy

    monkeypatch.setenv("POPDIST_NUM_LOCAL_REPLICAS", "2")
    assert (popdist.getNumInstances(), popdist.getInstanceIndex()) == (1, 0)
    assert (
        popdist.getNumTotalReplicas()
        == popdist_strategy.PopDistStrategy().num_replicas_in_sync
        == 2
    )
    config = ipu.config.IPUConfig()
    tailrace.compat.popdist.tensorflow.set_ipu_config(config, ipus_per_replica=2)
    assert config.auto_select_ipus == 4


# -- processes -----------------------------------------------------------------------------------------


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


CONFIGURED = """
from tailrace.compat import ipu
for count in (1, 2, 4, 8, 2):
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = count
    config.configure_ipu_system()
    assert len(ipu.config.group()) == count
"""


@pytest.mark.parametrize(
    "before",
    ["", "import keras, jax\n", "import tailrace\n"],
    ids=["first", "after keras", "after tailrace"],
)
def test_programs_ask_for_devices_again_and_again(before):
    done = run(f"import os; os.environ['KERAS_BACKEND'] = 'jax'\n{before}{CONFIGURED}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


LEFT_OPEN = """
import os
os.environ.update(KERAS_BACKEND="jax", TF_CPP_MIN_LOG_LEVEL="3")
from tailrace.compat import ipu
from tailrace.compat import tensorflow as tf

outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
data = tf.data.Dataset.from_tensor_slices(([[1.0]] * 64, [[0.0]] * 64))
data = data.batch(4, drop_remainder=True).repeat()
infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)
infeed.initializer
strategy = ipu.ipu_strategy.IPUStrategy()


def step(iterator):
    x, y = next(iterator)
    outfeed.enqueue(x)
    return tf.reduce_sum(x - y)


session = tf.compat.v1.Session()
session.__enter__()
with strategy.scope():
    iterator = iter(data)
    assert float(strategy.run(step, [iterator])) == 4.0
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=2)
    model.fit(data, steps_per_epoch=4, shuffle=False, verbose=0)
"""


@pytest.mark.parametrize("end", ["", "del iterator, infeed, model, data"])
def test_nothing_is_printed_when_a_program_ends(end):
    """Queues, iterators, a session and a model are left open: finalisers run at the very end."""
    done = run(f"{LEFT_OPEN}\n{end}")
    # TensorFlow says on which processor it runs, where it is loaded.
    start = ("WARNING: All log messages", "I0000 ", "W0000 ", "E0000 ")
    printed = [line for line in done.stderr.splitlines() if not line.startswith(start)]
    assert (done.returncode, done.stdout, printed) == (0, "", [])


def test_where_jax_has_started_the_advice_works():
    code = "import jax; jax.devices()\nfrom tailrace.compat import ipu\n"
    code += "config = ipu.config.IPUConfig()\n"
    code += "config.auto_select_ipus = 2\nconfig.configure_ipu_system()"
    done = run(code)
    assert "TAILRACE_DEVICES=2" in done.stderr
    asked = "import os; os.environ['TAILRACE_DEVICES'] = '2'\n"
    again = run(asked + code)
    assert "Import tailrace first" in again.stderr
    assert run(f"{asked}import tailrace\n{code}").returncode == 0
    assert run(f"import tailrace.compat\n{code}").returncode == 0


def test_a_step_of_tensorflow_s_keras_trains_as_keras_does():
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    y = x @ np.float32([[1.0], [2.0], [-1.0]])

    class Written(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compiled_loss(y, self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"loss": loss}

    def trained(make, scope):
        with scope:
            keras.utils.set_random_seed(3)
            model = make()
            model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse", steps_per_execution=4)
            model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        return [np.asarray(v) for v in model.trainable_variables]

    strategy = ipu.ipu_strategy.IPUStrategy()
    ours = trained(Written, strategy.scope())
    plain = trained(lambda: keras.Sequential([keras.layers.Dense(1)]), contextlib.nullcontext())
    assert_close(ours, plain)
