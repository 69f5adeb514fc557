"""A small regression, and the hand-written scan that trains it: what every length must equal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

ROWS = np.random.default_rng(0).normal(size=(96, 4, 3)).astype(np.float32)


def loss_fn(w, x):
    return jnp.mean((jnp.tanh(x @ w["a"]) - w["b"]) ** 2)


def params():
    return {"a": np.full((3, 2), 0.3, np.float32), "b": np.zeros(2, np.float32)}


def plain(steps, rows=ROWS):
    """The hand-written scan over the same rows: parameters, losses, gradients."""
    optimizer = optax.sgd(0.05, momentum=0.9)

    def step(state, x):
        w, held = state
        loss, grads = jax.value_and_grad(loss_fn)(w, x)
        updates, held = optimizer.update(grads, held, w)
        return (optax.apply_updates(w, updates), held), (loss, grads)

    w = jax.tree.map(jnp.asarray, params())
    scan = jax.jit(lambda state, xs: lax.scan(step, state, xs))
    (w, _), (losses, grads) = scan((w, optimizer.init(w)), rows[:steps])
    return w, np.asarray(losses), jax.tree.map(np.asarray, grads)
