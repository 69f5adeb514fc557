"""Wrappers inside and around a LossScaleOptimizer, and wrappers that not `fit` calls."""

from typing import Any

import keras
import numpy as np
import pytest
from keras_oracle import assert_same, classifier, digits_like, fit_both

import tailrace as tr
import tailrace.keras as tk
from oracles import assert_bits_equal, assert_close

L = keras.layers
SGD, Scaler = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer
LOSS = "sparse_categorical_crossentropy"


@keras.saving.register_keras_serializable("tests")
def bounded(gradient, value):
    return keras.ops.clip(2.0 * gradient, -0.05, 0.05) + 0.1 * value


class BoundedSGD(SGD):
    """What a plain Keras program does instead of a MapGradientOptimizer."""

    def apply(self, grads, trainable_variables=None):
        variables = trainable_variables or self._trainable_variables
        changed = [bounded(g, v.value) for g, v in zip(grads, variables, strict=True)]
        super().apply(changed, trainable_variables)


class SignSGD(SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(keras.ops.sign(g), v) for g, v in grads_and_vars])


def compiled_pair(plain, ours, make=classifier, adopted=True, execution=3):
    """The same model twice, with the two optimizers."""
    pair = []
    for wrapped, optimizer in ((False, plain), (True, ours)):
        keras.utils.set_random_seed(7)
        model = tk.adopt(make()) if wrapped and adopted else make()
        model.compile(optimizer, LOSS, steps_per_execution=execution if wrapped and adopted else 1)
        pair.append(model)
    return pair


def mapping(inner=None):
    return tk.MapGradientOptimizer(inner or SGD(0.1, momentum=0.9), bounded)


# -- in fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0**10, 3e38], ids=["grows", "overflows"])
def test_a_function_inside_a_scaler_sees_gradients_of_the_loss(scale):
    settings = {"initial_scale": scale, "dynamic_growth_steps": 5}
    plain = Scaler(BoundedSGD(0.1, momentum=0.9), **settings)
    pair = compiled_pair(plain, Scaler(mapping(), **settings))
    assert_same(pair, fit_both(pair, *digits_like(), batch_size=8, epochs=2))
    if scale == 3e38:  # the function makes finite what is not: the step is skipped all the same
        assert int(pair[1].optimizer.iterations) < 24


def test_wrappers_under_mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    pair = compiled_pair(BoundedSGD(0.1, momentum=0.9), mapping())
    assert all(isinstance(model.optimizer, Scaler) for model in pair)
    fit_both(pair, *digits_like(), batch_size=8)
    for a, b in zip(pair[0].get_weights(), pair[1].get_weights(), strict=True):
        assert_close(b.astype("float16"), a.astype("float16"))


@pytest.mark.parametrize("around", [True, False])
def test_accumulation_and_a_scaler(around):
    x, y = digits_like(96)

    def accumulating(inner):
        return tk.GradientAccumulationOptimizer(inner, 3, reduction_method="mean")

    scaler = lambda inner: Scaler(inner, 64.0, dynamic_growth_steps=2)  # noqa: E731
    ours = scaler(accumulating(SGD(0.1))) if around else accumulating(scaler(SGD(0.1)))
    plain, model = compiled_pair(scaler(SGD(0.1)), ours)
    plain.fit(x, y, batch_size=24, shuffle=False, verbose=0)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        assert_close(b, a)
    for a, b in zip(plain.optimizer.variables, model.optimizer.variables, strict=True):
        assert_close(np.asarray(b.value), np.asarray(a.value))
    assert int(model.optimizer.iterations) == 4


def test_accumulation_inside_a_scaler_is_the_outermost_wrapper_still():
    inner = tk.CrossReplicaOptimizer(tk.GradientAccumulationOptimizer(SGD(0.1), 3))
    model = compiled_pair("sgd", Scaler(inner))[1]
    with pytest.raises(tr.TailraceError, match="must be the outermost"):
        model.fit(*digits_like(24), batch_size=8, verbose=0)


@pytest.mark.parametrize("mode", ["after_compute", "before_apply"])
def test_gradients_sent_from_inside_a_scaler(mode):
    model, queue = tk.adopt(classifier()), tk.MaybeOutfeedQueue()
    optimizer = tk.OutfeedOptimizer(SGD(0.1), queue, mode, model=model)
    seen = [tr.Tap("grad/*", reduce="tensor")]
    model.compile(Scaler(optimizer, 64.0), LOSS, steps_per_execution=3, observe=seen)
    model.fit(*digits_like(48), batch_size=8, shuffle=False, verbose=0)
    found = queue.maybe_dequeue()
    assert len(found) == 4
    for name, value in found.items():
        assert_close(value, model.records[f"grad/{name.removesuffix(':0_grad')}"].values)


