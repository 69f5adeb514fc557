"""Outfeeds in layers and optimizers, the printed table, and optimizers around optimizers."""

import enum

import keras
import numpy as np
import pytest
from keras_oracle import digits_like

import tailrace as tr
import tailrace.keras as tk
from oracles import assert_close

L = keras.layers


def layers_with_outfeeds(queue):
    return [
        L.Flatten(),
        L.Dense(6, activation="relu", name="Dense_256"),
        L.Dense(5, activation="relu", name="Dense_128"),
        tk.MaybeOutfeed(queue, final_outfeed=False, name="Dense_128_acts"),
        L.Dense(4, activation="softmax", name="Dense_10"),
        tk.MaybeOutfeed(queue, final_outfeed=True, name="Dense_10_acts"),
    ]


def sequential(queue):
    return keras.Sequential(layers_with_outfeeds(queue))


def functional(queue):
    inputs = x = keras.Input((6,))
    for layer in layers_with_outfeeds(queue):
        x = layer(x)
    return keras.Model(inputs, x)


class Subclassed(keras.Model):
    def __init__(self, queue):
        super().__init__()
        self.parts = layers_with_outfeeds(queue)

    def call(self, x):
        for layer in self.parts:
            x = layer(x)
        return x


def inspected(make, *, accumulation=1, mode="before_apply", filters=("Dense_128",), acts=("none",)):
    """Train for 8 batches; what both queues hold, the model, and its weights at the start."""
    gradients, activations = (
        tk.MaybeOutfeedQueue(filters=filters),
        tk.MaybeOutfeedQueue(filters=acts),
    )
    keras.utils.set_random_seed(0)
    with tk.Strategy().scope():
        model = make(activations)
    model(digits_like(8)[0])
    if accumulation > 1:
        model.set_gradient_accumulation_options(accumulation)
    start = model.get_weights()
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tk.OutfeedOptimizer(
            wrapped_optimizer=keras.optimizers.SGD(0.1),
            outfeed_queue=gradients,
            outfeed_optimizer_mode=tk.OutfeedOptimizerMode(mode),
            model=model,
        ),
        steps_per_execution=4,
    )
    x, y = digits_like(64)
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False, validation_data=(x, y))
    return gradients.maybe_dequeue(), activations.maybe_dequeue(), model, start


def shapes(found):
    return {name: array.shape for name, array in found.items()}


@pytest.mark.parametrize("make", [sequential, functional, Subclassed])
def test_gradients_and_activations_leave_every_kind_of_model(make):
    grads, acts, _, _ = inspected(make)
    if make is Subclassed:  # its layers have numbers, as all that a list holds
        grads = {
            name.split("/", 1)[-1] if "parts" in name else name: v for name, v in grads.items()
        }
    assert shapes(grads) == {
        "Dense_128/bias:0_grad": (8, 5),
        "Dense_128/kernel:0_grad": (8, 6, 5),
    }
    assert list(acts) == ["Dense_128_acts", "Dense_10_acts"]
    assert shapes(acts) == {"Dense_128_acts": (8, 8, 5), "Dense_10_acts": (8, 8, 4)}


def test_values_are_those_of_plain_keras():
    grads, acts, _, start = inspected(functional, filters=("none",))
    assert list(grads)[:2] == ["Dense_10/bias:0_grad", "Dense_10/kernel:0_grad"]
    keras.utils.set_random_seed(0)
    plain = functional(None)
    plain.set_weights(start)
    plain.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    x, y = digits_like(64)
    names = [f"{v.path}:0_grad".removeprefix(f"{plain.name}/") for v in plain.trainable_variables]
    for step in range(8):
        batch = slice(8 * step, 8 * step + 8)
        before = plain.get_weights()
        assert_close(acts["Dense_10_acts"][step], np.asarray(plain(x[batch])))
        plain.train_on_batch(x[batch], y[batch])
        for name, old, new in zip(names, before, plain.get_weights(), strict=True):
            np.testing.assert_allclose(grads[name][step], (old - new) / 0.1, 2e-4, 2e-5)


def test_before_and_after_accumulation():
    applied, _, _, _ = inspected(sequential, accumulation=4)
    computed, _, _, _ = inspected(sequential, accumulation=4, mode="after_compute")
    assert shapes(applied)["Dense_128/kernel:0_grad"] == (2, 6, 5)
    assert shapes(computed)["Dense_128/kernel:0_grad"] == (8, 6, 5)
    for name in applied:
        assert_close(computed[name].reshape(2, 4, *computed[name].shape[1:]).sum(1), applied[name])


def test_filters():
    grads, acts, model, _ = inspected(sequential, filters=("nothing",), acts=("Dense_10",))
    assert grads is None
    assert list(acts) == ["Dense_10_acts"]
    model.predict(digits_like(16)[0], batch_size=8, verbose=0)


