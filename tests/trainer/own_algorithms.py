"""Training steps that a loss and an optimizer cannot say, as people write them; tiny.

Each is (step_fn, state, data): data is None for a step that needs none.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr


class Case(NamedTuple):
    """A step, the state that it starts from, and its data."""

    step: Any
    state: Any
    data: Any


def dense(key, sizes):
    """Weights of a small network."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) * 0.3, "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def apply(layers, x):
    """The network's output."""
    for number, layer in enumerate(layers):
        with jax.named_scope(f"dense{number}"):
            x = x @ layer["w"] + layer["b"]
            x = jnp.tanh(x) if number + 1 < len(layers) else x
    return x


def rows(count=12, size=4, features=2, seed=0):
    """Elements of one array."""
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(size, features)).astype(np.float32) for _ in range(count)]


def pairs(count=12, size=4, seed=0):
    """Elements of inputs and targets."""
    return [(x, np.sin(x.sum(axis=1, keepdims=True))) for x in rows(count, size, seed=seed)]


def mse(params, x, y):
    """A loss."""
    return ((apply(params, x) - y) ** 2).mean()


def gan():
    """Two networks that train alternately, with an optimizer each."""
    g_opt, d_opt = optax.adam(1e-2), optax.inject_hyperparams(optax.adam)(learning_rate=2e-2)
    g, d = dense(jax.random.key(0), (2, 4, 2)), dense(jax.random.key(1), (2, 4, 1))

    def step(state, real):
        key, noise_key = jax.random.split(state["key"])
        noise = jax.random.normal(noise_key, real.shape)

        def d_loss(d):
            fake = apply(d, apply(state["g"], noise))
            return (jax.nn.softplus(-apply(d, real)) + jax.nn.softplus(fake)).mean()

        d_value, d_grads = jax.value_and_grad(d_loss)(state["d"])
        updates, d_opt_state = d_opt.update(d_grads, state["d_opt"])
        d = optax.apply_updates(state["d"], updates)

        def g_loss(g):
            with jax.named_scope("judged"):
                return jax.nn.softplus(-apply(d, apply(g, noise))).mean()

        g_value, g_grads = jax.value_and_grad(g_loss)(state["g"])
        g_grads = tr.mark(g_grads, "grad/generator")
        updates, g_opt_state = g_opt.update(g_grads, state["g_opt"])
        after = {
            "g": optax.apply_updates(state["g"], updates),
            "d": d,
            "g_opt": g_opt_state,
            "d_opt": d_opt_state,
            "key": key,
        }
        return after, {"d_loss": d_value, "g_loss": g_value}

    state = {"g": g, "d": d, "g_opt": g_opt.init(g), "d_opt": d_opt.init(d)}
    return Case(step, {**state, "key": jax.random.key(7)}, rows())


def dp_sgd():
    """Per-example gradients, clipped and with noise."""
    opt = optax.chain(
        optax.contrib.differentially_private_aggregate(0.5, 0.3, key=jax.random.key(3)),
        optax.sgd(0.1),
    )
    params = dense(jax.random.key(0), (2, 1))

    def step(state, x, y):
        params, opt_state = state
        each = jax.vmap(jax.value_and_grad(mse), in_axes=(None, 0, 0))
        losses, grads = each(params, x[:, None], y[:, None])
        grads = tr.mark(grads, "grad/each")
        updates, opt_state = opt.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": losses.mean()}

    return Case(step, (params, opt.init(params)), pairs())


def lbfgs():
    """Quasi-Newton with a line search, which calls the loss again."""
    search = optax.scale_by_zoom_linesearch(max_linesearch_steps=4)
    opt = optax.lbfgs(memory_size=2, linesearch=search)
    params = dense(jax.random.key(0), (2, 1))

    def step(state, x, y):
        params, opt_state = state
        loss = functools.partial(mse, x=x, y=y)
        value, grads = optax.value_and_grad_from_state(loss)(params, state=opt_state)
        updates, opt_state = opt.update(
            grads, opt_state, params, value=value, grad=grads, value_fn=loss
        )
        return (optax.apply_updates(params, updates), opt_state), value

    return Case(step, (params, opt.init(params)), [pairs(1, 8)[0]] * 12)


def sam():
    """Two gradients a step: at the weights, and uphill of them."""
    opt = optax.sgd(0.1, momentum=0.9)
    params = dense(jax.random.key(0), (2, 3, 1))

    def step(state, x, y):
        params, opt_state = state
        grads = jax.grad(mse)(params, x, y)
        squares = sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))
        scale = 0.05 / (jnp.sqrt(squares) + 1e-6)
        uphill = jax.tree.map(lambda p, g: p + scale * g, params, grads)
        with jax.named_scope("uphill"):
            value, grads = jax.value_and_grad(mse)(uphill, x, y)
        updates, opt_state = opt.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    return Case(step, (params, opt.init(params)), pairs())


