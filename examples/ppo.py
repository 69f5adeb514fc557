"""PPO on pendulums that are part of the step: it plays and learns without leaving the device.

There is no data: `fit(None, steps=...)`. The state has the network, its optimizer, and where each
pendulum is: [angle from the top, speed]. A step plays all of them for a while and learns from that.
"""

import argparse
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax

import tailrace as tr

ENVS, LENGTH, EPOCHS, GAMMA = 64, 32, 8, 0.95
OPTIMIZER = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(3e-3))
PUSHES = jnp.array([-5.0, 0.0, 5.0])


def started(key):
    return jax.random.uniform(key, (ENVS, 2), minval=-1, maxval=1) * jnp.array([jnp.pi, 1])


def moved(place, action):
    angle, speed = place[..., 0], place[..., 1]
    speed = jnp.clip(speed + 0.05 * (15 * jnp.sin(angle) + 3 * PUSHES[action]), -8, 8)
    angle = (angle + 0.05 * speed + jnp.pi) % (2 * jnp.pi) - jnp.pi
    return jnp.stack([angle, speed], -1), -0.1 * angle**2 - 0.01 * speed**2


def heads(net, place):
    angle, speed = place[..., :1], place[..., 1:]
    x = jnp.tanh(jnp.concatenate([jnp.cos(angle), jnp.sin(angle), speed / 8], -1) @ net["body"])
    out = x @ net["heads"]
    return jax.nn.log_softmax(out[..., :3]), out[..., 3]


def step(state):
    def play(place, key):
        logits, value = heads(state["net"], place)
        action = jax.nn.one_hot(jax.random.categorical(key, logits), 3)
        after, reward = moved(place, action.argmax(-1))
        return after, (place, action, (logits * action).sum(-1), value, reward)

    last, seen = jax.lax.scan(play, state["places"], jax.random.split(tr.key(), LENGTH))
    places, actions, before, values, rewards = seen
    worth = heads(state["net"], last)[1]
    _, returns = jax.lax.scan(lambda r, x: (x + GAMMA * r,) * 2, worth, rewards, reverse=True)
    gains = returns - values
    gains = (gains - gains.mean()) / (gains.std() + 1e-6)

    def loss_fn(net):
        logits, value = heads(net, places)
        ratio = jnp.exp((logits * actions).sum(-1) - before)
        won = jnp.minimum(ratio * gains, jnp.clip(ratio, 0.8, 1.2) * gains).mean()
        order = (jnp.exp(logits) * logits).sum(-1).mean()
        return 0.2 * ((value - returns) ** 2).mean() - won + 0.01 * order

    def epoch(carry, _):
        net, opt = carry
        loss, grads = jax.value_and_grad(loss_fn)(net)
        updates, opt = OPTIMIZER.update(tr.mark(grads, "grad"), opt)
        return (optax.apply_updates(net, updates), opt), loss

    (net, opt), losses = jax.lax.scan(epoch, (state["net"], state["opt"]), length=EPOCHS)
    return {"net": net, "opt": opt, "places": last}, {"loss": losses[-1], "reward": rewards.mean()}


def earned(state, places):
    def play(place, _):
        return moved(place, heads(state["net"], place)[0].argmax(-1))

    return {"reward": jax.lax.scan(play, places, length=100)[1].mean()}


def main(steps=200, folder=None):
    folder = pathlib.Path(folder or tempfile.mkdtemp())
    keys = jax.random.split(jax.random.key(0), 3)
    net = {"body": jax.random.normal(keys[0], (3, 64)), "heads": jnp.zeros((64, 4))}
    state = {"net": net, "opt": OPTIMIZER.init(net), "places": started(keys[1])}
    tap = tr.Tap("grad/*", mode=tr.every(5), reduce="norm")
    trainer = tr.Trainer.from_step(
        step, state, eval_fn=earned, observe=[tap], run_dir=folder / "run"
    )
    held_out, kept = [started(keys[2])], folder / "checkpoints"
    history = trainer.fit(None, steps=steps, validation_data=held_out, checkpoint=kept)
    tr.open_run(folder / "run").heatmap("grad/*").save(folder / "gradients.png")
    print(f"reward {history['reward'][0]:.3f} at first, {history['reward'][-1]:.3f} at last")
    print(f"greedy {history['val_reward'][-1]:.3f}")
    print(f"see {folder}: {', '.join(trainer.records.names)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", help="where run, checkpoints and picture go")
    main(**vars(parser.parse_args()))
