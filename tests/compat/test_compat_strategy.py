"""Device functions and models in the scope of an IPUStrategy."""

import jax.numpy as jnp
import numpy as np
import pytest

import tailrace as tr
from oracles import assert_close
from tailrace.compat import ipu
from tailrace.compat.ipu import config, ipu_outfeed_queue, loops

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from counting import use  # noqa: E402

from tailrace.compat.ipu.ipu_infeed_queue import IPUOwnedIterator  # noqa: E402
from tailrace.compat.ipu.ipu_strategy import IPUStrategy, IPUStrategyV1  # noqa: E402


def data(count, batch=4):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(count * batch, 3)).astype(np.float32)
    y = rng.integers(0, 5, size=count * batch).astype(np.int32)
    return x, y, tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True)


def model_of():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(5, "softmax")])


def training_loop(iterator, outfeed_queue, model, optimizer, num_iterations):
    """The seed's training loop: tf.range became loops.repeat, and the tape is ours."""

    def step():
        features, labels = next(iterator)
        with ipu.GradientTape() as tape:
            predictions = model(features, training=True)
            loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, predictions))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        outfeed_queue.enqueue(loss)

    loops.repeat(num_iterations, step)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_custom_training_loop_equals_keras_own(devices):
    use(devices)
    x, y, dataset = data(6 * devices)
    strategy = IPUStrategy()
    with strategy.scope():
        opt = keras.optimizers.SGD(0.1)
        model = model_of()
        iterator = iter(dataset.repeat())
        assert isinstance(iterator, IPUOwnedIterator)
        with pytest.raises(RuntimeError, match="can not be accessed in eager mode when inside"):
            next(iterator)
        outfeed_queue = ipu_outfeed_queue.IPUOutfeedQueue()
        for _ in range(0, 6, 3):
            strategy.run(training_loop, args=[iterator, outfeed_queue, model, opt, 3])
        result = outfeed_queue.dequeue()
    plain = model_of()
    plain.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    size = 4 * devices
    expected = [
        plain.train_on_batch(x[i : i + size], y[i : i + size]) for i in range(0, 6 * size, size)
    ]
    assert_close(result.reshape(6, -1).mean(axis=1), np.float32(expected))
    assert_close(model.get_weights(), plain.get_weights())
    assert not isinstance(iter(dataset), IPUOwnedIterator)


def test_functions_of_arrays():
    use(1)
    strategy = IPUStrategy()
    assert strategy.run(lambda x, y=1.0: x + y, args=[np.float32(1)]) == 2
    assert strategy.run(lambda x: None, args=[np.float32(1)]) is None
    with pytest.raises(TypeError, match="Unsupported data type for input: float64"):
        strategy.run(lambda x: x, args=[np.zeros(2)])
    with pytest.raises(ValueError, match="takes a function"):
        strategy.run(3)
    with pytest.raises(RuntimeError, match="use strategy.run"):
        strategy.experimental_run_v2(lambda: None)
    with pytest.raises(ValueError, match="Unsupported reduce op"):
        strategy.all_reduce("max", 1.0)
    assert strategy.num_replicas_in_sync == 1
    assert IPUStrategy is IPUStrategyV1
    use(2)
    assert strategy.run(lambda x: strategy.all_reduce("SUM", x), args=[jnp.float32(3)]) == 6


def test_iterators_may_be_left_as_they_are():
    with IPUStrategy(enable_dataset_iterators=False).scope():
        assert not isinstance(iter(data(1)[2]), IPUOwnedIterator)
    with IPUStrategy(enable_keras_extensions=False).scope():
        assert not hasattr(model_of(), "set_pipelining_options")


@pytest.mark.parametrize("devices", [1, 2])
def test_replicas_of_a_model_are_those_of_the_configuration(devices):
    use(devices)
    x, y, dataset = data(8)
    with IPUStrategy().scope():
        model = model_of()
        assert model.tailrace.replicas == devices
        model.compile(
            keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", steps_per_execution=4
        )
        model.fit(dataset, epochs=1, verbose=0, shuffle=False)
    plain = model_of()
    plain.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    size = 4 * devices
    for i in range(0, 32, size):
        plain.train_on_batch(x[i : i + size], y[i : i + size])
    assert_close(model.get_weights(), plain.get_weights())


