"""Data of every kind, callbacks, counting rules, replicas, accumulation, options, saving."""

import csv

import jax
import keras
import numpy as np
import pytest
from keras_oracle import SPARSE, assert_same, classifier, digits_like, fit_both, twins

import machine
import tailrace as tr
import tailrace.keras as tk
from oracles import assert_close
from tailrace.keras.data import batch_source
from tailrace.keras.programs import executions

L = keras.layers


def line(replicas=1, execution=4, **compiled):
    """The smallest model there is, adopted."""
    keras.utils.set_random_seed(0)
    model = tk.adopt(keras.Sequential([keras.Input((2,)), L.Dense(1)]), replicas)
    compiled = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **compiled}
    model.compile(**compiled, steps_per_execution=execution)
    return model


def points(examples=32):
    x = np.random.default_rng(0).normal(size=(examples, 2)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


# -- data ---------------------------------------------------------------------------------------


class Sequence(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return self.x[i * 8 : i * 8 + 8], self.y[i * 8 : i * 8 + 8]


def sources():
    x, y = digits_like(48)

    def tf_data():
        tf = pytest.importorskip("tensorflow")
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)

    def torch_data():
        torch = pytest.importorskip("torch")
        pairs = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
        return torch.utils.data.DataLoader(pairs, batch_size=8)

    def generator():
        while True:
            for i in range(6):
                yield x[i * 8 : i * 8 + 8], y[i * 8 : i * 8 + 8]

    return {
        "tf.data": (tf_data, {}),
        "PyDataset": (lambda: Sequence(x, y), {}),
        "DataLoader": (torch_data, {}),
        "generator": (generator, {"steps_per_epoch": 6}),
        "tf.data repeated": (lambda: tf_data().repeat(), {"steps_per_epoch": 6}),
    }


def test_data_of_every_kind():
    pair = twins(classifier, execution=3, **SPARSE)
    for make, call in sources().values():
        assert_same(pair, fit_both(pair, make, epochs=2, shuffle=False, **call))


def test_a_generator_is_read_as_far_as_needed_and_no_further():
    x, y = points(8)
    read = []

    def generator():
        for i in range(100):
            read.append(i)
            yield x, y

    model = line(execution=16)
    model.fit(generator(), steps_per_epoch=16, epochs=2, verbose=0, shuffle=False)
    # Keras itself looks at one batch more when it builds the adapter.
    assert len(read) <= 33


def test_batches_stay_on_the_host_where_keras_would_move_them_to_an_accelerator(monkeypatch):
    def one_batch_ahead(batches):  # as Keras' trainer does, on an accelerator
        for batch in batches:
            yield jax.tree.map(jax.device_put, batch)

    x, y = points(32)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)]
    host = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda kind=None: [last] if kind == "cpu" else [first])
    first, last = jax.local_devices()[0], jax.local_devices()[-1]

    def noted(moved):
        for batch in moved:
            host.append(batch[0].devices())
            yield batch

    found = batch_source.Batches(noted(one_batch_ahead(batches)), executions.as_element, {})
    block = found.take(8, 1, first, ahead=0)
    assert host == [{last}] * 4
    assert block.count == 4
    np.testing.assert_array_equal(block.staged.host[0], [b[0] for b in batches])
    assert found.take(8, 1, first, ahead=0) is None


# -- callbacks ----------------------------------------------------------------------------------


class Heard(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begun, self.ended, self.losses = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(batch)
        self.losses.append(logs["loss"])


def test_callbacks_hear_of_executions_or_of_every_step():
    x, y = points(96)
    plain = keras.Sequential([keras.Input((2,)), L.Dense(1)])
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    model = line(execution=4)
    plain.set_weights(model.get_weights())
    every = Heard()
    plain.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[every])
    start = model.get_weights()
    heard = Heard()
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[heard])
    assert (heard.begun, heard.ended) == ([0, 4, 8], [3, 7, 11])
    assert_close(np.float32(heard.losses), np.float32(every.losses[3::4]))
    model.set_weights(start)
    model.set_asynchronous_callbacks(True)
    heard = Heard()
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[heard])
    assert heard.begun == heard.ended == list(range(12))
    assert_close(np.float32(heard.losses), np.float32(every.losses))


