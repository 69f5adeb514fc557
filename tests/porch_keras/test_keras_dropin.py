"""What programs for Keras do, done here: data of any length, overridden methods, models of any kind."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras_oracle import SPARSE, assert_same, classifier, digits_like, fit_both, twins

import tailrace as tr
import tailrace.keras as tk
from oracles import assert_close

L = keras.layers


def batches(count, seed=0, size=8):
    x, y = digits_like(count * size, seed=seed)
    return [(x[i : i + size], y[i : i + size]) for i in range(0, count * size, size)]


# -- lengths ------------------------------------------------------------------------------------


def some_of(data):
    """A dataset whose length is not known before it ends."""
    tf = pytest.importorskip("tensorflow")
    x, y = (np.concatenate(parts) for parts in zip(*data, strict=True))
    return tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, _: x[0] > -1.0).batch(8)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("execution", [1, 3, 8])
def test_data_of_unknown_length(execution):
    data = batches(7)
    pair = twins(classifier, execution=execution, **SPARSE)
    assert_same(pair, fit_both(pair, lambda: some_of(data), epochs=2, shuffle=False))
    found = [model.evaluate(some_of(data), verbose=0) for model in pair]
    assert_close(np.float32(found[1]), np.float32(found[0]))
    outputs = [model.predict(some_of(data), verbose=0) for model in pair]
    assert_close(outputs[1], outputs[0])


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_generator_that_ends():
    pair = twins(classifier, execution=4, **SPARSE)
    assert_same(pair, fit_both(pair, lambda: (one for one in batches(7)), shuffle=False))
    found = [model.evaluate((one for one in batches(5)), verbose=0) for model in pair]
    assert_close(np.float32(found[1]), np.float32(found[0]))


@pytest.mark.parametrize("execution", [4, 5, 32])
def test_executions_that_do_not_divide_an_epoch(execution):
    x, y = digits_like(13 * 8 + 3)
    pair = twins(classifier, execution=execution, **SPARSE)
    validation = digits_like(50, seed=1)
    assert_same(pair, fit_both(pair, x, y, batch_size=8, epochs=2, validation_data=validation))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_more_steps_than_there_are_data():
    x, y = digits_like(40)
    pair = twins(classifier, execution=1, **SPARSE)
    call = {"batch_size": 8, "epochs": 4, "steps_per_epoch": 3}
    assert_same(pair, fit_both(pair, x, y, **call))


class Changing(keras.utils.PyDataset):
    """Data that a callback changes."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x, y = batches(1, seed=index % 4)[0]
        return x * self.scale, y


class StopsFirst(keras.callbacks.Callback):
    """Stops the fit before the second epoch has run anything."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


def test_a_fit_that_is_stopped_at_the_beginning_of_an_epoch():
    x, y = digits_like()
    pair = twins(classifier, execution=1, **SPARSE)
    histories = fit_both(
        pair, x, y, batch_size=8, epochs=3, callbacks=lambda: [StopsFirst()], shuffle=False
    )
    assert_same(pair, histories)
    assert int(pair[1].optimizer.iterations) == len(x) // 8 + 1


@pytest.mark.parametrize("steps", [None, 16])
def test_what_is_changed_at_the_end_of_an_epoch_has_its_effect_at_once(steps):
    pair = twins(classifier, execution=8, **SPARSE)

    def changed():
        return keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: setattr(data, "scale", data.scale / 2)
        )

    histories = []
    for model in pair:
        data = Changing()
        keras.utils.set_random_seed(3)
        call = {"epochs": 3, "steps_per_epoch": steps, "verbose": 0, "shuffle": False}
        histories.append(model.fit(data, callbacks=[changed()], **call).history)
    assert_same(pair, histories)


# -- models that Keras' own loop runs -----------------------------------------------------------


class OwnFunction(keras.Model):
    """Makes its training function itself."""

    def __init__(self):
        super().__init__()
        self.dense, self.made = L.Dense(4, activation="softmax"), 0

    def call(self, x):
        return self.dense(x)

    def make_train_function(self, force=False):
        self.made += 1
        return super().make_train_function(force)


@pytest.mark.parametrize(
    ("make", "compiled", "reason"),
    [
        (classifier, {"run_eagerly": lambda: True}, "run_eagerly=True"),
        (classifier, {"jit_compile": lambda: False}, "jit_compile=False"),
        (OwnFunction, {}, "a `make_train_function` of its own"),
    ],
)
def test_keras_own_loop_runs_what_is_not_a_program(make, compiled, reason, caplog):
    pair = twins(make, execution=2, **SPARSE, **compiled)
    with caplog.at_level("INFO", "tailrace"):
        assert_same(pair, fit_both(pair, *digits_like(40), batch_size=8, epochs=2))
    assert f"it has {reason}" in caplog.text
    assert not tk.of(pair[1]).programs.get("train")
    assert make is not OwnFunction or pair[1].made
    pair[1].set_gradient_accumulation_options(2)
    with pytest.raises(tr.TailraceError, match="does not go with gradient accumulation"):
        pair[1].fit(*digits_like(40), batch_size=8, verbose=0)


@keras.saving.register_keras_serializable("tests")
class NotCompiled(L.Layer):
    """A layer that its author says cannot be compiled."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_jit = False

    def call(self, x):
        return x