def test_a_pipelined_model_takes_several_devices():
    use(8)
    with IPUStrategy().scope():
        model = model_of()
        assert model.tailrace.replicas == 8
        model.set_pipeline_stage_assignment([0, 1])
        assert model.tailrace.replicas == 4
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=4, device_mapping=[0, 2]
        )
        assert model.tailrace.replicas == 2
        use(6)
        with pytest.raises(
            ValueError,
            match="Current device has 6 IPUs attached, however the current model requires a "
            "multiple of 4",
        ):
            _ = model.tailrace.replicas


def test_names_of_keras_are_there():
    for name in dir(ipu.keras):
        assert getattr(ipu.keras, name) is not None or name.startswith("__")
    for name in dir(ipu.keras.optimizers):
        assert getattr(ipu.keras.optimizers, name) is not None or name.startswith("__")
    assert config is ipu.config
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = ipu.keras.Nothing


@pytest.mark.filterwarnings("ignore:.*shuffle=True.*:UserWarning")
def test_a_queue_of_the_original_in_a_layer(capsys):
    use(1)
    _, _, dataset = data(4)
    queue = ipu_outfeed_queue.IPUOutfeedQueue()
    with IPUStrategy().scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(8, "relu"),
                ipu.keras.Outfeed(queue, name="acts"),
                keras.layers.Dense(5, "softmax"),
            ]
        )
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=4)
        callback = ipu.keras.OutfeedCallback(queue, "Single layer activations callback")
        model.fit(dataset, epochs=2, verbose=0, callbacks=[callback])
    printed = capsys.readouterr().out
    assert "key: acts shape: (4, 4, 8)" in printed
    assert "Epoch 2 - Summary Stats" in printed


@pytest.mark.parametrize("which", ["ipu", "tensorflow"])
def test_a_pipeline_in_a_device_function(which):
    use(2)
    from tailrace.compat import tensorflow
    from tailrace.compat.ipu import pipelining_ops

    tapes = {"ipu": ipu, "tensorflow": tensorflow}
    w = keras.Variable(2.0)
    optimizer, losses = keras.optimizers.SGD(0.5), ipu_outfeed_queue.IPUOutfeedQueue()

    def optimizer_function(loss):
        with tapes[which].GradientTape() as tape:
            tape.watch(w)
        return pipelining_ops.OptimizerFunctionOutput(optimizer, loss, tape=tape)

    def net(x):
        return pipelining_ops.pipeline(
            [lambda x: w * x, lambda x: x + 1],
            4,
            inputs=[x],
            optimizer_function=optimizer_function,
            outfeed_queue=losses,
            outfeed_loss=True,
        )

    strategy = IPUStrategy()
    with strategy.scope():
        strategy.run(net, args=[np.float32(1.5)])
    assert float(w.value) == 2 - 0.5 * 1.5 * 4
    assert losses.dequeue().tolist() == [4.0] * 4


def test_models_live_on_the_first_logical_device():
    cfg = config.IPUConfig()
    cfg.auto_select_ipus = [1, 1]
    cfg.configure_ipu_system()
    with (
        IPUStrategy("/device:IPU:1").scope(),
        pytest.raises(ValueError, match="Keras models train on the first logical device"),
    ):
        model_of()


# -- what TensorFlow's programs bring along ---------------------------------------------------------


@pytest.mark.parametrize("library", ["tensorflow", "torch", "numpy", "jax"])
def test_arrays_of_every_library_are_arguments(library):
    module = pytest.importorskip(library)
    make = {
        "tensorflow": lambda x: module.constant(x),
        "torch": lambda x: module.tensor(x),
        "numpy": lambda x: np.asarray(x, np.float32),
        "jax": lambda x: module.numpy.asarray(x, np.float32),
    }[library]
    strategy = IPUStrategy()

    def double(x, y=None):
        return 2 * x + y

    for number in range(4):
        found = strategy.run(double, [make([1.0, number])], {"y": make([0.5, 0.5])})
        assert np.asarray(found).tolist() == [2.5, 2 * number + 0.5]
    assert strategy.program_count == 1


