"""Plain Keras beside the same model with Tailrace's trainer."""

import keras
import numpy as np

import tailrace.keras as tk
from oracles import assert_close


def digits_like(examples=96, features=6, classes=4, seed=0):
    """A small classification problem."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, features)).astype(np.float32)
    y = rng.integers(0, classes, examples).astype(np.int32)
    return x, y


def twins(make, execution=3, replicas=1, **compiled):
    """The same model twice: as it is, and adopted; `compiled` holds functions that make arguments."""
    pair = []
    for adopted in (False, True):
        keras.utils.set_random_seed(7)
        model = make()
        if adopted:
            model = tk.adopt(model, replicas)
        arguments = {name: value() for name, value in compiled.items()}
        model.compile(**arguments, steps_per_execution=execution if adopted else 1)
        pair.append(model)
    return pair


def fit_both(pair, *data, **call):
    """Train both on the same data in the same order; returns their histories."""
    found = []
    for model in pair:
        keras.utils.set_random_seed(3)
        arguments = {k: v() if callable(v) else v for k, v in call.items()}
        given = [d() if callable(d) else d for d in data]
        found.append(model.fit(*given, verbose=0, **arguments).history)
    return found


def assert_same(pair, histories):
    """Weights, state, optimizer and history agree."""
    plain, ours = pair
    # A model's own number is part of the names of its outputs, so names are compared without it.
    assert len(histories[0]) == len(histories[1])
    for a, b in zip(histories[0].values(), histories[1].values(), strict=True):
        assert_close(np.float32(b), np.float32(a))
    for kind in ("trainable_variables", "non_trainable_variables"):
        for a, b in zip(getattr(plain, kind), getattr(ours, kind), strict=True):
            assert_close(np.asarray(b.value), np.asarray(a.value))
    for a, b in zip(plain.optimizer.variables, ours.optimizer.variables, strict=True):
        assert_close(np.asarray(b.value), np.asarray(a.value))


def classifier():
    """Sequential, not built before it sees data."""
    return keras.Sequential(
        [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(4, activation="softmax")]
    )


SPARSE = {
    "optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "loss": lambda: "sparse_categorical_crossentropy",
}