def test_layers_that_cannot_be_compiled_are_named(caplog):
    inner = keras.Sequential([NotCompiled(name="crop"), L.Dense(4, activation="softmax")])
    model = tk.adopt(keras.Sequential([L.Dense(8), inner]))
    model.compile("sgd", SPARSE["loss"]())
    with caplog.at_level("INFO", "tailrace"):
        model.fit(*digits_like(8), verbose=0)
    assert "cannot be compiled (supports_jit=False): 'crop'" in caplog.text


def test_a_training_function_that_the_user_has_set():
    model = tk.adopt(classifier())
    model.compile("sgd", SPARSE["loss"]())
    model.build((None, 6))
    called = []

    def mine(state, iterator):
        called.append(next(iterator))
        return {"loss": 1.0}, state

    model.train_function = mine
    model.fit(*digits_like(16), batch_size=8, verbose=0)
    assert len(called) == 2


# -- models that lack something -----------------------------------------------------------------


def frozen():
    layers = [keras.Input((6,)), L.BatchNormalization(scale=False, center=False)]
    return keras.Sequential([*layers, L.Dense(4, activation="softmax", trainable=False)])


def test_a_model_without_trainable_weights():
    pair = twins(frozen, execution=4, **SPARSE)
    assert_same(pair, fit_both(pair, *digits_like(64), batch_size=8, epochs=2))
    pair[1].set_gradient_accumulation_options(2)
    with pytest.raises(tr.TailraceError, match="Nothing in the model .* can be trained"):
        pair[1].fit(*digits_like(64), batch_size=8, verbose=0)


def test_a_model_that_was_never_compiled_predicts():
    x, _ = digits_like(20)
    with tk.Strategy().scope():
        model = keras.Sequential([keras.Input((6,)), L.Dense(3)])
    expected = np.asarray(model(x))
    assert_close(model.predict(x, batch_size=8, verbose=0), expected)
    assert_close(model.predict_on_batch(x), expected)
    with pytest.raises(ValueError, match="must call `compile"):
        model.fit(x, x, verbose=0)


# -- overridden methods -------------------------------------------------------------------------


class Passing(keras.Model):
    """Overrides methods without naming their arguments."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(4, activation="softmax")

    def call(self, x):
        return self.dense(x)

    def compile(self, *args, **kwargs):
        return super().compile(*args, **kwargs)

    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        return super().predict(*args, **kwargs)


def test_methods_that_pass_on_what_they_are_given():
    x, y = digits_like(40)
    pair = twins(Passing, execution=2, **SPARSE)
    call = {"batch_size": 8, "epochs": 2, "validation_data": (x, y)}
    assert_same(pair, fit_both(pair, x, y, **call))
    assert tk.of(pair[1]).programs["train"].engine.step == 10
    found = [(model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)) for model in pair]
    assert_close(np.float32(found[1][0]), np.float32(found[0][0]))
    assert_close(found[1][1], found[0][1])


class Adding(Passing):
    """Adds an entry to the logs."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "highest": keras.ops.max(y_pred)}