def test_callbacks_hear_of_every_batch_of_replicas():
    x, y = points(96)
    model = line(replicas=2, execution=3)
    model.set_asynchronous_callbacks(True)
    start, heard = model.get_weights(), Heard()
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[heard])
    assert heard.begun == heard.ended == list(range(12))
    assert len(set(heard.losses)) == 12
    # Of the first step, each replica's loss is that of its batch.
    model.set_weights(start)
    for number in (0, 1):
        rows = slice(8 * number, 8 * number + 8)
        expected = np.square(model(x[rows]) - y[rows]).mean()
        assert_close(np.float32(heard.losses[number]), np.float32(expected))


class Looking(keras.callbacks.Callback):
    """Reads the model after each batch, also after the last one."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.get_weights()[0])

    on_test_batch_end = on_train_batch_end


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("execution", [1, 2])
def test_data_without_a_length_ends_after_a_callback_has_read_the_model(execution):
    x, y = digits_like(32)

    def batches():
        for first in range(0, 32, 8):
            yield x[first : first + 8], y[first : first + 8]

    pair = twins(classifier, execution, **SPARSE)
    callbacks = [Looking(), Looking()]
    rest = iter(callbacks)
    histories = fit_both(pair, batches, callbacks=lambda: [next(rest)], shuffle=False)
    assert_same(pair, histories)
    found = pair[1].evaluate(batches(), verbose=0, callbacks=[Looking()])
    assert_close(np.float32(found), np.float32(pair[0].evaluate(x, y, 8, verbose=0)))
    np.testing.assert_array_equal(callbacks[1].seen[-1], pair[1].get_weights()[0])


class Reading(Heard):
    async_safe = True  # by Keras' rule: it reads logs, and nothing of the model


def test_those_who_only_read_logs_get_the_same_ones():
    x, y = points(96)
    found = []
    for kind in (Heard, Reading):
        model = line(execution=2)
        heard = kind()
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[heard])
        found.append((heard.ended, heard.losses, tk.of(model).programs["train"].engine))
    assert sorted(found[1][0]) == sorted(found[0][0]) == sorted([*range(1, 12, 2)] * 2)
    assert_close(np.sort(np.float32(found[1][1])), np.sort(np.float32(found[0][1])))
    assert (found[0][2].executions, found[1][2].executions) == (12, 2)


def test_keras_own_callbacks(tmp_path):
    x, y = points(32)
    model = line(execution=4, metrics=["mae"])
    checkpoint = tmp_path / "at_{epoch}.weights.h5"
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=50,
        verbose=0,
        shuffle=False,
        validation_data=(x, y),
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", min_delta=1e-3, patience=1),
            keras.callbacks.ModelCheckpoint(checkpoint, save_weights_only=True),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.TerminateOnNaN(),
        ],
    )
    epochs = len(history.history["loss"])
    assert 2 < epochs < 50
    assert len(list(tmp_path.glob("at_*.weights.h5"))) == epochs
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [float(row["val_loss"]) for row in rows] == history.history["val_loss"]
    assert_close(np.float32(history.history["learning_rate"][-1]), np.float32(0.1 * 0.9**epochs))
    other = line()
    other.load_weights(tmp_path / f"at_{epochs}.weights.h5")
    for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorflow")
    x, y = points(32)
    line().fit(x, y, batch_size=8, verbose=0, callbacks=[keras.callbacks.TensorBoard(tmp_path)])
    assert list(tmp_path.rglob("events*"))


def test_the_progress_bar_moves_during_a_long_execution(monkeypatch):
    from tailrace.feeds import dispatch_table

    moved = []
    bar = keras.callbacks.ProgbarLogger.on_train_batch_end
    monkeypatch.setattr(dispatch_table, "LONG_S", -1.0)

    def move(self, batch, logs=None):
        moved.append(batch)
        bar(self, batch, logs)

    monkeypatch.setattr(keras.callbacks.ProgbarLogger, "on_train_batch_end", move)
    x, y = points(160)
    line(execution=20).fit(x, y, batch_size=8, verbose=2)
    assert moved == list(range(1, 20, 2))


# -- counting -----------------------------------------------------------------------------------


def test_replicas_need_a_batch_each():
    x, y = points(8)
    with pytest.raises(ValueError, match="contains 1 items, but all 2 replicas are requested"):
        line(2, 1).fit(iter([(x, y)]), steps_per_epoch=1, verbose=0)


def test_more_counting_rules(caplog):
    x, y = points(32)
    model = line(execution=500)
    heard = Heard()
    with caplog.at_level("WARNING", "tailrace"):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[heard])
    assert heard.ended == [3]
    model = line(execution=2)
    model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=4)
    with pytest.raises(tr.TailraceError, match=r"\(set to 2\) is not divisible by .*replica \(4\)"):
        model.fit(x, y, batch_size=8, verbose=0)
    model = line(execution=2)
    model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=2)
    with pytest.raises(ValueError, match="has a partial batch"):
        model.fit(x[:30], y[:30], batch_size=8, verbose=0)
    with pytest.raises(ValueError, match=r"whole steps\. Received: 3 batches"):
        model.fit(x[:24], y[:24], batch_size=8, verbose=0)
    with pytest.raises(
        ValueError, match="steps_per_execution must be a whole number >= 1 .batches."
    ):
        line(execution=0)
    model = line(execution=2, observe="grad/nothing")
    with pytest.raises(
        tr.errors.SelectionError, match=r"All names: tk.of\(model\).tensors\(\), aft"
    ):
        model.fit(x[:16], y[:16], batch_size=8, verbose=0)


# -- replicas and accumulation ------------------------------------------------------------------


def noisy():
    inputs = keras.Input((6,))
    x = L.BatchNormalization()(L.Dense(5, activation="relu")(inputs))
    return keras.Model(inputs, L.Dense(4, activation="softmax")(x))


def test_replicas_average_gradients_and_merge_metrics():
    x, y = digits_like(64)
    metrics = lambda: ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]  # noqa: E731
    whole, ours = twins(classifier, execution=2, replicas=2, **SPARSE, metrics=metrics)
    big = whole.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False).history
    # Replica r takes every second batch of 8: together they see what one batch of 16 holds.
    small = ours.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history
    for a, b in zip(whole.get_weights(), ours.get_weights(), strict=True):
        assert_close(b, a)
    for name in big:
        assert_close(np.float32(small[name]), np.float32(big[name]))
    assert_close(ours.predict(x, 8, verbose=0), whole.predict(x, 8, verbose=0))
    assert_close(
        np.float32(ours.evaluate(x, y, 8, verbose=0)),
        np.float32(whole.evaluate(x, y, 8, verbose=0)),
    )
    assert all(len(v.value.sharding.device_set) == 1 for v in ours.variables)


@pytest.mark.parametrize("method", ["NONE", "LIST", "SUM", "MEAN"])
def test_metrics_of_replicas(method):
    x, y = points(32)
    y[8:16] += 10.0
    model = line(replicas=2, execution=1)
    model.optimizer.learning_rate = 0.0
    model.set_replication_options(method)
    loss = model.fit(x, y, batch_size=8, steps_per_epoch=2, verbose=0, shuffle=False).history[
        "loss"
    ]
    errors = (np.asarray(model(x)) - y) ** 2
    each = [errors[:8].mean(), errors[8:16].mean()]
    wanted = {"NONE": each[1], "LIST": each, "SUM": sum(each), "MEAN": sum(each) / 2}[method]
    assert_close(np.float32(loss[0]), np.float32(wanted))
    with pytest.raises(ValueError, match="'mean'. Received: 'median'"):
        model.set_replication_options("median")


def test_dropout_differs_between_replicas_and_batch_norm_is_shared():
    inputs = keras.Input((2,))
    model = tk.adopt(keras.Model(inputs, L.Dropout(0.5)(L.BatchNormalization()(inputs))), 2)
    model.compile("sgd", "mse", observe=[tr.Tap("activation/dropout", reduce="tensor")])
    x = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
    model.fit(x, x, batch_size=16, verbose=0)
    seen = model.records["activation/dropout"].values
    assert not np.array_equal(seen[0] == 0, seen[1] == 0)
    assert model.layers[1].moving_mean.shape == (2,)


def test_dropped_remainder_of_replicas():
    x, y = points(40)
    model = line(replicas=2, execution=2)
    heard = Heard()
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[heard])
    assert heard.ended == [3]
    assert int(model.optimizer.iterations) == 2


def test_validation_and_prediction_drop_what_replicas_cannot_share():
    x, y = points(40)
    model = line(replicas=2, execution=2)
    model.fit(x[:32], y[:32], batch_size=8, verbose=0, validation_data=(x, y))
    assert model.predict(x, batch_size=8, verbose=0).shape == (32, 1)
    expected = np.mean((np.asarray(model(x[:32])) - y[:32]) ** 2)
    assert_close(np.float32(model.evaluate(x, y, batch_size=8, verbose=0)), np.float32(expected))


def test_a_failure_leaves_the_variables_as_they_were():
    x, y = points(32)
    model = line()
    before = model.get_weights()
    model.compile("sgd", lambda a, b: 1 / 0)
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ZeroDivisionError):
        model.fit(x, y, batch_size=8, verbose=0)

    def failing():
        for batch in range(6):
            if batch == 5:
                raise OSError("the disk is gone")
            yield x[:8], y[:8]

    model.compile("sgd", "mse", steps_per_execution=2)
    with pytest.raises(OSError, match="the disk is gone"):
        model.fit(failing(), steps_per_epoch=6, verbose=0, shuffle=False)
    # On an accelerator Keras reads one batch ahead, and has not handed over the last one.
    assert int(model.optimizer.iterations) == (5 if machine.PLATFORM == "cpu" else 4)
    assert not np.array_equal(before[0], model.get_weights()[0])


@pytest.mark.parametrize("method", ["sum", "mean", "running_mean"])
def test_accumulation(method):
    x, y = points(64)
    model = line(execution=4)
    model.set_gradient_accumulation_options(2, method)
    start = [tr_w.copy() for tr_w in model.get_weights()]
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    whole = keras.Sequential([keras.Input((2,)), L.Dense(1)])
    whole.set_weights(start)
    whole.compile(keras.optimizers.SGD(0.2 if method == "sum" else 0.1), "mse")
    whole.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    for a, b in zip(whole.get_weights(), model.get_weights(), strict=True):
        assert_close(b, a)
    assert int(model.optimizer.iterations) == 4


# -- options, saving, overrides -----------------------------------------------------------------


def test_options_say_what_is_wrong():
    model = line()
    with pytest.raises(ValueError, match="to be a positive integer, but got 0 instead"):
        model.set_gradient_accumulation_options(0)
    with pytest.raises(ValueError, match="Found `opt` key in optimizer_kwargs"):
        model.set_gradient_accumulation_options(2, opt=1)
    with pytest.raises(ValueError, match="device_mapping to be a list of integers"):
        model.set_pipelining_options(2, device_mapping=(0, 1))
    with pytest.raises(ValueError, match="automatically set by Keras"):
        model.set_pipelining_options(2, infeed_queue=None)
    with pytest.raises(ValueError, match="not compatible with Keras"):
        model.set_pipelining_options(2, outfeed_mask=None)
    with pytest.raises(ValueError, match="Set the `gradient_accumulation_steps_per_replica`"):
        model.set_pipelining_options(gradient_accumulation_count=2)
    with pytest.raises(ValueError, match="does not know 'shedule'"):
        model.set_pipelining_options(shedule="grouped")
    with pytest.raises(ValueError, match="'grouped', 'interleaved', 'sequential'"):
        model.set_pipelining_options(schedule="zigzag")
    with pytest.raises(ValueError, match="automatically set by Keras"):
        model.set_infeed_queue_options(dataset=None)
    with pytest.raises(ValueError, match="not compatible with Keras"):
        model.set_outfeed_queue_options(outfeed_mode="all")
    model.set_pipelining_options(4, schedule="interleaved")
    model.set_pipelining_options(device_mapping=[0, 0])
    options = model.tailrace.options
    assert options.pipelining_schedule == "interleaved"
    assert options.pipelining_gradient_accumulation_steps_per_replica == 4
    model.set_infeed_queue_options(prefetch_depth=0)
    model.set_outfeed_queue_options(buffer_depth=2)


@keras.saving.register_keras_serializable("tests")
class Saved(keras.Model):
    def __init__(self, width=3, **kwargs):
        super().__init__(**kwargs)
        self.width, self.dense = width, L.Dense(width)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return {**super().get_config(), "width": self.width}


def small_functional():
    inputs = keras.Input((2,))
    return keras.Model(inputs, L.Dense(3)(inputs))


@pytest.mark.parametrize(
    "make", [small_functional, Saved, lambda: keras.Sequential([keras.Input((2,)), L.Dense(3)])]
)
def test_saving_keeps_options(make, tmp_path):
    model = tk.adopt(make(), replicas=2)
    model.set_gradient_accumulation_options(2, "mean")
    model.set_asynchronous_callbacks(True)
    model.compile("adam", "mse", steps_per_execution=2)
    x = np.ones((32, 2), np.float32)
    model.fit(x, np.ones((32, 3), np.float32), batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.tailrace.options == model.tailrace.options
    assert (again.tailrace.replicas, again.steps_per_execution) == (2, 2)
    np.testing.assert_array_equal(again.predict(x, 4, verbose=0), model.predict(x, 4, verbose=0))
    for a, b in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(a.value), np.asarray(b.value))
    cloned = keras.models.clone_model(model)
    assert cloned.count_params() == model.count_params()


class OwnTrainStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "twice": 2 * logs["loss"]}, state


def test_an_overridden_train_step_runs_in_the_loop():
    pair = twins(OwnTrainStep, execution=4, optimizer=lambda: "adam", loss=lambda: "mse")
    histories = fit_both(pair, *points(64), batch_size=8, epochs=2)
    assert set(histories[1]) == {"loss", "twice"}
    assert_same(pair, histories)
    pair[1].set_gradient_accumulation_options(2)
    with pytest.raises(tr.TailraceError, match="`train_step` for the model .* has been overridden"):
        pair[1].fit(*points(64), batch_size=8, verbose=0)


def test_only_models_are_adopted():
    with pytest.raises(tr.TailraceError, match="tk.adopt takes a Keras model"):
        tk.adopt(L.Dense(1))
    with pytest.raises(tr.TailraceError, match="tk.of takes a model that trains on the engine"):
        tk.of(keras.Sequential([L.Dense(1)]))


class CastingSGD(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        cast = [(keras.ops.sign(g), v) for g, v in grads_and_vars]
        return super().apply_gradients(cast)


def test_an_overridden_apply_gradients_is_called():
    x, y = points(8)
    model = line(execution=1, optimizer=CastingSGD(0.25))
    before = model.get_weights()
    model.fit(x, y, batch_size=8, verbose=0)
    moved = [np.abs(b - a) for a, b in zip(before, model.get_weights(), strict=True)]
    assert_close(np.concatenate([m.ravel() for m in moved]), np.full(3, 0.25, np.float32))
    scaled = keras.optimizers.LossScaleOptimizer(CastingSGD(0.25))
    with pytest.raises(tr.TailraceError, match="CastingSGD, which overrides `apply_gradients`"):
        line(execution=1, optimizer=scaled).fit(x, y, batch_size=8, verbose=0)


def test_periodic_taps_cut_executions_and_logs_stay_whole():
    x, y = points(96)
    losses = []
    for observe in ((), [tr.Tap("grad/dense/kernel", mode=tr.every(5), reduce="tensor")]):
        keras.backend.clear_session()
        model = line(execution=12, observe=observe)
        model.set_asynchronous_callbacks(True)
        heard = Heard()
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[heard])
        losses.append(heard.losses)
    assert list(model.records["grad/dense/kernel"].steps) == [4, 9]
    assert_close(np.float32(losses[1]), np.float32(losses[0]))


def test_observation_of_an_unchanged_model(tmp_path):
    x, y = digits_like(32)
    model = tk.adopt(
        keras.Sequential(
            [
                L.Dense(5, activation="relu", name="up"),
                L.Dense(4, activation="softmax", name="down"),
            ]
        )
    )
    model.compile(
        "sgd",
        SPARSE["loss"](),
        steps_per_execution=4,
        observe=["grad/*", tr.Tap("activation/up", reduce="tensor"), "loss"],
        run_dir=tmp_path / "run",
    )
    first = keras.ops.relu(0)  # the ops are those of Keras on JAX
    assert float(first) == 0.0
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    assert model.records["grad/up/kernel"].values.shape == (8,)
    assert model.records["activation/up"].values.shape == (8, 8, 5)
    assert "grad/down/bias" in [entry.name for entry in model.tensors()]
    assert list(tr.open_run(tmp_path / "run").records["loss"].steps) == list(range(8))
    with pytest.raises(tr.TailraceError, match="model.records exists after a fit"):
        _ = line().records
