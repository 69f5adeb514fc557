"""Arrays given to `fit` that stay on the device: the same training, and only row numbers travel."""

import jax
import keras
import numpy as np
import pytest
from keras_oracle import SPARSE, assert_same, classifier, digits_like, fit_both, twins

import tailrace as tr
import tailrace.keras as tk
from oracles import assert_bits_equal
from tailrace.devices import devices
from tailrace.keras.data import resident_arrays, resident_batches
from tailrace.keras.programs.executions import as_element

L = keras.layers


@pytest.fixture
def gathered(monkeypatch):
    """For each block of which rows were gathered on the device, their numbers for each leaf."""
    blocks = []
    gather = resident_arrays.Rows.gathered

    def noted(self, numbers, arrays, device):
        blocks.append([numbers] * len(arrays))
        return gather(self, numbers, arrays, device)

    monkeypatch.setattr(resident_arrays.Rows, "gathered", noted)
    return blocks


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # Keras says so, on jax 0.11
@pytest.mark.parametrize(
    "call",
    [
        {"shuffle": True, "validation_data": digits_like(24, seed=1)},
        {"sample_weight": np.linspace(0, 1, 90, dtype=np.float32), "shuffle": "batch"},
        {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5, 3: 0.0}},
        {"steps_per_epoch": 6, "initial_epoch": 1, "epochs": 2, "shuffle": False},
    ],
    ids=lambda call: next(iter(call)),
)
def test_it_equals_keras(call, gathered):
    x, y = digits_like(90)  # eleven batches of eight, and one of two
    pair = twins(classifier, execution=call.get("steps_per_epoch", 12), **SPARSE)
    pair[1].set_infeed_queue_options(resident=True)
    # Targets of 64 bits: narrowed once, on the way to the device.
    call = {"batch_size": 8, "epochs": 2, **call}
    assert_same(pair, fit_both(pair, x, y.astype(np.int64), **call))
    numbers = [leaf for block in gathered for leaf in block if leaf.dtype == np.int32]
    assert numbers, "rows were gathered on the device"
    assert all(leaf.ndim == 2 and leaf.max() < 90 for leaf in numbers)


def test_several_inputs_and_other_arrays_of_the_same_form(gathered):
    def two_inputs():
        a, b = keras.Input((6,), name="b"), keras.Input((2, 3), name="a")
        x = L.Concatenate()([L.Dense(5)(a), L.Flatten()(b)])
        return keras.Model({"b": a, "a": b}, L.Dense(4, activation="softmax")(x))

    pair = twins(two_inputs, execution=4, **SPARSE)
    pair[1].set_infeed_queue_options(resident=True)
    for seed in (0, 1):
        x, y = digits_like(64, seed=seed)
        inputs = {"b": x, "a": x.reshape(-1, 2, 3)[::-1]}
        assert_same(pair, fit_both(pair, inputs, y, batch_size=8))
    assert {len(block) for block in gathered} == {3}


def test_weights_that_keras_repeats_for_several_outputs(gathered):
    def two_outputs():
        given = keras.Input((6,))
        return keras.Model(given, [L.Dense(1, name="a")(given), L.Dense(1, name="b")(given)])

    x, y = digits_like(40)
    y = y.astype(np.float32)
    pair = twins(two_outputs, execution=5, loss=lambda: "mse")
    pair[1].set_infeed_queue_options(resident=True)
    weights = np.linspace(0, 1, 40, dtype=np.float32)
    assert_same(pair, fit_both(pair, x, [y, 2 * y], batch_size=8, sample_weight=weights))
    assert {len(block) for block in gathered} == {5}


