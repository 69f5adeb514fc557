"""Programs that Keras users write around `fit`, each run twice: plain Keras, and the adopted model."""

import keras
import numpy as np
import pytest
from keras_oracle import digits_like

import tailrace.keras as tk
from oracles import assert_close

L, Opt = keras.layers, keras.optimizers
X, Y = digits_like(40)
W = np.linspace(0.1, 2, 40).astype(np.float32)
SPARSE = "sparse_categorical_crossentropy"


def small(*layers, features=6):
    return keras.Sequential([keras.Input((features,)), *layers, L.Dense(4, activation="softmax")])


def compiled(take, model=None, optimizer=None, loss=SPARSE, **rest):
    model = take(small(L.Dense(5, "relu")) if model is None else model)
    model.compile(optimizer or Opt.SGD(0.1, momentum=0.9), loss, **rest)
    return model


def fit(model, *data, **call):
    data = data or (X, Y)
    call = {"batch_size": 8, "epochs": 2, "verbose": 0, **call}
    return list(model.fit(*data, **call).history.values())


# -- weights of examples, metrics, validation ----------------------------------------------------


def class_and_sample_weights(take):
    model = compiled(take, metrics=["accuracy"], weighted_metrics=["accuracy"])
    found = fit(model, class_weight={0: 0.5, 1: 2.0, 2: 1.0, 3: 3.0})
    held = (X[:16], Y[:16], W[:16])
    found += fit(model, sample_weight=W, validation_data=held, validation_batch_size=5)
    return model, found, model.evaluate(X, Y, sample_weight=W, verbose=0, return_dict=True)


def two_headed():
    inputs = keras.Input((6,), name="features")
    body = L.Dense(5, "relu")(inputs)
    heads = {"a": L.Dense(4, "softmax", name="a")(body), "b": L.Dense(1, name="b")(body)}
    return keras.Model(inputs, heads)


TARGETS = {"a": Y, "b": X[:, :1]}


def metrics_by_output(take):
    model = compiled(
        take,
        two_headed(),
        loss={"a": SPARSE, "b": keras.losses.Huber(reduction="sum")},
        loss_weights={"a": 0.3, "b": 2.0},
        metrics={"a": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)], "b": "mae"},
        weighted_metrics={"b": ["mse"]},
    )
    found = fit(model, X, TARGETS, sample_weight={"a": W, "b": W[::-1].copy()})
    return model, found, model.evaluate(X, TARGETS, verbose=0)


def losses_in_lists(take):
    inputs = [keras.Input((6,)), keras.Input((6,))]
    body = L.Concatenate()([L.Dense(3)(one) for one in inputs])
    model = keras.Model(inputs, [L.Dense(4, "softmax")(body), L.Dense(1)(body)])
    own = lambda y, p: keras.ops.mean(keras.ops.abs(y - p), -1)  # noqa: E731
    model = compiled(take, model, loss=[SPARSE, own], metrics=[["accuracy"], [own, "mse"]])
    return model, fit(model, [X, X[::-1].copy()], [Y, X[:, :1]])


def validation_in_parts(take):
    model = compiled(take, metrics=["accuracy"])
    found = fit(model, validation_split=0.25, sample_weight=W, epochs=3, validation_freq=2)
    found += fit(model, epochs=4, initial_epoch=1, validation_data=(X, Y), validation_steps=2)
    return model, found, fit(model, validation_data=(X, Y), epochs=3, validation_freq=[1, 3])


# -- data ----------------------------------------------------------------------------------------


def endless(size=8):
    number = 0
    while True:
        rows = np.arange(number, number + size) % len(X)
        yield X[rows], Y[rows], W[rows]
        number += size


def steps_of_a_generator(take):
    model = compiled(take, metrics=["accuracy"])
    data = endless()
    found = fit(model, data, batch_size=None, steps_per_epoch=3, epochs=3, shuffle=False)
    return model, found, model.evaluate(data, steps=2, verbose=0), next(data)[2]


def every_dtype(take):
    model = compiled(take, small(L.Rescaling(1 / 255), L.Dense(5, "relu")))
    found = fit(model, (X * 40).astype(np.uint8), Y.astype(np.int64))
    found += fit(model, X.astype(np.float64), Y.astype(np.uint8), sample_weight=W.astype(float))
    found += fit(model, X > 0, Y[:, None].astype(np.float64))
    return model, found, model.predict((X * 40).astype(np.int16), verbose=0)


