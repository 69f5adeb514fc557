"""The same results as plain Keras, for every kind of model and everything `compile` and `fit` take."""

import keras
import numpy as np
import pytest
from keras_oracle import SPARSE, assert_same, classifier, digits_like, fit_both, twins

import tailrace as tr
import tailrace.keras as tk
from oracles import assert_bits_equal, assert_close

L = keras.layers


def functional():
    inputs = keras.Input((6,))
    x = L.Dense(8, activation="relu", kernel_regularizer="l2")(inputs)
    x = L.BatchNormalization(momentum=0.7)(x)
    x = L.Dropout(0.3)(x)
    return keras.Model(inputs, L.Dense(4, activation="softmax")(x))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = L.Dense(8, activation="relu", activity_regularizer="l1")
        self.norm = L.BatchNormalization()
        self.drop = L.Dropout(0.25)
        self.last = L.Dense(4, activation="softmax")

    def call(self, x, training=None):
        x = self.drop(self.norm(self.first(x), training=training), training=training)
        self.add_loss(0.01 * keras.ops.mean(x**2))
        return self.last(x)


@pytest.mark.parametrize("make", [classifier, functional, Subclassed])
def test_every_kind_of_model(make):
    pair = twins(make, **SPARSE, metrics=lambda: ["accuracy"])
    x, y = digits_like()
    histories = fit_both(pair, x, y, batch_size=8, epochs=3)
    assert_same(pair, histories)
    plain, ours = pair
    for a, b in zip(
        plain.evaluate(x, y, batch_size=8, verbose=0),
        ours.evaluate(x, y, batch_size=8, verbose=0),
        strict=True,
    ):
        assert_close(np.float32(b), np.float32(a))
    assert_close(ours.predict(x, batch_size=8, verbose=0), plain.predict(x, 8, verbose=0))


class Listening(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        assert logs["loss"] > 0


def test_one_dispatch_an_execution_and_one_program():
    _, ours = twins(classifier, execution=4, **SPARSE)
    x, y = digits_like()
    for _ in range(2):
        ours.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Listening()])
    engine = tk.of(ours).programs["train"].engine
    assert engine.executions == 2 * 2 * 12 // 4
    assert engine.runner.executions == engine.executions
    # If no callback listens between executions, short ones run together.
    ours.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert engine.executions == 2 * 2 * 12 // 4 + 2


def test_weights_go_back_and_forth_without_loss():
    plain, ours = twins(classifier, **SPARSE)
    x, y = digits_like()
    histories = fit_both((plain, ours), x, y, batch_size=8)
    doubled = [2 * w for w in plain.get_weights()]
    for model in (plain, ours):
        model.set_weights(doubled)
        model.optimizer.learning_rate = 0.02
    assert_same((plain, ours), fit_both((plain, ours), x, y, batch_size=8, epochs=2))
    assert histories[0]["loss"]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)),
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
        lambda: keras.optimizers.AdamW(0.01, clipnorm=0.5, use_ema=True, ema_momentum=0.8),
        lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**10, dynamic_growth_steps=4
        ),
    ],
    ids=["schedule", "keras-accumulation", "clip-ema", "loss-scale-factor", "loss-scale-optimizer"],
)
def test_optimizers(optimizer):
    pair = twins(classifier, optimizer=optimizer, loss=SPARSE["loss"])
    assert_same(pair, fit_both(pair, *digits_like(), batch_size=8, epochs=2))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    pair = twins(classifier, **SPARSE)
    histories = fit_both(pair, *digits_like(), batch_size=8, epochs=2)
    scaled = isinstance(pair[1].optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    tight = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}[policy]
    for a, b in zip(pair[0].get_weights(), pair[1].get_weights(), strict=True):
        assert_close(b.astype(tight), a.astype(tight))
    assert_close(
        np.asarray(histories[1]["loss"]).astype(tight), np.asarray(histories[0]["loss"], tight)
    )


def test_an_overflow_is_skipped_and_halves_the_scale():
    make_optimizer = lambda: keras.optimizers.LossScaleOptimizer(  # noqa: E731
        keras.optimizers.SGD(0.1), initial_scale=3e38
    )
    pair = twins(classifier, optimizer=make_optimizer, loss=SPARSE["loss"])
    assert_same(pair, fit_both(pair, *digits_like(), batch_size=8))
    assert float(pair[1].optimizer.dynamic_scale) < 3e38


def test_metrics():
    metrics = lambda: [  # noqa: E731
        keras.metrics.SparseTopKCategoricalAccuracy(2),
        keras.metrics.SparseCategoricalCrossentropy(name="again"),
    ]
    pair = twins(classifier, **SPARSE, metrics=metrics, weighted_metrics=lambda: ["accuracy"])
    x, y = digits_like()
    weights = np.linspace(0, 1, len(x), dtype=np.float32)
    assert_same(pair, fit_both(pair, x, y, batch_size=8, sample_weight=weights))
    assert_same(pair, fit_both(pair, x, y, batch_size=8, class_weight={0: 1, 1: 2, 2: 0.5, 3: 1}))