def test_a_fixed_scale_of_an_optimizer_inside_wrappers_gives_way():
    pair = compiled_pair(
        Scaler(BoundedSGD(0.1, loss_scale_factor=8.0)),
        Scaler(mapping(SGD(0.1, loss_scale_factor=8.0))),
    )
    assert_same(pair, fit_both(pair, *digits_like(48), batch_size=8))


def test_two_scalers_are_refused():
    keras.config.set_dtype_policy("mixed_float16")
    for adopted in (True, False):
        model = tk.adopt(classifier()) if adopted else classifier()
        with pytest.raises(tr.TailraceError, match=r"scaled once.*auto_scale_loss=False"):
            model.compile(tk.CrossReplicaOptimizer(Scaler(SGD(0.1))), LOSS)
    # What the sentence says instead: one scaler, and weights that move as in Keras.
    pair = compiled_pair(SGD(0.1), tk.CrossReplicaOptimizer(SGD(0.1)))
    fit_both(pair, *digits_like(24), batch_size=8)
    for a, b in zip(pair[0].get_weights(), pair[1].get_weights(), strict=True):
        assert_close(b.astype("float16"), a.astype("float16"))
    keras.config.set_dtype_policy("float32")
    model = compiled_pair("sgd", Scaler(Scaler(SGD(0.1))))[1]
    with pytest.raises(
        tr.TailraceError, match="around LossScaleOptimizer, which has another inside"
    ):
        model.fit(*digits_like(24), batch_size=8, verbose=0)


def test_an_overridden_apply_gradients_inside_a_scaler_is_refused_through_wrappers():
    for optimizer in (Scaler(mapping(SignSGD(0.1))), mapping(Scaler(mapping(SignSGD(0.1))))):
        model = compiled_pair("sgd", optimizer)[1]
        with pytest.raises(tr.TailraceError, match="SignSGD, which overrides `apply_gradients`"):
            model.fit(*digits_like(24), batch_size=8, verbose=0)


def test_a_pipeline_refuses_functions_inside_a_scaler():
    model = tk.adopt(keras.Sequential([keras.Input((6,)), L.Dense(5), L.Dense(4, "softmax")]))
    model.set_pipeline_stage_assignment([0, 1])
    model.set_pipelining_options(4)
    sending = tk.OutfeedOptimizer(SGD(), tk.MaybeOutfeedQueue(), "after_compute", model=model)
    for inner, name in ((mapping(), "MapGradientOptimizer"), (sending, "OutfeedOptimizer")):
        model.compile(Scaler(inner), LOSS, steps_per_execution=4)
        with pytest.raises(tr.TailraceError, match=f"{name} inside a LossScaleOptimizer"):
            model.fit(*digits_like(32), batch_size=8, verbose=0)


# -- elsewhere ------------------------------------------------------------------------------------


class Stepwise(keras.Sequential):
    def train_step(self, state, data):
        return super().train_step(state, data)


def stepwise():
    return Stepwise([L.Dense(8, activation="relu"), L.Dense(4, activation="softmax")])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("adopted", [True, False], ids=["train_step", "plain"])
def test_a_function_where_one_batch_is_a_step(scaled, adopted):
    around = (lambda one: Scaler(one, 64.0)) if scaled else (lambda one: one)
    ours = around(mapping())
    plain = around(BoundedSGD(0.1, momentum=0.9))
    pair = compiled_pair(plain, ours, stepwise if adopted else classifier, adopted)
    assert_same(pair, fit_both(pair, *digits_like(48), batch_size=8))


def test_functions_are_called_in_one_order():
    nested = lambda: tk.MapGradientOptimizer(mapping(), lambda g, v: 0.5 * g)  # noqa: E731
    pair = compiled_pair(nested(), nested())
    assert_same(pair, fit_both(pair, *digits_like(48), batch_size=8))


def test_what_an_overridden_train_step_refuses():
    for optimizer, words in (
        (SignSGD(0.1), "SignSGD, which overrides `apply_gradients`"),
        (Scaler(mapping(SignSGD(0.1))), "SignSGD, which overrides `apply_gradients`"),
        (tk.GradientAccumulationOptimizer(SGD(0.1), 3), "does not go with gradient accumulation"),
        (Scaler(tk.GradientAccumulationOptimizer(SGD(0.1), 3)), "does not go with gradient acc"),
    ):
        model = compiled_pair("sgd", optimizer, stepwise)[1]
        with pytest.raises(tr.TailraceError, match=words):
            model.fit(*digits_like(24), batch_size=8, verbose=0)


def test_accumulation_in_plain_keras_is_refused():
    model = classifier()
    model.compile(tk.GradientAccumulationOptimizer(SGD(0.1), 3), LOSS)
    with pytest.raises(tr.TailraceError, match=r"SGD\(\.\.\., gradient_accumulation_steps=3\)"):
        model.fit(*digits_like(24), batch_size=8, verbose=0)


def dense():
    return keras.Sequential([keras.Input((6,)), L.Dense(4, activation="softmax")])


