"""`evaluate` and `predict` of a model that is cut into stages run as pipelines, and equal Keras."""

import contextlib
import logging

import keras
import numpy as np
import pytest
from keras_oracle import digits_like

import tailrace.keras as tk
from oracles import assert_close
from tailrace.pipeline.running.forward_only import ForwardPipeline, ForwardRunner

L = keras.layers


def chain(stage):
    """Layers that behave otherwise in training."""
    del stage
    return keras.Sequential(
        [
            keras.Input((6,)),
            L.Dense(5, activation="relu", name="a"),
            L.Dropout(0.5, name="d"),
            L.BatchNormalization(name="n"),
            L.Dense(4, activation="softmax", name="b"),
        ]
    )


def branched(stage):
    """Two outputs, one of an early stage; a shared layer with a regularizer; a skip connection."""
    inputs = keras.Input((6,), name="in")
    with stage(0):
        shared = L.Dense(6, name="shared", kernel_regularizer="l2")
        x = shared(inputs)
        early = L.Dense(2, name="early")(x)
    with stage(1):
        y = L.Dense(6, activation="relu", name="middle")(x)
    with stage(2):
        late = L.Dense(4, activation="softmax", name="late")(shared(y) + inputs)
    return keras.Model(inputs, {"early": early, "late": late})


class Counting(keras.Model):
    """Names stages in its call, has steps of its own, and counts the batches it is evaluated on."""

    def __init__(self, stage):
        super().__init__()
        with stage(0):
            self.first = L.Dense(5, activation="relu", name="first")
        with stage(1):
            self.last = L.Dense(4, activation="softmax", name="last")
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        return self.last(self.first(x))

    def test_step(self, state, data):
        logs, (trainable, others, metrics) = super().test_step(state, data)
        number = next(i for i, v in enumerate(self.non_trainable_variables) if v is self.seen)
        others = [v + 1 if i == number else v for i, v in enumerate(others)]
        return logs, (trainable, others, metrics)

    def predict_step(self, state, data):
        outputs, others = super().predict_step(state, data)
        return (outputs, outputs.argmax(-1)), others


def counting(stage):
    model = Counting(stage)
    model(digits_like(8)[0])
    return model


SPARSE = {
    "loss": "sparse_categorical_crossentropy",
    "metrics": ["accuracy"],
    "weighted_metrics": ["sparse_categorical_crossentropy"],
}


def twins(make, replicas=1, stages=None, compiled=SPARSE, schedule="grouped"):
    """The same model as Keras has it, and cut into stages."""
    keras.utils.set_random_seed(7)
    plain = make(lambda number: contextlib.nullcontext())
    with tk.Strategy(replicas).scope():
        staged = make(tk.PipelineStage)
    if stages is not None:
        staged.set_pipeline_stage_assignment(stages)
    staged.set_pipelining_options(schedule=schedule)
    rng = np.random.default_rng(2)
    weights = [np.asarray(w + rng.uniform(0.1, 0.5, w.shape), w.dtype) for w in plain.get_weights()]
    for model in (plain, staged):
        model.set_weights(weights)  # statistics of BatchNormalization that are not those of nothing
        model.compile("sgd", **compiled)
    return plain, staged


def assert_equal_to_keras(pair, x, y, *, batch_size=8, execution, weights=None):
    plain, staged = pair
    staged.steps_per_execution = execution
    call = {"batch_size": batch_size, "verbose": 0}
    for _ in range(2):  # metrics start again
        expected = plain.evaluate(x, y, sample_weight=weights, return_dict=True, **call)
        found = staged.evaluate(x, y, sample_weight=weights, return_dict=True, **call)
        assert found.keys() == expected.keys()
        assert_close(*({n: np.float32(v) for n, v in one.items()} for one in (found, expected)))
    assert_close(staged.predict(x, **call), plain.predict(x, **call))
    assert_close(staged.get_weights(), plain.get_weights())
    for mode in ("test", "predict"):
        assert ran_as(staged, mode) == {ForwardRunner}


def ran_as(model, mode):
    return {type(runner) for runner in tk.of(model).programs[mode]._runners.values()}


# -- what must be equal -------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["grouped", "interleaved", "sequential"])
def test_inference_mode_sample_weights_and_a_smaller_last_batch(schedule):
    pair = twins(chain, stages=[0, 0, 0, 1], schedule=schedule)
    weights = np.random.default_rng(1).uniform(size=51).astype(np.float32)
    # Six batches and one of three: passes of six, and of one.
    assert_equal_to_keras(pair, *digits_like(51), execution=7, weights=weights)