def test_a_tf_function_is_compiled_by_the_strategy():
    found = IPUStrategy().run(tf.function(lambda x: x + 1), [np.float32(1)])
    assert found == 2


@pytest.mark.parametrize("way", ["run", "compile"])
def test_an_operation_of_another_library_is_named_with_its_line(way):

    def function(x):
        return tf.reduce_mean(x)

    x = np.float32([1, 2])
    run = {
        "run": lambda: IPUStrategy().run(function, [x]),
        "compile": lambda: ipu.ipu_compiler.compile(function, [x])(),
    }[way]
    with pytest.raises(TypeError, match=r"of TensorFlow .*test_compat_strategy.py:\d+.*keras.ops"):
        run()


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("asked", "advice"), [("64", "Import tailrace first"), ("2", "TAILRACE_DEVICES=64")]
)
def test_too_few_devices_say_why(asked, advice, monkeypatch):
    monkeypatch.setenv("TAILRACE_DEVICES", asked)
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 64
    with pytest.raises(tr.errors.DeviceError, match=advice):
        cfg.configure_ipu_system()
    with pytest.raises(tr.errors.DeviceError, match=advice):
        tr.configure(devices=64)


@pytest.mark.parametrize("devices", [1, 2])
def test_what_queues_deliver_has_the_methods_of_tensors(devices):
    from tailrace.compat import tensorflow as words

    use(devices)
    strategy = IPUStrategy()
    with strategy.scope():
        every = ipu_outfeed_queue.IPUOutfeedQueue()
        last = ipu_outfeed_queue.IPUOutfeedQueue(ipu_outfeed_queue.IPUOutfeedMode.LAST)
        w = words.Variable(1.0)

        @words.function
        def run(iterator):
            for _ in words.range(3):
                x, _y = next(iterator)
                w.assign_add(1.0)
                every.enqueue({"w": w, "x": [x]})  # a variable is sent as its value
                last.enqueue(w)
            return w * 2.0

        iterator = iter(data(6)[2].repeat())
        result = strategy.run(run, [iterator])
        assert np.all(result.numpy() == 8.0)
        found = every.dequeue()
        shape = (3,) if devices == 1 else (3, 2)
        assert found["w"].numpy().shape == shape
        assert type(found["x"][0].numpy()) is np.ndarray
        assert float(words.reduce_mean(found["w"]).numpy()) == found["w"].mean() == 3.0
        assert np.all(last.dequeue().numpy() == 4.0)
        strategy.run(run, [iterator])
        rows = [row["w"].numpy() for row in every]
        assert [np.max(row) for row in rows] == [5.0, 6.0, 7.0]
        assert np.shape(rows[0]) == shape[1:]


def test_a_pipeline_in_a_function_given_to_run():
    """The way in which programs of TensorFlow 2 train by a pipeline; the optimizer is made inside."""
    from tailrace.compat import tensorflow as words

    use(2)
    w, v = words.Variable(2.0), words.Variable(3.0)
    losses = ipu_outfeed_queue.IPUOutfeedQueue()

    @words.function(experimental_compile=True)
    def train():
        ipu.pipelining_ops.pipeline(
            [lambda x: w * x, lambda y: words.square(y * v)],
            4,
            repeat_count=2,
            inputs=[1.0],
            outfeed_queue=losses,
            outfeed_loss=True,
            optimizer_function=lambda loss: ipu.pipelining_ops.OptimizerFunctionOutput(
                words.keras.optimizers.SGD(0.01), loss, variables=[w, v]
            ),
            reduction_method="mean",
        )

    strategy = IPUStrategy()
    with strategy.scope():
        strategy.run(train)
    a, b = 2.0, 3.0
    expected = []
    for _ in range(2):
        expected += [(a * b) ** 2] * 4
        a, b = a - 0.01 * 2 * a * b * b, b - 0.01 * 2 * a * a * b
    assert_close(losses.dequeue(), np.float32(expected))
    assert_close(w.numpy(), np.float32(a))
