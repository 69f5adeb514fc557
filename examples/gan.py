"""A GAN that learns to write digits: two networks, two optimizers, one step.

The step is an ordinary function of a state and a batch, as in a loop of one's own. The trainer around
it keeps the history of both losses, validates, observes gradients and writes checkpoints.
"""

import argparse
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax

import tailrace as tr

PIXELS, NOISE = 784, 32
G_OPT, D_OPT = optax.adam(2e-4, b1=0.5), optax.adam(2e-4, b1=0.5)


def dense(key, *sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    layers = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return {
        f"dense{number}": {"w": jax.random.normal(k, (m, n)) / m**0.5, "b": jnp.zeros(n)}
        for number, (k, m, n) in enumerate(layers)
    }


def apply(layers, x):
    for number, (name, layer) in enumerate(layers.items()):
        with jax.named_scope(name):
            x = jax.nn.leaky_relu(x, 0.2) if number else x
            x = x @ layer["w"] + layer["b"]
    return x


def generated(g, noise):
    return jnp.tanh(apply(g, noise))


def pixels(images):
    return images.reshape(len(images), PIXELS).astype(jnp.float32) / 127.5 - 1


def judged(d, real, fake):
    """The loss of the discriminator: real images are 1, generated ones are 0."""
    return (jax.nn.softplus(-apply(d, real)) + jax.nn.softplus(apply(d, fake))).mean()


def step(state, images):
    real = pixels(images)
    noise = jax.random.normal(tr.key(), (len(real), NOISE))

    fake = generated(state["g"], noise)
    d_loss, grads = jax.value_and_grad(judged)(state["d"], real, fake)
    grads = tr.mark(grads, "grad/d")
    updates, d_opt = D_OPT.update(grads, state["d_opt"])
    d = optax.apply_updates(state["d"], updates)

    def fools(g):
        return jax.nn.softplus(-apply(d, generated(g, noise))).mean()

    g_loss, grads = jax.value_and_grad(fools)(state["g"])
    grads = tr.mark(grads, "grad/g")
    updates, g_opt = G_OPT.update(grads, state["g_opt"])
    g = optax.apply_updates(state["g"], updates)
    return {"g": g, "d": d, "g_opt": g_opt, "d_opt": d_opt}, {"g_loss": g_loss, "d_loss": d_loss}


def main(steps=5000, batch_size=64, folder=None):
    folder = pathlib.Path(folder or tempfile.mkdtemp())
    g, d = dense(jax.random.key(0), NOISE, 128, PIXELS), dense(jax.random.key(1), PIXELS, 128, 1)
    trainer = tr.Trainer.from_step(
        step,
        {"g": g, "d": d, "g_opt": G_OPT.init(g), "d_opt": D_OPT.init(d)},
        eval_fn=lambda state, images: {"found": (apply(state["d"], pixels(images)) > 0).mean()},
        observe=[tr.Tap("grad/*", mode=tr.every(10), reduce="norm")],
        on_nonfinite="stop",
        run_dir=folder / "run",
    )
    data = tr.batches(tr.data.digits("train")[0], batch_size, shuffle=True, repeat=True)
    held_out = tr.batches(tr.data.digits("test")[0], 100)
    history = trainer.fit(
        data, steps=steps, validation_data=held_out, checkpoint=folder / "checkpoints"
    )
    tr.open_run(folder / "run").heatmap("grad/*").save(folder / "gradients.png")
    print(f"generator {history['g_loss'][-1]:.3f}, discriminator {history['d_loss'][-1]:.3f}")
    print(f"test images that pass for real: {history['val_found'][-1]:.2f}")
    print(f"see {folder}: {', '.join(trainer.records.names)}")
    image = generated(trainer.state["g"], jax.random.normal(jax.random.key(2), (1, NOISE)))
    print("\n".join("".join(" #"[int(dot > 0)] for dot in line) for line in image.reshape(28, 28)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--folder", help="where run, checkpoints and picture go")
    main(**vars(parser.parse_args()))