def test_a_metric_that_is_not_a_number():
    pair = twins(
        classifier,
        optimizer=SPARSE["optimizer"],
        loss=lambda: "categorical_crossentropy",
        metrics=lambda: [keras.metrics.F1Score()],
    )
    x, y = digits_like()
    histories = fit_both(pair, x, np.eye(4, dtype=np.float32)[y], batch_size=8, epochs=2)
    assert np.shape(histories[1]["f1_score"]) == (2, 4)
    assert_same(pair, histories)


def test_validation():
    pair = twins(functional, **SPARSE, metrics=lambda: ["accuracy"])
    x, y = digits_like()
    held = digits_like(40, seed=1)
    histories = fit_both(pair, x, y, batch_size=8, epochs=3, validation_data=held)
    assert {"val_loss", "val_accuracy"} <= set(histories[1])
    assert_same(pair, histories)
    pair = twins(classifier, **SPARSE)
    assert_same(pair, fit_both(pair, x, y, batch_size=8, epochs=2, validation_split=0.25))


def two_by_two():
    a, b = keras.Input((6,), name="a"), keras.Input((3,), name="b")
    x = L.Concatenate()([L.Dense(5)(a), b])
    return keras.Model(
        {"a": a, "b": b}, {"p": L.Dense(2, name="p")(x), "q": L.Dense(1, name="q")(x)}
    )


def test_several_inputs_and_outputs_by_name():
    pair = twins(
        two_by_two,
        optimizer=lambda: "adam",
        loss=lambda: {"p": "mse", "q": "mae"},
        loss_weights=lambda: {"p": 1.0, "q": 0.3},
        metrics=lambda: {"q": ["mse"]},
    )
    rng = np.random.default_rng(0)
    x = {"a": rng.normal(size=(48, 6)), "b": rng.normal(size=(48, 3))}
    y = {"p": rng.normal(size=(48, 2)), "q": rng.normal(size=(48, 1))}
    x, y = ({k: v.astype(np.float32) for k, v in part.items()} for part in (x, y))
    assert_same(pair, fit_both(pair, x, y, batch_size=8, epochs=2))
    found = pair[1].predict(x, batch_size=8, verbose=0)
    assert found["p"].shape == (48, 2)
    assert_close(found["q"], pair[0].predict(x, batch_size=8, verbose=0)["q"])


def test_a_smaller_last_batch():
    pair = twins(classifier, execution=13, **SPARSE, metrics=lambda: ["accuracy"])
    x, y = digits_like(100)
    assert_same(pair, fit_both(pair, x, y, batch_size=8, epochs=2))
    plain, ours = pair
    assert_close(ours.predict(x, 8, verbose=0), plain.predict(x, 8, verbose=0))
    assert_close(
        np.float32(ours.evaluate(x, y, 8, verbose=0)),
        np.float32(plain.evaluate(x, y, 8, verbose=0)),
    )


def test_single_batches():
    plain, ours = pair = twins(functional, **SPARSE)
    x, y = digits_like(8)
    for _ in range(3):
        a, b = (model.train_on_batch(x, y) for model in pair)
        assert_close(np.float32(b), np.float32(a))
    assert_close(np.float32(ours.test_on_batch(x, y)), np.float32(plain.test_on_batch(x, y)))
    assert_close(np.asarray(ours.predict_on_batch(x)), np.asarray(plain.predict_on_batch(x)))
    assert_same(pair, [{}, {}])


def test_bits_where_the_order_of_operations_is_the_same():
    pair = twins(classifier, execution=4, **SPARSE)
    fit_both(pair, *digits_like(), batch_size=8, epochs=2, shuffle=False)
    assert_bits_equal(pair[1].get_weights(), pair[0].get_weights())


def test_models_made_in_a_scope():
    with tk.Strategy().scope():
        made = [classifier(), functional(), Subclassed()]
    assert all(hasattr(model, "set_pipelining_options") for model in made)
    assert not hasattr(functional(), "set_pipelining_options")
    keras.utils.set_random_seed(7)
    plain = functional()
    keras.utils.set_random_seed(7)
    with tk.Strategy().scope():
        ours = functional()
    for model in (plain, ours):
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=4)
    assert_same((plain, ours), fit_both((plain, ours), *digits_like(), batch_size=8))


@pytest.mark.parametrize("dynamic", [True, False])
def test_observers_see_gradients_without_the_scale_of_the_loss(dynamic):
    x, y = digits_like(32)
    seen = []
    for scaled in (False, True):
        optimizer = keras.optimizers.SGD(0.1, loss_scale_factor=64.0 if scaled else None)
        if scaled and dynamic:
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 64.0)
        keras.utils.set_random_seed(0)
        model = tk.adopt(classifier())
        model.compile(optimizer, SPARSE["loss"](), observe=[tr.Tap("grad/*", reduce="tensor")])
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        seen.append(model.records["grad/dense/kernel"].values)
        assert "grad/loss_scale" not in model.records.names
        keras.backend.clear_session()
    assert_close(seen[1], seen[0])
