"""Masks that Keras attaches to tensors cross the boundaries of stages, as the values do."""

import keras
import numpy as np
import pytest

import tailrace.keras as tk
from oracles import assert_close

L = keras.layers

# Keras says so of models that are given a mask, and hands it on to their layers nevertheless.
pytestmark = pytest.mark.filterwarnings("ignore:.*does not support masking:UserWarning")


def embedding():
    return L.Embedding(5, 6, mask_zero=True)


def rnn(units, **kwargs):
    return L.SimpleRNN(units, **kwargs)


def chain():
    return keras.Sequential([keras.Input((7,), dtype="int32"), embedding(), rnn(4), L.Dense(1)])


class Followed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = embedding(), rnn(4), L.Dense(1)

    def call(self, x):
        return self.head(self.rnn(self.embedding(x)))


def followed():
    model = Followed()
    model(np.ones((2, 7), np.int32))
    return model


def nested():
    inner = keras.Sequential([keras.Input((7, 6)), rnn(4, return_sequences=True), rnn(3)])
    inputs = keras.Input((7,), dtype="int32")
    return keras.Model(inputs, L.Dense(1)(inner(embedding()(inputs))))


def sequences():
    """Two masked values meet, and the mask goes on to the loss."""
    inputs = keras.Input((7,), dtype="int32")
    x = embedding()(inputs)
    y = rnn(6, return_sequences=True)(x)
    return keras.Model(inputs, L.Dense(1)(L.Add()([x, y])))


CASES = {
    "Sequential": (chain, [0, 1, 1], False),
    "subclassed": (followed, [0, 1, 1], False),
    "a model inside": (nested, [0, [1, 2], 2], False),
    "up to the loss": (sequences, [0, 1, 1, 2], True),
}


def data(steps):
    """Sequences of 1 to 7 words, the rest 0; a target for each, or for each of their words."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 5, (48, 7)).astype(np.int32)
    x[np.arange(7) >= rng.integers(1, 8, (48, 1))] = 0
    return x, rng.normal(size=(48, 7, 1) if steps else (48, 1)).astype(np.float32)


def three(make, stages):
    """The model as Keras has it, adopted, and cut into stages; gradients of 12 batches are averaged."""
    keras.utils.set_random_seed(7)
    models = [make() for _ in range(3)]
    optimizers = [keras.optimizers.SGD(0.5, gradient_accumulation_steps=12)]
    optimizers += [keras.optimizers.SGD(0.5) for _ in range(2)]
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        model.set_weights(models[0].get_weights())
        if number:
            tk.adopt(model)
        execution = {"steps_per_execution": 12} if number else {}
        model.compile(optimizer, "mse", weighted_metrics=["mae"], **execution)
    models[1].set_gradient_accumulation_options(12, "mean")
    models[2].set_pipeline_stage_assignment(stages)
    models[2].set_pipelining_options(12, gradient_accumulation_reduction_method="mean")
    return models


QUICK = ("Sequential", "up to the loss")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in QUICK else [pytest.mark.exhaustive]) for c in CASES],
)
def test_masks_reach_the_stages_behind(case):
    make, stages, steps = CASES[case]
    x, y = data(steps)
    models = plain, ours, staged = three(make, stages)
    call = {"batch_size": 4, "verbose": 0}
    histories = [model.fit(x, y, epochs=2, shuffle=False, **call).history for model in models]
    assert ours.optimizer.iterations == staged.optimizer.iterations == 2
    for other, history in zip(models[:2], histories[:2], strict=True):
        assert_close(staged.get_weights(), other.get_weights())
        for name, values in history.items():
            assert_close(np.float32(histories[2][name]), np.float32(values))
    assert_close(
        np.float32(staged.evaluate(x, y, **call)), np.float32(plain.evaluate(x, y, **call))
    )
    assert_close(staged.predict(x, **call), plain.predict(x, **call))
    # The masks matter: without any zeros, all of it is different.
    whole = np.where(x == 0, 1, x)
    assert abs(staged.evaluate(whole, y, **call)[0] - plain.evaluate(x, y, **call)[0]) > 1e-3


def test_a_mask_that_is_given_in_the_call():
    model = tk.adopt(
        keras.Sequential([keras.Input((7, 3)), rnn(4, return_sequences=True), rnn(2), L.Dense(1)])
    )
    model.set_pipeline_stage_assignment([0, 1, 1])
    x = np.random.default_rng(1).normal(size=(4, 7, 3)).astype(np.float32)
    mask = data(False)[0][:4] != 0
    expected = model(x, mask=mask)
    with model.tailrace.in_stages():
        assert_close(model(x, mask=mask), expected)
        assert not np.allclose(model(x), expected, rtol=1e-3)