def test_the_printed_table(capsys):
    queue, empty = tk.MaybeOutfeedQueue(), tk.MaybeOutfeedQueue(filters=["no"])
    with tk.Strategy().scope():
        model = sequential(queue)
    model.compile(
        tk.OutfeedOptimizer(keras.optimizers.SGD(), empty, model=model),
        "sparse_categorical_crossentropy",
        steps_per_execution=2,
    )
    callbacks = [tk.OutfeedCallback(queue, "Activations"), tk.OutfeedCallback(empty, "Gradients")]
    model.fit(*digits_like(32), batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:5] == [
        "",
        "Activations",
        "key: Dense_128_acts shape: (4, 8, 5)",
        "key: Dense_10_acts shape: (4, 8, 4)",
        "Epoch 1 - Summary Stats",
    ]
    assert printed[5].split() == [
        "Index",
        "Name",
        "Mean",
        "Std",
        "Minimum",
        "Maximum",
        "NaNs",
        "infs",
    ]
    assert printed[6].split()[:2] == ["0", "Dense_128_acts"]
    assert printed[8:11] == ["", "Gradients", "No data enqueued"]
    assert "Epoch 2 - Summary Stats" in printed


def test_one_outfeed_layer(capsys, tmp_path):
    queue = tr.OutfeedQueue()
    model = tk.adopt(
        keras.Sequential([keras.Input((6,)), L.Dense(4, name="d"), tk.Outfeed(queue, name="acts")])
    )
    model.compile("sgd", "mse", steps_per_execution=2)
    x, _ = digits_like(32)
    model.fit(x, x[:, :4], batch_size=8, verbose=0, callbacks=[tk.OutfeedCallback(queue)])
    assert "key: acts shape: (4, 8, 4)" in capsys.readouterr().out
    model.save(tmp_path / "m.keras")
    assert keras.saving.load_model(tmp_path / "m.keras").predict(x, verbose=0).shape == (32, 4)


def test_what_an_outfeed_optimizer_needs():
    with pytest.raises(ValueError, match="The model must be specified if a Keras optimizer"):
        tk.OutfeedOptimizer(keras.optimizers.SGD(), tk.MaybeOutfeedQueue())
    with pytest.raises(ValueError, match="one of 'after_compute', 'before_apply'"):
        tk.OutfeedOptimizer("sgd", tk.MaybeOutfeedQueue(), "later", model=object())


def test_the_mode_of_a_queue_may_be_a_member_of_another_enum():
    # As `IPUOutfeedMode`: the values differ from those of `tr.OutfeedMode`.
    mode = enum.Enum("Mode", {"ALL": "all", "LAST": "get_last"})
    assert tk.MaybeOutfeedQueue(mode.LAST).queue.mode is tr.OutfeedMode.LAST
    assert tk.MaybeOutfeedQueue("ALL").queue.mode is tr.OutfeedMode.ALL


# -- optimizers around optimizers ---------------------------------------------------------------


def trained(optimizer, execution=4, **options):
    keras.utils.set_random_seed(0)
    model = tk.adopt(keras.Sequential([keras.Input((6,)), L.Dense(3)]))
    model.compile(optimizer, "mse", steps_per_execution=execution)
    if options:
        model.set_gradient_accumulation_options(**options)
    x, _ = digits_like(64)
    model.fit(x, x[:, :3], batch_size=8, verbose=0, shuffle=False)
    return model


def test_gradient_accumulation_optimizer(tmp_path):
    by_option = trained(keras.optimizers.Adam(0.1), gradient_accumulation_steps_per_replica=2)
    wrapped = tk.GradientAccumulationOptimizer(keras.optimizers.Adam(0.1), 2)
    by_optimizer = trained(wrapped)
    for a, b in zip(by_option.get_weights(), by_optimizer.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(wrapped.iterations) == 4
    inner = keras.optimizers.SGD(0.1)
    assert tk.GradientAccumulationOptimizer(inner, 1) is inner
    with pytest.raises(ValueError, match="num_mini_batches must be a positive number"):
        tk.GradientAccumulationOptimizer(inner, 0)
    with pytest.raises(ValueError, match="must be the outermost"):
        trained(tk.CrossReplicaOptimizer(tk.GradientAccumulationOptimizer(inner, 2)))
    with pytest.raises(ValueError, match="accumulated once"):
        trained(wrapped, gradient_accumulation_steps_per_replica=2)
    by_optimizer.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert again.optimizer.accumulation == wrapped.accumulation
    wrapped.learning_rate = 0.5
    assert float(wrapped.inner_optimizer.learning_rate) == 0.5


def test_map_gradient_optimizer_and_the_mean_over_replicas():
    mapped = trained(tk.MapGradientOptimizer(keras.optimizers.SGD(0.1), lambda g, v: g + 0.5 * v))
    keras.utils.set_random_seed(0)
    reference = keras.Sequential(
        [
            keras.Input((6,)),
            L.Dense(3, kernel_regularizer=keras.regularizers.L2(0.25)),
        ]
    )
    reference.compile(keras.optimizers.SGD(0.1), "mse")
    x, _ = digits_like(64)
    for step in range(8):
        batch = slice(8 * step, 8 * step + 8)
        bias = np.asarray(reference.layers[0].bias.value)
        reference.train_on_batch(x[batch], x[batch, :3])
        reference.layers[0].bias.assign_sub(0.1 * 0.5 * bias)
    for a, b in zip(reference.get_weights(), mapped.get_weights(), strict=True):
        assert_close(b, a)
    plain, crossed = (
        trained(keras.optimizers.SGD(0.1)),
        trained(tk.CrossReplicaOptimizer(keras.optimizers.SGD(0.1))),
    )
    for a, b in zip(plain.get_weights(), crossed.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="gradient_mapping_function is a function"):
        tk.MapGradientOptimizer("sgd", None)
