"""Single batches between fits, validation of some steps, and other ways to be eager."""

import keras
import numpy as np
import pytest
from keras_oracle import SPARSE, assert_same, classifier, digits_like, fit_both, twins

import tailrace as tr
import tailrace.keras as tk


@pytest.mark.parametrize("first", ["fit", "train_on_batch"])
def test_single_batches_between_fits(first):
    x, y = digits_like(48)
    pair = twins(classifier, execution=3, **SPARSE)
    found = []
    for model in pair:
        if first == "train_on_batch":
            model.train_on_batch(x[:8], y[:8])
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        losses = [model.train_on_batch(x[:8], y[:8]), model.test_on_batch(x[8:16], y[8:16])]
        model.fit(
            x, y, batch_size=8, shuffle=False, verbose=0, sample_weight=np.ones(48, "float32")
        )
        found.append({"loss": [float(np.ravel(loss)[0]) for loss in losses]})
    assert_same(pair, found)


def test_single_batches_where_a_step_takes_several():
    x, y = digits_like(16)
    model = tk.adopt(classifier(), 2)
    model.compile("sgd", SPARSE["loss"](), steps_per_execution=2)
    model(x[:1])
    before = model.get_weights()
    calls = (model.train_on_batch, model.test_on_batch, lambda x, _: model.predict_on_batch(x))
    for call in calls:
        with pytest.raises(
            tr.TailraceError, match="take one batch, and a step of this model takes 2"
        ):
            call(x[:8], y[:8])
    for now, was in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, was)


@pytest.mark.parametrize("execution", [3, 6])
def test_as_many_batches_are_validated_as_asked_for(execution):
    x, y = digits_like(96)
    pair = twins(classifier, execution=execution, **SPARSE)
    call = {"validation_data": digits_like(80, seed=1), "validation_batch_size": 8}
    assert_same(pair, fit_both(pair, x, y, batch_size=8, epochs=2, validation_steps=4, **call))


def test_an_outfeed_and_a_smaller_last_batch():
    x, y = digits_like(20)
    queue = tr.OutfeedQueue()
    layers = [keras.Input((6,)), tk.Outfeed(queue, name="o"), keras.layers.Dense(4)]
    model = tk.adopt(keras.Sequential(layers))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(tr.TailraceError, match="the last batch that is smaller, leave it out"):
        model.fit(x, y, batch_size=8, verbose=0)


@pytest.mark.filterwarnings("ignore:Limiting steps_per_epoch", "ignore:Your input ran out of data")
@pytest.mark.parametrize("asked", [None, 5])
def test_steps_that_keras_limits(asked, request):
    """The limit of `keras.config` also counts where executions run together."""
    request.addfinalizer(lambda: keras.config.set_max_steps_per_epoch(None))
    keras.config.set_max_steps_per_epoch(3)
    x, y = digits_like(48)
    pair = twins(classifier, execution=1, **SPARSE)
    assert_same(pair, fit_both(pair, x, y, batch_size=8, epochs=2, steps_per_epoch=asked))
    assert [len(model.predict(x, batch_size=8, verbose=0)) for model in pair] == [24, 24]
