"""The rules of the original's Keras: known lengths, executions that divide epochs, no eager steps."""

import keras
import numpy as np
import pytest

import tailrace as tr
from oracles import assert_close
from tailrace.compat import ipu

L = keras.layers


@pytest.fixture
def line(request):
    """Makes the smallest model there is, on some devices."""

    def make(devices=1, execution=1, **compiled):
        config = ipu.config.IPUConfig()
        config.auto_select_ipus = devices
        config.configure_ipu_system()
        with ipu.ipu_strategy.IPUStrategy().scope():
            model = keras.Sequential([keras.Input((2,)), L.Dense(1)])
            model.compile("sgd", "mse", steps_per_execution=execution, **compiled)
        return model

    yield make
    ipu.config.reset_ipu_configuration()


def points(examples=8):
    x = np.random.default_rng(0).normal(size=(examples, 2)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def endless():
    while True:
        yield points()


@pytest.mark.parametrize(
    ("execution", "devices", "call", "message"),
    [
        (1, 1, {}, "Could not infer the size of the data. You must specify the number of steps"),
        (1, 2, {"steps_per_epoch": 1}, "contains 1 items, but all 2 replicas are requested to run"),
        (3, 1, {"steps_per_epoch": 4}, r"\(3\) must be a divisor of the number of batches \(4\)"),
        (3, 2, {"steps_per_epoch": 8}, r"\(4\) in the dataset provided to this replica"),
    ],
)
def test_counting_rules(line, execution, devices, call, message):
    with pytest.raises(ValueError, match=message) as caught:
        line(devices, execution).fit(endless(), verbose=0, shuffle=False, **call)
    assert isinstance(caught.value, tr.TailraceError)


def test_there_is_enough_data_for_all_epochs(line):
    x, y = points(48)
    with pytest.raises(ValueError, match="does not have enough data.*at least 14 batches"):
        line().fit(x, y, batch_size=8, steps_per_epoch=7, epochs=2, verbose=0)


def test_nothing_runs_a_step_at_a_time(line):
    x, y = points()
    with pytest.raises(tr.TailraceError, match="cannot run eagerly"):
        line(run_eagerly=True)
    with pytest.raises(tr.TailraceError, match="jit_compile=False"):
        line(jit_compile=False)
    later = line()
    later.run_eagerly = True
    with pytest.raises(tr.TailraceError, match="Keras' own loop would run it"):
        later.fit(x, y, verbose=0)


def test_a_minimize_that_nobody_would_call_is_refused(line):
    class Own(keras.optimizers.SGD):
        def minimize(self, loss, var_list):
            raise AssertionError("nobody calls it")

    model = line()
    with pytest.raises(ValueError, match="must not override OptimizerV2.minimize.*Received: Own"):
        model.compile(Own(), "mse")


@pytest.mark.parametrize("method", list(ipu.optimizers.GradientAccumulationReductionMethod))
@pytest.mark.parametrize("way", ["set_gradient_accumulation_options", "set_pipelining_options"])
def test_setters_take_the_original_s_enumeration(line, method, way):
    model = line()
    getattr(model, way)(
        gradient_accumulation_steps_per_replica=2, gradient_accumulation_reduction_method=method
    )
    saved = model.tailrace.options
    found = (
        saved.pipelining_reduction_method
        if way == "set_pipelining_options"
        else saved.gradient_accumulation_reduction_method
    )
    assert found == method.name.lower()


def test_pipelining_options_about_dtypes(line, caplog):
    model = line()
    model.set_pipelining_options(
        gradient_accumulation_dtype=np.float32, accumulate_outfeed_dtype=np.float32
    )
    assert model.tailrace.options.pipelining_accumulation_dtype == "float32"
    assert "accumulate_outfeed_dtype" in caplog.text


def test_optimizers_of_programs_are_not_those_of_models(line):
    model = line()
    scaling = ipu.optimizers.ALSOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="a Keras model: ALSOptimizer.*LossScaleOptimizer"):
        model.compile(scaling, "mse")
    with pytest.raises(ValueError, match="Use ipu.keras.optimizers"):
        model.compile(optimizer=ipu.optimizers.CrossReplicaOptimizer(keras.optimizers.SGD(0.1)))
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = points()
    assert np.isfinite(model.fit(x, y, batch_size=4, verbose=0).history["loss"]).all()


@pytest.mark.parametrize("name", ["train_step", "test_step", "predict_step"])
def test_steps_of_the_other_keras_are_noted(name, caplog):
    class Model(keras.Model):
        def call(self, x):
            return x

    def step(self, data):
        raise AssertionError("not called")

    setattr(Model, name, step)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = Model()
    model.compile("sgd", "mse")
    assert f"Model.{name}(self, data) is a step of TensorFlow's Keras" in caplog.text


def test_more_stages_than_devices_may_be_saved_and_mapped(line, tmp_path):
    model = line()
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), L.Dense(2), L.Dense(1)])
        model.set_pipeline_stage_assignment([0, 1])
        model.save(tmp_path / "model.keras")
        keras.models.clone_model(model)
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=2, device_mapping=[0, 0]
        )
        model.compile("sgd", "mse", steps_per_execution=2)
    x, y = points()
    model.set_pipelining_options(schedule="sequential")
    assert len(model.fit(x, y, batch_size=4, verbose=0).history["loss"]) == 1


class Steps(keras.callbacks.Callback):
    """Hears of batches in evaluations and predictions."""

    def __init__(self):
        super().__init__()
        self.begun, self.ended, self.seen = [], [], []

    def on_test_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.ended.append(batch)
        self.seen.append(float(logs["loss"]))

    def on_predict_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_predict_batch_end(self, batch, logs=None):
        self.ended.append(batch)
        self.seen.append(np.asarray(logs["outputs"]))


@pytest.mark.parametrize("way", ["evaluate", "predict"])
def test_asynchronous_callbacks_hear_of_every_step(line, way):
    x, y = points(32)
    model = line(execution=4)
    plain = keras.Sequential([keras.Input((2,)), L.Dense(1)])
    plain.compile("sgd", "mse")
    plain.set_weights(model.get_weights())

    def heard(one):
        callback = Steps()
        data = (x, y) if way == "evaluate" else (x,)
        getattr(one, way)(*data, batch_size=4, verbose=0, callbacks=[callback])
        return callback

    once = heard(model)
    assert (once.begun, once.ended) == ([0, 4], [3, 7])
    model.set_asynchronous_callbacks(True)
    every, expected = heard(model), heard(plain)
    assert every.begun == every.ended == list(range(8))
    if way == "evaluate":
        assert_close(np.float32(every.seen), np.float32(expected.seen))
    else:  # Keras gives the last one of an execution all of its outputs
        assert [len(seen) for seen in every.seen] == [4, 4, 4, 16, 4, 4, 4, 16]
        assert_close(every.seen[1], expected.seen[1])


def test_asynchronous_callbacks_hear_of_validation(line):
    x, y = points(32)
    model = line(execution=4)
    model.set_asynchronous_callbacks(True)
    callback = Steps()
    model.fit(x, y, batch_size=4, verbose=0, validation_data=(x, y), callbacks=[callback])
    assert callback.ended == list(range(8))