class Looks(keras.callbacks.Callback):
    """Looks at the model after each batch: none can run together with another."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.get_weights()


def test_one_batch_at_a_time_and_taps_that_cut_executions(gathered):
    x, y = digits_like(64)
    found = []
    for keep in (False, True):
        keras.utils.set_random_seed(2)
        model = tk.adopt(classifier())
        model.set_infeed_queue_options(resident=keep)
        tap = tr.Tap("loss", mode=tr.every(3))
        model.compile("sgd", SPARSE["loss"](), steps_per_execution=8, observe=[tap])
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        found.append((model.records["loss"].values, model.get_weights()))
        model.compile("sgd", SPARSE["loss"](), steps_per_execution=1)
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[Looks()])
        found[-1] += (model.get_weights(),)
    assert gathered
    assert_bits_equal(found[1], found[0])


def test_on_an_accelerator_it_is_so_by_itself(monkeypatch, gathered):
    x, y = digits_like(96)
    assert not resident_arrays.keeps((x, y), 2), "not on a CPU, which has no memory of its own"
    plain = tk.adopt(classifier())
    plain.compile("sgd", SPARSE["loss"](), steps_per_execution=6)
    plain.fit(x, y, batch_size=8, verbose=0)
    assert not gathered
    # Keras then moves batches ahead one by one; it is asked for those it has not moved.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(devices, "platform", lambda: "gpu")
    assert resident_arrays.keeps((x, y), 1)
    monkeypatch.setattr(resident_arrays, "ONCE_BYTES", x.nbytes)
    assert not resident_arrays.keeps((x, y), 1)
    assert resident_arrays.keeps((x, y), 2)
    pair = twins(classifier, execution=6, **SPARSE)
    assert_same(pair, fit_both(pair, x, y, batch_size=8, epochs=2))
    assert len(gathered) == 2
    pair[1].set_infeed_queue_options(resident=False)
    pair[1].fit(x, y, batch_size=8, verbose=0)
    assert len(gathered) == 2


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_rows_are_those_that_keras_would_take(shuffle):
    """Keras' own iterator over the same arrays, with the same seed, has the same batches."""
    x, y = digits_like(30)
    seen = []

    class Noting(keras.Model):
        def train_step(self, state, data):
            seen.append(np.asarray(data[0]))
            return {"loss": 0.0}, state

    plain = Noting()
    plain.compile("sgd", run_eagerly=True)
    plain.built = plain.optimizer.built = True
    keras.utils.set_random_seed(5)
    plain.fit(x, y, batch_size=8, shuffle=shuffle, epochs=2, verbose=0)
    keras.utils.set_random_seed(5)
    rows = resident_arrays.Rows((x, y, None), 8, shuffle)
    found = [rows.batch(one)[0] for _ in range(2) for one in rows.epoch()]
    assert_bits_equal(found, seen)


def test_the_host_has_indices_in_place_of_elements():
    x, y = digits_like(32)
    rows = resident_arrays.Rows((x, y, None), 2, True)
    found = resident_batches.ResidentBatches(iter(()), as_element, {}, rows)
    block = found.take(2, 1, jax.devices()[0], ahead=0)
    elements = block.form.feed.elements_of(block.staged.host)
    for leaf, element in zip(block.staged.device, elements, strict=True):
        assert_bits_equal(np.asarray(leaf), element)
    numbers = np.asarray(block.staged.host[0])
    assert_bits_equal(np.asarray(block.staged.device[0]), x[numbers])


@pytest.mark.parametrize("keep", [False, True])
def test_a_bad_batch_is_found_again(keep):
    """A guard replays the step: its batch is read from the arrays once more."""
    x, y = digits_like(96)
    x[61] = np.inf
    model = tk.adopt(classifier())
    model.set_infeed_queue_options(resident=keep)
    observe = [tr.stop_on_nonfinite()]
    model.compile("sgd", SPARSE["loss"](), steps_per_execution=6, observe=observe)
    with pytest.raises(tr.TailraceError, match=r"step 7.* row 5") as caught:
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    assert caught.value.step == 7


def test_a_bad_batch_that_travelled_alone_is_found_again():
    """The last batch of 129 is a block of its own: its data, not the numbers of its rows."""
    x, y = digits_like(129)
    x[128] = np.inf
    model = tk.adopt(classifier())
    model.set_infeed_queue_options(resident=True, prefetch_depth=0)
    observe = [tr.stop_on_nonfinite()]
    model.compile("sgd", SPARSE["loss"](), observe=observe)
    with pytest.raises(tr.TailraceError, match="step 128"):
        model.fit(x, y, batch_size=1, verbose=0, shuffle=False)


def test_where_it_cannot_be():
    x, y = digits_like(32)
    model = tk.adopt(classifier())
    with pytest.raises(ValueError, match="resident is True, False, or None"):
        model.set_infeed_queue_options(resident="yes")
    model.set_infeed_queue_options(resident=True)
    model.compile("sgd", SPARSE["loss"](), steps_per_execution=2)
    for data, call in (
        ((x.astype(np.float64), y), {}),
        ((x, y), {"validation_split": 0.5}),
    ):
        with pytest.raises(ValueError, match="Received: other data"):
            model.fit(*data, batch_size=8, verbose=0, **call)
    several = tk.adopt(classifier(), 2)
    several.set_infeed_queue_options(resident=True)
    several.compile("sgd", SPARSE["loss"](), steps_per_execution=2)
    with pytest.raises(ValueError, match="Received: a model with replicas or stages"):
        several.fit(x, y, batch_size=8, verbose=0)
