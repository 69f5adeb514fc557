"""Options of a pipeline that do not fit its stages, its devices or each other."""

import logging

import keras
import numpy as np
import optax
import pytest

import tailrace as tr
import tailrace.keras as tk
from oracles import assert_close
from tailrace.devices.devices import available, chosen, use
from tailrace.errors import PlanError

L = keras.layers
X, Y = np.ones((32, 3), np.float32), np.ones((32, 1), np.float32)


def two_stages(*count, **options):
    keras.utils.set_random_seed(1)
    model = tk.adopt(keras.Sequential([keras.Input((3,)), L.Dense(4), L.Dense(1)]))
    model.set_pipeline_stage_assignment([0, 1])
    model.set_pipelining_options(*count or (4,), **options)
    model.compile("sgd", "mse", steps_per_execution=4)
    return model


def fit(model):
    return model.fit(X, Y, batch_size=8, verbose=0)


@pytest.fixture
def two_devices():
    before = chosen()
    use(available()[:2])
    yield
    use(before)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(("mapping", "beyond"), [([0, 5], "5"), ([7, 7], "7"), ([2, 3], "2, 3")])
def test_devices_that_are_not_there(mapping, beyond, caplog):
    model = two_stages(device_mapping=mapping)
    rule = "device_mapping numbers the devices of a replica from 0, and a replica has 2 here."
    with pytest.raises(PlanError) as caught:
        fit(model)
    assert f"{rule} Received: device {beyond}. Use numbers below 2" in str(caught.value)
    # A model that was trained elsewhere is still good for inference.
    with caplog.at_level(logging.WARNING, "tailrace"):
        assert_close(model.predict(X, verbose=0), np.asarray(model(X)))
    assert "predict runs the whole model on one device" in caplog.text
    assert rule in caplog.text


def test_devices_of_two_replicas():
    def first(w, x):
        return x * w

    def second(w, h):
        return (h * w).sum()

    pipeline = tr.Pipeline([first, second], accumulation=4, device_mapping=[0, 4])
    ones = [np.float32(1), np.float32(1)]
    trainer = tr.Trainer(pipeline, optax.sgd(0.1), ones, replicas=2)
    with pytest.raises(PlanError, match=r"4 here \(8 for 2 replicas\). Received: device 4\."):
        trainer.fit(tr.batches(X, 1), steps=1)


def test_a_mapping_of_another_length():
    model = two_stages(device_mapping=[0])
    with pytest.raises(PlanError, match=r"1 mappings != 2 stages\. Received device_mapping=\[0\]"):
        fit(model)


def test_too_few_batches_in_flight():
    model = two_stages(2)
    use_four = "Use gradient_accumulation_steps_per_replica=4,"
    with pytest.raises(PlanError, match=f"multiple of 4, but it is 2.*{use_four}"):
        fit(model)


def test_accumulation_of_models_without_stages(caplog):
    model = two_stages()
    with caplog.at_level(logging.WARNING, "tailrace"):
        model.set_gradient_accumulation_options(4, "sum")
        fit(model)
        assert "has no effect" not in caplog.text
        model.set_gradient_accumulation_options(2, "mean", dtype="float32")
        fit(model)
    assert (
        "set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=2, "
        "gradient_accumulation_reduction_method='mean', dtype='float32') is for models without stages"
    ) in caplog.text
    assert "set_pipelining_options says, gradient_accumulation_steps_per_replica=4" in caplog.text
    assert model.optimizer.iterations == 2
