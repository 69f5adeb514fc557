"""Training loops written by hand, run by `strategy.run`."""

import keras
import numpy as np
import pytest
from keras_oracle import digits_like

import tailrace as tr
import tailrace.keras as tk
from oracles import assert_close

L = keras.layers


def training_loop(iterator, outfeed, model, optimizer, count):
    def step():
        x, y = next(iterator)

        def loss_of():
            return keras.ops.mean(
                keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
            )

        loss, grads = tk.value_and_grad(loss_of, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        outfeed.enqueue(loss)

    tk.repeat(count, step)


def create_model():
    return keras.Sequential(
        [L.Flatten(), L.Dense(8, activation="relu"), L.BatchNormalization(), L.Dense(4, "softmax")]
    )


def test_many_steps_in_one_execution():
    x, y = digits_like(96)
    keras.utils.set_random_seed(1)
    plain = create_model()
    plain.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy")
    expected = [plain.train_on_batch(x[i : i + 8], y[i : i + 8]) for i in range(0, 96, 8)]
    strategy = tk.Strategy()
    with strategy.scope():
        optimizer = keras.optimizers.Adam(0.05)
        keras.utils.set_random_seed(1)
        model = create_model()
        iterator = tk.DatasetIterator(tr.batches((x, y), 8))
        outfeed = tr.OutfeedQueue()
        assert isinstance(iterator, tk.DatasetIterator)
        for _ in range(3):
            strategy.run(training_loop, args=[iterator, outfeed, model, optimizer, 4])
        losses = outfeed.dequeue()
    assert losses.shape == (12,)
    assert_close(losses, np.float32(expected))
    for a, b in zip(plain.variables, model.variables, strict=True):
        assert_close(np.asarray(b.value), np.asarray(a.value))
    assert int(optimizer.iterations) == 12
    assert not isinstance(iter(tr.batches((x, y), 8)), tk.DatasetIterator)


def test_replicas_need_the_mean_of_their_gradients():
    x, y = digits_like(64)
    strategy = tk.Strategy(replicas=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), L.Dense(4, activation="softmax")])
        outfeed = tr.OutfeedQueue()
        start = model.get_weights()
        iterator = tk.DatasetIterator(tr.batches((x, y), 8))
        with pytest.raises(tr.TailraceError, match="equal on all replicas"):
            strategy.run(training_loop, [iterator, outfeed, model, keras.optimizers.SGD(0.1), 4])
        optimizer = tk.CrossReplicaOptimizer(keras.optimizers.SGD(0.1))
        iterator = tk.DatasetIterator(tr.batches((x, y), 8))
        strategy.run(training_loop, [iterator, outfeed, model, optimizer, 4])
    assert outfeed.dequeue().shape == (4, 2)
    whole = keras.Sequential([keras.Input((6,)), L.Dense(4, activation="softmax")])
    whole.set_weights(start)
    whole.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    whole.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    for a, b in zip(whole.get_weights(), model.get_weights(), strict=True):
        assert_close(b, a)


def test_functions_return_values_and_take_arrays():
    strategy = tk.Strategy()
    total = keras.Variable(0.0)

    class Holder:
        variables = (total,)

    def add(holder, x):
        tk.repeat(3, lambda: holder.variables[0].assign_add(x))
        return {"twice": 2 * holder.variables[0]}

    holder = Holder()
    for step in (1, 2):
        out = strategy.run(add, [holder, np.float32(step)])
    assert float(out["twice"]) == 18.0
    assert float(total.value) == 9.0


def test_what_belongs_into_a_device_function_says_so():
    strategy = tk.Strategy()
    with strategy.scope():
        iterator = tk.DatasetIterator(tr.batches((np.zeros((8, 2), np.float32),), 4))
    with pytest.raises(tr.TailraceError, match="it has no elements outside of them"):
        next(iterator)
    with pytest.raises(tr.TailraceError, match="tk.repeat means something only in a device"):
        tk.repeat(2, lambda: None)
    with pytest.raises(tr.TailraceError, match="is in a loop on the device"):
        strategy.run(lambda it: next(it), [iterator])
    with pytest.raises(tr.TailraceError, match="strategy.run takes a function"):
        strategy.run(3)


class Loop:
    """A loop whose objects are its attributes."""

    def __init__(self, count):
        self.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.mean, self.count = keras.metrics.Mean(), count

    def run(self, iterator):
        def step():
            x, y = next(iterator)

            def loss_of():
                loss = keras.losses.sparse_categorical_crossentropy(y, self.model(x), True)
                return keras.ops.mean(loss)

            variables = self.model.trainable_variables
            loss, grads = tk.value_and_grad(loss_of, variables)
            self.optimizer.apply_gradients(zip(grads, variables, strict=True))
            self.mean.update_state(loss)

        tk.repeat(self.count, step)


@pytest.mark.parametrize("given", ["attributes", "closure", "nested"])
def test_state_is_found_wherever_the_function_has_it_from(given):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 6)).astype("float32"), rng.integers(0, 4, 48).astype("int32")
    keras.utils.set_random_seed(1)
    loop, strategy = Loop(6), tk.Strategy()
    start = [np.array(w) for w in loop.model.get_weights()]

    def closed_over(iterator):
        Loop.run(loop, iterator)

    def with_parts(iterator, parts):
        assert parts[0]["loop"] is loop.model
        Loop.run(loop, iterator)

    with strategy.scope():
        iterator = tk.DatasetIterator(tr.batches((x, y), 8))
        if given == "attributes":
            strategy.run(loop.run, args=[iterator])
        elif given == "closure":
            strategy.run(closed_over, args=[iterator])
        else:
            parts = [{"loop": loop.model, "more": (loop.optimizer, {"mean": loop.mean})}]
            strategy.run(with_parts, args=[iterator, parts])
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    plain.set_weights(start)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    history = plain.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"]
    assert_close(loop.model.get_weights(), plain.get_weights())
    assert int(loop.optimizer.iterations) == 6
    assert_close(float(loop.mean.result()), history[0])


def test_state_that_it_cannot_find_is_named():
    class Hidden:
        __slots__ = ("mean", "model")

    hidden, strategy = Hidden(), tk.Strategy()
    hidden.mean = keras.metrics.Mean()
    hidden.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def counts():
        tk.repeat(2, lambda: hidden.mean.update_state(1.0))

    def trains():
        def loss():
            return keras.ops.sum(hidden.model(np.ones((1, 2), "float32")))

        tk.repeat(2, lambda: tk.value_and_grad(loss, hidden.model.trainable_variables) and None)

    with strategy.scope():
        for function, what in (
            (counts, "changes a Keras variable"),
            (trains, "gradient in '.*dense"),
        ):
            with pytest.raises(tr.TailraceError, match=f"{what}.*strategy.run.fn, args="):
                strategy.run(function)