def no_targets(take):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, L.Dense(6)(L.Dense(2, activity_regularizer="l2")(inputs)))

    class Reconstructing(keras.Model):
        def __init__(self):
            super().__init__()
            self.inside = model

        def call(self, x):
            out = self.inside(x)
            self.add_loss(keras.ops.mean((out - x) ** 2))
            return out

    made = take(Reconstructing())
    made.compile(Opt.Adam(0.01))
    return made, fit(made, X), made.evaluate(X, verbose=0)


# -- state ---------------------------------------------------------------------------------------


def stateful_layers(take):
    inputs = keras.Input(batch_shape=(8, 3, 2))
    hidden = L.GRU(4, stateful=True)(inputs)
    model = compiled(take, keras.Model(inputs, L.Dense(4, "softmax")(hidden)))
    data = X.reshape(40, 3, 2)
    found = fit(model, data, Y, shuffle=False)
    predicted = model.predict(data, batch_size=8, verbose=0)
    for layer in model.layers:
        if getattr(layer, "stateful", False):
            layer.reset_state()
    return model, found, predicted, fit(model, data, Y, shuffle=False)


class Noise(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        drawn = keras.random.normal(keras.ops.shape(x), seed=self.seeds)
        return x + 0.1 * drawn if training else x


def seeds_of_layers(take):
    model = compiled(take, small(Noise(), L.GaussianNoise(0.1, seed=1), L.Dropout(0.5, seed=3)))
    found = fit(model, shuffle=False)
    return model, found, fit(model)


def spectral(take):
    model = compiled(
        take, small(L.SpectralNormalization(L.Dense(5)), L.BatchNormalization(momentum=0.5))
    )
    found = fit(model)
    model.layers[1].trainable = False
    model.compile(Opt.SGD(0.1), SPARSE)
    return model, found, fit(model)


# -- between fits --------------------------------------------------------------------------------


def toggled_and_compiled(take):
    model = compiled(take, metrics=["accuracy"])
    found = fit(model)
    model.layers[0].trainable = False
    model.compile(Opt.Adam(0.01), SPARSE)
    found += fit(model)
    model.layers[0].trainable = True
    model.compile(Opt.RMSprop(0.01, centered=True, momentum=0.5), "mse", metrics=["mae"])
    return model, found, fit(model, X, np.eye(4, dtype=np.float32)[Y])


def changed_between_fits(take):
    model = compiled(take, optimizer=Opt.Adam(0.1))
    found = fit(model)
    model.set_weights([0.5 * w for w in model.get_weights()])
    model.optimizer.learning_rate = 0.01
    found += fit(model)
    model.optimizer.learning_rate.assign(0.2)
    model.optimizer.iterations.assign(0)
    found += fit(model)
    model.layers[0].kernel.assign(model.layers[0].kernel * 2.0)
    found.append(model.evaluate(X, Y, verbose=0))
    return model, found, fit(model)


def single_batches(take):
    model = compiled(take, metrics=["accuracy"])
    found = []
    for start in range(0, 40, 8):
        batch = X[start : start + 8], Y[start : start + 8]
        found.append(model.train_on_batch(*batch, class_weight={0: 2.0, 1: 1.0, 2: 0.5, 3: 1.0}))
        found.append(model.test_on_batch(*batch, sample_weight=W[:8], return_dict=True))
        found.append(model.predict_on_batch(batch[0]))
    found.append(model.train_on_batch(X[:4], Y[:4], sample_weight=W[:4], return_dict=True))
    model.reset_metrics()
    return model, found, fit(model), model.train_on_batch(X[:8], Y[:8])


def saved_and_loaded(take, path="model.keras"):
    import tempfile

    model = compiled(take, optimizer=Opt.Adam(0.05), metrics=["accuracy"])
    found = fit(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/{path}")
        again = take(keras.models.load_model(f"{folder}/{path}"))
        model.save_weights(f"{folder}/w.weights.h5")
        found += fit(again)
        again.load_weights(f"{folder}/w.weights.h5")
    return again, found, fit(again)


# -- callbacks -----------------------------------------------------------------------------------


class Steering(keras.callbacks.Callback):
    """Changes the model between batches, and reads it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (1 + batch)

    def on_train_batch_end(self, batch, logs=None):
        self.seen += [logs["loss"], float(np.abs(self.model.get_weights()[0]).sum())]
        if batch == 1:
            self.model.set_weights([w * 0.9 for w in self.model.get_weights()])
        if len(self.seen) > 14:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(self.model.evaluate(X[:16], Y[:16], verbose=0))
        self.seen.append(self.model.predict(X[:4], verbose=0).sum())


def steered_from_callbacks(take):
    model, steering = compiled(take), Steering()
    return model, fit(model, epochs=3, callbacks=[steering]), steering.seen


def keras_callbacks(take):
    C = keras.callbacks
    model = compiled(take, metrics=["accuracy"])
    found = fit(
        model,
        epochs=6,
        validation_data=(X[::-1].copy(), Y),
        callbacks=[
            C.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=0.05),
            C.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            C.EarlyStopping("val_loss", patience=1, restore_best_weights=True, min_delta=0.01),
            C.TerminateOnNaN(),
        ],
    )
    return model, found


def lambda_callbacks(take):
    model, seen = compiled(take), []

    def note(batch, logs):
        seen.extend([batch, logs["loss"]])

    found = fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=note)])
    callback = keras.callbacks.Callback()
    callback.on_train_batch_end = note
    return model, found, seen, fit(model, callbacks=[callback])


def averaged_weights(take):
    optimizer = Opt.SGD(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2)
    model = compiled(take, optimizer=optimizer)
    found = fit(model)
    model.compile(Opt.Adam(0.05, use_ema=True, ema_momentum=0.6), SPARSE)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    return model, found, fit(model, callbacks=[swap], validation_data=(X, Y))


# -- optimizers and methods of one's own ---------------------------------------------------------


def optimized_by(optimizer):
    def program(take):
        model = compiled(take, optimizer=optimizer())
        return model, fit(model)

    return program


class OwnLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = L.Dense(5, "relu"), L.Dense(4, "softmax")
        self.kept = keras.metrics.Mean("kept")

    @property
    def metrics(self):
        return [*super().metrics, self.kept]

    def call(self, x):
        return self.out(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.kept.update_state(loss)
        return loss + 0.01 * keras.ops.sum(self.hidden.kernel**2) + (0.1 if training else 0.0)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "twice": 2.0}


def losses_of_ones_own(take):
    model = compiled(take, OwnLoss(), metrics=["accuracy"])
    return model, fit(model, validation_data=(X, Y)), model.evaluate(X, Y, verbose=0)


def methods_set_on_a_model(take):
    model = compiled(take)
    plain = model.train_step

    def train_step(state, data):
        logs, state = plain(state, data)
        return {**logs, "mine": keras.ops.mean(data[0])}, state

    found = fit(model)
    model.train_step = train_step
    model.compile(Opt.SGD(0.1), SPARSE)
    return model, found, fit(model)


PROGRAMS = {
    program.__name__: program
    for program in (
        *(class_and_sample_weights, metrics_by_output, losses_in_lists, validation_in_parts),
        *(steps_of_a_generator, every_dtype, no_targets, stateful_layers, spectral),
        *(seeds_of_layers, toggled_and_compiled, changed_between_fits, single_batches),
        *(saved_and_loaded, steered_from_callbacks, keras_callbacks, averaged_weights),
        *(losses_of_ones_own, lambda_callbacks, methods_set_on_a_model),
    )
}
OPTIMIZERS = {
    "adafactor": lambda: Opt.Adafactor(0.05),
    "ftrl": lambda: Opt.Ftrl(0.1, l1_regularization_strength=0.01),
    "lion": lambda: Opt.Lion(0.01, weight_decay=0.1),
    "nadam": lambda: Opt.Nadam(0.01, global_clipnorm=0.5),
    "clipped": lambda: Opt.SGD(0.1, nesterov=True, momentum=0.5, clipvalue=0.01),
}


def outcome(program, take):
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    model, *found = program(take)
    state = [v.value for v in (*model.variables, *model.optimizer.variables)]
    return keras.tree.map_structure(np.asarray, [found, state])


def test_an_optimizer():
    assert_as_in_keras(optimized_by(OPTIMIZERS["clipped"]))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "clipped"])
def test_more_optimizers(name):
    assert_as_in_keras(optimized_by(OPTIMIZERS[name]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    assert_as_in_keras(PROGRAMS[name])


def assert_as_in_keras(program):
    plain = outcome(program, lambda model: model)
    ours = outcome(program, tk.adopt)
    keras.tree.assert_same_structure(plain, ours)
    for a, b in zip(keras.tree.flatten(plain), keras.tree.flatten(ours), strict=True):
        if a.dtype.kind in "US":
            assert a == b
        else:
            assert_close(np.asarray(b, a.dtype), a)