@pytest.mark.parametrize("execution", [1, 5, 40])
def test_metrics_that_add_an_entry(execution):
    pair = twins(Adding, execution=execution, **SPARSE)
    stop = keras.callbacks.EarlyStopping("highest", mode="max", patience=5)
    histories = fit_both(pair, *digits_like(320), batch_size=8, epochs=2, callbacks=[stop])
    assert set(histories[1]) == {"loss", "highest"}
    assert_same(pair, histories)


class OwnLoss(Passing):
    """Keras' guide to custom training with JAX: a loss function with a signature of its own."""

    def compute_loss_and_updates(
        self, trainable_variables, non_trainable_variables, x, y, training=False
    ):
        y_pred, non_trainable_variables = self.stateless_call(
            trainable_variables, non_trainable_variables, x, training=training
        )
        return self.compute_loss(x, y, y_pred), non_trainable_variables

    def call(self, x, training=False):
        return self.dense(x)

    def train_step(self, state, data):
        import jax

        trainable, others, optimizer, metrics = state
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, others), grads = gradient(trainable, others, *data, training=True)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        return {"mine": loss}, (trainable, others, optimizer, metrics)


def test_a_loss_function_with_a_signature_of_its_own():
    pair = twins(OwnLoss, execution=4, **SPARSE)
    histories = fit_both(pair, *digits_like(64), batch_size=8, epochs=2)
    assert set(histories[1]) == {"mine"}
    assert_same(pair, histories)


class HalfLoss(Passing):
    """Changes the loss where Keras computes it."""

    def compute_loss_and_updates(self, *args, **kwargs):
        loss, rest = super().compute_loss_and_updates(*args, **kwargs)
        return loss / 2, rest


def test_a_loss_that_is_changed_where_keras_computes_it():
    pair = twins(HalfLoss, execution=4, **SPARSE)
    assert_same(pair, fit_both(pair, *digits_like(64), batch_size=8, epochs=2))


# -- files --------------------------------------------------------------------------------------

PLAIN = """
import keras, numpy as np, sys

@keras.saving.register_keras_serializable("files")
class Filed(keras.Model):
    def __init__(self, width=3, **kwargs):
        super().__init__(**kwargs)
        self.width, self.dense = width, keras.layers.Dense(width)
    def call(self, x):
        return self.dense(x)
    def get_config(self):
        return {**super().get_config(), "width": self.width}
"""


def test_plain_keras_reads_the_files_of_adopted_models(tmp_path):
    names = {}
    exec(PLAIN, names)
    x = np.ones((4, 2), np.float32)
    inputs = keras.Input((2,))
    made = [
        names["Filed"](),
        keras.Sequential([keras.Input((2,)), L.Dense(3)]),
        keras.Model(inputs, L.Dense(3)(inputs)),
    ]
    for number, model in enumerate(made):
        model = tk.adopt(model)
        model.compile("adam", "mse", steps_per_execution=2)
        model.fit(x, np.ones((4, 3), np.float32), batch_size=1, verbose=0)
        model.save(tmp_path / f"{number}.keras")
        np.save(tmp_path / f"{number}.npy", model.predict(x, verbose=0))
    code = PLAIN + (
        "for n in range(3):\n"
        "    model = keras.saving.load_model(f'{sys.argv[1]}/{n}.keras')\n"
        "    found = model.predict(np.ones((4, 2), 'float32'), verbose=0)\n"
        "    np.testing.assert_allclose(found, np.load(f'{sys.argv[1]}/{n}.npy'), rtol=1e-6)\n"
        "    assert model.optimizer.iterations == 4\n"
        "assert 'tailrace' not in sys.modules\n"
    )
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


# -- logs in logs, and calls in callbacks ---------------------------------------------------------