def lookahead():
    """Slow and fast weights of optax.lookahead."""
    opt = optax.lookahead(optax.sgd(0.1), sync_period=4, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(dense(jax.random.key(0), (2, 3, 1)))

    def step(state, x, y):
        params, opt_state = state
        value, grads = jax.value_and_grad(mse)(params.fast, x, y)
        updates, opt_state = opt.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    return Case(step, (params, opt.init(params)), pairs())


def dqn():
    """A replay buffer in the state, filled and drawn from by a random key in the state."""
    opt, size = optax.adam(1e-2), 16
    q = dense(jax.random.key(0), (2, 4, 2))

    def step(state, seen):
        key, which, explore = jax.random.split(state["key"], 3)
        greedy = apply(state["q"], seen).argmax(axis=1)
        chance = jax.random.randint(explore, greedy.shape, 0, 2)
        action = jnp.where(state["n"] % 2 == 0, chance, greedy)
        reward = jnp.where(action == (seen[:, 0] > 0), 1.0, 0.0)
        place = (state["n"] * len(seen) + jnp.arange(len(seen))) % size
        buffer = {
            "seen": state["buffer"]["seen"].at[place].set(seen),
            "action": state["buffer"]["action"].at[place].set(action),
            "reward": state["buffer"]["reward"].at[place].set(reward),
        }
        filled = jnp.minimum((state["n"] + 1) * len(seen), size)
        chosen = jax.random.randint(which, (8,), 0, filled)

        def loss_fn(q):
            values = apply(q, buffer["seen"][chosen])
            taken = jnp.take_along_axis(values, buffer["action"][chosen][:, None], axis=1)[:, 0]
            return ((taken - buffer["reward"][chosen]) ** 2).mean()

        value, grads = jax.value_and_grad(loss_fn)(state["q"])
        updates, opt_state = opt.update(grads, state["opt"])
        after = {
            "q": optax.apply_updates(state["q"], updates),
            "opt": opt_state,
            "buffer": buffer,
            "key": key,
            "n": state["n"] + 1,
        }
        return after, {"loss": value, "reward": reward.mean()}

    buffer = {
        "seen": jnp.zeros((size, 2)),
        "action": jnp.zeros(size, jnp.int32),
        "reward": jnp.zeros(size),
    }
    state = {"q": q, "opt": opt.init(q), "buffer": buffer, "key": jax.random.key(5), "n": 0}
    return Case(step, state, rows())


def ppo():
    """A point that is to reach the origin: environments, policy and value in one step, no data."""
    opt = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    net = dense(jax.random.key(0), (1, 4, 3))  # two actions and a value
    length = 5

    def heads(net, place):
        out = apply(net, place[:, None])
        return jax.nn.log_softmax(out[:, :2]), out[:, 2]

    def step(state):
        def act(carry, key):
            place, net = carry
            logp, value = heads(net, place)
            action = jax.random.categorical(key, logp)
            after = place + jnp.where(action == 0, -0.3, 0.3)
            reward = -jnp.abs(after)
            return (after, net), (
                place,
                action,
                logp[jnp.arange(len(place)), action],
                value,
                reward,
            )

        key, *keys = jax.random.split(state["key"], length + 1)
        (place, _), seen = jax.lax.scan(act, (state["place"], state["net"]), jnp.stack(keys))
        places, actions, before, values, rewards = seen
        returns = jnp.flip(jnp.cumsum(jnp.flip(rewards, 0), axis=0), 0)
        gain = returns - values

        def loss_fn(net):
            logp, value = heads(net, places.reshape(-1))
            now = jnp.take_along_axis(logp, actions.reshape(-1, 1), axis=1)[:, 0]
            ratio = jnp.exp(now - before.reshape(-1))
            clipped = jnp.clip(ratio, 0.8, 1.2)
            won = jnp.minimum(ratio * gain.reshape(-1), clipped * gain.reshape(-1))
            return ((value - returns.reshape(-1)) ** 2).mean() - won.mean()

        def epoch(carry, _):
            net, opt_state = carry
            value, grads = jax.value_and_grad(loss_fn)(net)
            updates, opt_state = opt.update(grads, opt_state)
            return (optax.apply_updates(net, updates), opt_state), value

        carry = (state["net"], state["opt"])
        (net, opt_state), losses = jax.lax.scan(epoch, carry, length=2)
        after = {"net": net, "opt": opt_state, "place": jnp.clip(place, -2.0, 2.0), "key": key}
        return after, {"loss": losses[-1], "reward": rewards.mean()}

    state = {"net": net, "opt": opt.init(net), "place": jnp.linspace(-1.0, 1.0, 4)}
    return Case(step, {**state, "key": jax.random.key(2)}, None)


def maml():
    """A gradient through the gradient step of an inner loop."""
    opt = optax.adam(1e-2)
    params = dense(jax.random.key(0), (2, 3, 1))

    def step(state, x, y):
        params, opt_state = state

        def task(params, x, y):
            inner = jax.grad(mse)(params, x[:2], y[:2])
            adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, inner)
            return mse(adapted, x[2:], y[2:])

        def meta(params):
            return jax.vmap(task, in_axes=(None, 0, 0))(params, x, y).mean()

        value, grads = jax.value_and_grad(meta)(params)
        updates, opt_state = opt.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"meta": value}

    data = [tuple(np.stack([leaf, leaf + 0.1]) for leaf in pair) for pair in pairs()]
    return Case(step, (params, opt.init(params)), data)


ALGORITHMS = {
    "gan": (gan, "cotangent/judged/*"),
    "dp_sgd": (dp_sgd, "grad/each/*"),
    "lbfgs": (lbfgs, "updated/*"),
    "sam": (sam, "activation/uphill/dense0*"),
    "lookahead": (lookahead, "updated/0/slow/*"),
    "dqn": (dqn, "state/buffer/*"),
    "ppo": (ppo, "state/place"),
    "maml": (maml, "aux/meta"),
}
"""Each algorithm, and a tap of it."""
