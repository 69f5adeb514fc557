"""Taps cost time in proportion to equations plus taps: counted in calls of our own code."""

import cProfile
import pstats

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr


def loss_fn(params, x):
    for number, weight in enumerate(params):
        with jax.named_scope(f"layer{number}"):
            x = jnp.tanh(x @ weight)
    return (x * x).mean()


def own_calls(layers, select):
    """The number of calls of Tailrace's functions in the first step of a model of that many layers."""
    params = [np.eye(3, dtype=np.float32)] * layers
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), params, observe=[tr.Tap(select)])
    profile = cProfile.Profile()
    profile.enable()
    trainer.fit([np.ones((2, 3), np.float32)], steps=1)
    profile.disable()
    found = pstats.Stats(profile).stats.items()
    return sum(row[1] for (file, _, _), row in found if "tailrace" in file)


@pytest.mark.parametrize("select", ["grad/*", "*"])
def test_calls_grow_with_the_layers(select):
    own_calls(2, select)  # what is done once in a process
    few, some, many = (own_calls(n, select) for n in (5, 10, 20))
    # The second difference of a straight line is nothing; that of one look at all taps for each
    # equation was many times this.
    assert abs((many - some) - 2 * (some - few)) < 0.1 * (many - some)