def in_a_loop(optimizer_of, count=4):
    """A model, trained by hand."""
    strategy = tk.Strategy()
    with strategy.scope():
        keras.utils.set_random_seed(7)
        model = dense()
        optimizer = optimizer_of(model)
        iterator = tk.DatasetIterator(tr.batches(digits_like(8 * count), 8))

        def loop(iterator, model, optimizer):
            def step():
                x, y = next(iterator)
                loss_of = keras.losses.sparse_categorical_crossentropy
                weights = model.trainable_variables
                mean = lambda: keras.ops.mean(loss_of(y, model(x, training=True)))  # noqa: E731
                _, grads = tk.value_and_grad(mean, weights)
                optimizer.apply_gradients(zip(grads, weights, strict=True))

            tk.repeat(count, step)

        try:
            strategy.run(loop, args=[iterator, model, optimizer])
        finally:
            iterator.close()
    return model


def test_wrappers_in_a_loop_written_by_hand():
    mapped = in_a_loop(lambda model: mapping())
    plain = in_a_loop(lambda model: BoundedSGD(0.1, momentum=0.9))
    assert_bits_equal(mapped.get_weights(), plain.get_weights())
    signed = in_a_loop(lambda model: tk.CrossReplicaOptimizer(SignSGD(0.1)), count=1)
    assert_close(np.abs(signed.get_weights()[1]), np.full(4, 0.1, np.float32))
    queue = tk.MaybeOutfeedQueue()
    in_a_loop(lambda m: tk.OutfeedOptimizer(SGD(0.1), queue, "after_compute", model=m))
    assert {value.shape for value in queue.maybe_dequeue().values()} == {(4, 4), (4, 6, 4)}


def test_what_a_loop_written_by_hand_refuses():
    accumulating = lambda _: tk.GradientAccumulationOptimizer(SGD(0.1), 4)  # noqa: E731
    with pytest.raises(tr.TailraceError, match="gradient_accumulation_steps=4"):
        in_a_loop(accumulating)
    for optimizer in (Scaler(SGD(0.1)), tk.CrossReplicaOptimizer(Scaler(SGD(0.1)))):
        with pytest.raises(tr.TailraceError, match=r"SGD\(\.\.\., loss_scale_factor=1024\.0\)"):
            in_a_loop(lambda _, optimizer=optimizer: optimizer)


# -- saved ----------------------------------------------------------------------------------------


def saved(path, optimizer_of):
    keras.utils.set_random_seed(7)
    model = tk.adopt(dense())
    model.compile(optimizer_of(model), LOSS)
    model.fit(*digits_like(32), batch_size=8, shuffle=False, verbose=0)
    model.save(path)
    return model


def loaded(path, **options) -> Any:
    return keras.saving.load_model(path, **options)


def test_wrappers_are_saved_and_loaded(tmp_path):
    path, queue = tmp_path / "m.keras", tk.MaybeOutfeedQueue()
    sending = lambda m: tk.OutfeedOptimizer(  # noqa: E731
        mapping(keras.optimizers.Adam(0.1)), queue, "after_compute", model=m
    )
    model = saved(path, sending)
    again = loaded(path)
    assert type(again.optimizer) is tk.OutfeedOptimizer
    assert again.optimizer.mode == "after_compute"
    assert type(again.optimizer.inner_optimizer) is tk.MapGradientOptimizer
    for one in (model, again):
        one.fit(*digits_like(32, seed=1), batch_size=8, shuffle=False, verbose=0)
    assert_bits_equal(again.get_weights(), model.get_weights())


def test_a_function_that_cannot_be_saved(tmp_path, caplog):
    path = tmp_path / "m.keras"

    def halved(gradient, value):
        return 0.5 * gradient

    saved(path, lambda _: tk.MapGradientOptimizer(SGD(0.1), halved))
    assert "'halved', which is not registered" in caplog.text
    with pytest.raises(tr.TailraceError, match=r"'halved', which is not known here.*compile=False"):
        loaded(path)
    assert not loaded(path, compile=False).compiled
    again = loaded(path, custom_objects={"halved": halved})
    assert again.optimizer.mapped(2.0, None) == 1.0
    saved(path, lambda _: tk.MapGradientOptimizer(SGD(0.1), lambda g, v: g))
    with pytest.raises(tr.TailraceError, match="'<lambda>', which is not known here"):
        loaded(path)


def test_a_function_that_chooses_dtypes_is_not_saved(caplog):
    for dtype, kept in (("float16", "float16"), (np.float32, "float32"), (None, None)):
        config = tk.GradientAccumulationOptimizer(SGD(0.1), 2, dtype=dtype).get_config()
        assert config["dtype"] == kept
    assert "dtypes" not in caplog.text
    chosen = tk.GradientAccumulationOptimizer(SGD(0.1), 2, dtype=lambda v: np.float32)
    assert chosen.get_config()["dtype"] is None
    assert "without the function that chooses dtypes" in caplog.text