class Nesting(keras.Model):
    """As in Keras' guide on train steps of one's own: metrics have a dict of their own."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(4, activation="softmax")

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {"loss": logs["loss"], "compile_metrics": {"accuracy": logs["accuracy"]}}, state

    def test_step(self, state, data):
        logs, state = super().test_step(state, data)
        return {"loss": logs["loss"], "deep": {"er": {"accuracy": logs["accuracy"]}}}, state


def test_logs_that_are_nested():
    pair = twins(Nesting, execution=1, **SPARSE, metrics=lambda: ["accuracy"])
    validation = digits_like(16, seed=1)
    found = fit_both(pair, *digits_like(40), batch_size=8, epochs=2, validation_data=validation)
    assert set(found[0]) == set(found[1]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert_same(pair, found)


def test_logs_that_are_no_numbers():
    class Wrong(Nesting):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {**logs, "compile_metrics": {"names": None}}, state

    model = tk.adopt(Wrong())
    model.compile(SPARSE["optimizer"](), SPARSE["loss"](), metrics=["accuracy"])
    with pytest.raises(tr.TailraceError, match="compile_metrics/names, of type NoneType"):
        model.fit(*digits_like(16), verbose=0)


class Calling(keras.callbacks.Callback):
    """Calls the model once, in the middle of the first epoch."""

    def __init__(self, call, at):
        super().__init__()
        self.call, self.at = call, at

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.at:
            self.at = None
            self.call(self.model, *digits_like(8, seed=5))


@pytest.mark.parametrize(
    "call",
    [
        lambda model, *data: model.train_on_batch(*data),
        lambda model, *data: model.fit(*data, batch_size=4, epochs=2, verbose=0, shuffle=False),
        lambda model, *data: model.evaluate(*data, batch_size=4, verbose=0),
    ],
    ids=["train_on_batch", "fit", "evaluate"],
)
@pytest.mark.parametrize("observed", [False, True])
def test_a_model_that_a_callback_calls_again(call, observed, tmp_path):
    pair = twins(classifier, execution=2, **SPARSE)
    if observed:
        run = {"observe": ["loss"], "run_dir": tmp_path / "run"}
        pair[1].compile(SPARSE["optimizer"](), SPARSE["loss"](), steps_per_execution=2, **run)
    callbacks = lambda: [Calling(call, 3)]  # noqa: E731
    found = fit_both(
        pair, *digits_like(80), batch_size=8, epochs=2, shuffle=False, callbacks=callbacks
    )
    assert_same(pair, found)
    if observed:
        steps = int(pair[1].optimizer.iterations)
        assert len(tr.open_run(tmp_path / "run").history.loss) == steps
        assert len(tk.of(pair[1]).records["loss"].values) == steps


def test_training_in_the_middle_of_an_execution_is_refused():
    model = tk.adopt(classifier())
    model.set_asynchronous_callbacks(True)
    model.compile(SPARSE["optimizer"](), SPARSE["loss"](), steps_per_execution=4)
    inside = Calling(lambda model, *data: model.train_on_batch(*data), 1)
    with pytest.raises(tr.TailraceError, match="in the middle of an execution.*on_epoch_end"):
        model.fit(*digits_like(64), batch_size=8, verbose=0, callbacks=[inside])


# -- dtypes of accumulators -------------------------------------------------------------------------


def test_a_function_of_the_variable_chooses_the_dtype_of_its_accumulator():
    def weights(dtype):
        keras.utils.set_random_seed(0)
        model = tk.adopt(classifier())
        model.compile(SPARSE["optimizer"](), SPARSE["loss"](), steps_per_execution=3)
        model.set_gradient_accumulation_options(3, dtype=dtype)
        model.fit(*digits_like(96), batch_size=8, verbose=0, shuffle=False)
        return [np.asarray(one) for one in model.get_weights()]

    narrow, wide = weights("bfloat16"), weights(None)
    chosen = weights(lambda variable: "bfloat16" if "kernel" in variable.path else variable.dtype)
    of_all = weights(lambda variable: "bfloat16")
    assert_close(of_all, narrow)
    assert all((a == b).all() for a, b in zip(of_all, narrow, strict=True))
    assert not any((a == b).all() for a, b in zip(chosen[::2], wide[::2], strict=True))