def test_two_outputs_one_of_an_early_stage():
    loss = {"early": "mse", "late": "sparse_categorical_crossentropy"}
    metrics = {"early": ["mae"], "late": ["accuracy"]}
    x, y = digits_like(56)
    targets = {"early": np.stack([y, y], 1).astype(np.float32), "late": y}
    pair = twins(branched, compiled={"loss": loss, "metrics": metrics})
    assert_equal_to_keras(pair, x, targets, execution=7)
    mesh = next(iter(tk.of(pair[1]).programs["test"]._runners.values())).placement.mesh
    assert mesh.devices.shape == (1, 3)


def test_replicas_of_a_pipeline():
    pair = twins(chain, replicas=2, stages=[0, 0, 0, 1])
    assert_equal_to_keras(pair, *digits_like(96), execution=6)
    mesh = next(iter(tk.of(pair[1]).programs["test"]._runners.values())).placement.mesh
    assert mesh.devices.shape == (2, 2)


def test_steps_of_the_users_own_that_change_variables():
    pair = twins(counting, compiled={"loss": "sparse_categorical_crossentropy"})
    assert_equal_to_keras(pair, *digits_like(48), execution=3)
    assert int(pair[1].seen.value) >= 12


def test_validation_while_a_pipeline_trains():
    histories = []
    for pipelined in (False, True):
        keras.utils.set_random_seed(1)
        with tk.Strategy().scope():
            model = chain(None)
        model.layers[1].rate = 0.0
        if pipelined:
            model.set_pipeline_stage_assignment([0, 0, 0, 1])
        model.set_pipelining_options(4)
        model.set_gradient_accumulation_options(4)
        model.compile(keras.optimizers.SGD(0.05), **SPARSE, steps_per_execution=4)
        x, y = digits_like(84)
        call = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
        fit = model.fit(x[:64], y[:64], validation_data=(x[64:], y[64:]), **call)
        histories.append({name: np.float32(values) for name, values in fit.history.items()})
    assert "val_accuracy" in histories[1]
    assert_close(histories[1], histories[0])
    assert ran_as(model, "test") == {ForwardRunner}


def test_layers_send_what_passes_in_prediction():
    queue = tk.MaybeOutfeedQueue()
    with tk.Strategy().scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                tk.MaybeOutfeed(queue, name="seen"),
                L.Dense(4, name="a"),
                L.Dense(4, name="b"),
            ]
        )
    model.set_pipeline_stage_assignment([0, 0, 1])
    model.compile(steps_per_execution=6)
    x, _ = digits_like(48)
    model.predict(x, batch_size=8, verbose=0)
    assert_close(queue.maybe_dequeue()["seen"], x.reshape(6, 8, 6))


# -- where there is no pipeline -----------------------------------------------------------------


class Around(keras.Model):
    """A prediction that passes by the call of the model."""

    def __init__(self, stage):
        super().__init__()
        with stage(0):
            self.first = L.Dense(5)
        with stage(1):
            self.last = L.Dense(4)

    def call(self, x):
        return self.last(self.first(x))

    def predict_step(self, state, data):
        return keras.utils.unpack_x_y_sample_weight(data)[0] * 2, state[1]


def around(stage):
    model = Around(stage)
    model(digits_like(8)[0])
    return model


@pytest.mark.parametrize(
    ("make", "replicas", "message"),
    [
        (around, 1, "`predict_step` does not go through the stages of the model"),
        (branched, 4, "12 devices"),
    ],
)
def test_what_cannot_be_a_pipeline_runs_on_one_device_with_a_note(make, replicas, message, caplog):
    plain, staged = twins(make, replicas, compiled={})
    x, _ = digits_like(32)
    with caplog.at_level(logging.WARNING, "tailrace"):
        found = staged.predict(x, batch_size=8, verbose=0)
    assert_close(found, plain.predict(x, batch_size=8, verbose=0))
    assert "predict runs the whole model on one device of each replica" in caplog.text
    assert message in caplog.text


def test_any_number_of_batches_has_a_plan():
    for schedule in ("grouped", "interleaved", "sequential"):
        pipeline = ForwardPipeline(lambda x: x, schedule=schedule)
        for count in (1, 2, 4, 7):
            made = pipeline.plan((1, 1, 1), training=False, count=count).check()
            assert made.microbatches == count
            assert (made.timetable().forward[:, 2] >= 0).sum() == count
        one = pipeline.plan((1, 1, 1), training=False, count=3 if schedule != "sequential" else 1)
        assert one.own_ticks is None
