"""Where the optimizer's state is kept, under the names that a Keras model's setters have."""

import keras
import numpy as np
import pytest

import tailrace.keras as tk
from tailrace.errors import OptionError

X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)


def trained(**options):
    keras.utils.set_random_seed(0)
    with tk.Strategy(replicas=2).scope():
        model = keras.Sequential(
            [keras.Input((32,)), keras.layers.Dense(40), keras.layers.Dense(2)]
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss, steps_per_execution=4)
    model.set_gradient_accumulation_options(2, **options)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"replicated_optimizer_state_sharding": True},
        {"offload_weight_update_variables": True},
        {"offload_weight_update_variables": None, "offload_activations": True},
    ],
    ids=["shared", "offloaded", "automatic"],
)
def test_results_do_not_depend_on_where_state_is_kept(options):
    expected, found = trained(), trained(**options)
    for one, other in zip(expected.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_options_are_kept_with_the_model():
    model = trained(replicated_optimizer_state_sharding=True)
    assert model.tailrace.options.shard_optimizer_state is True
    assert model.tailrace.options.saved()["shard_optimizer_state"] is True
    with pytest.raises(OptionError, match="offload_activations is True, False or None"):
        model.set_gradient_accumulation_options(2, offload_activations="yes")
