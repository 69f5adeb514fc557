"""A small GPT of Equinox that writes digits: it reads an image row by row and guesses the next row.

The module is given to the trainer as it is: its arrays of floats are trained, the rest is static.
Dropout takes its keys from `tr.key()`; validation sees the module in inference mode.
"""

import argparse
import pathlib
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import tailrace as tr

ROWS, MASK = 28, jnp.tril(jnp.ones((28, 28), bool))


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(4, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        keys = jax.random.split(key)
        h = jax.vmap(self.norms[0])(x)
        x = x + self.dropout(self.attention(h, h, h, MASK), key=keys[0])
        return x + self.dropout(jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x)), key=keys[1])


class GPT(eqx.Module):
    embed: eqx.nn.Linear
    position: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, width, depth, key):
        keys = jax.random.split(key, depth + 3)
        self.embed = eqx.nn.Linear(ROWS, width, key=keys[0])
        self.position = 0.02 * jax.random.normal(keys[1], (ROWS, width))
        self.blocks = [Block(width, one) for one in keys[3:]]
        self.head = eqx.nn.Linear(width, ROWS, key=keys[2])

    def __call__(self, rows, key):
        before = jnp.pad(rows, ((1, 0), (0, 0)))[:-1]  # each row is guessed from those above it
        x = jax.vmap(self.embed)(before) + self.position
        for number, block in enumerate(self.blocks):
            x = block(x, jax.random.fold_in(key, number))
        return jax.vmap(self.head)(x)


def loss_fn(model, images):
    rows = images.astype(jnp.float32) / 255
    logits = jax.vmap(model)(rows, jax.random.split(tr.key(), len(rows)))
    return optax.sigmoid_binary_cross_entropy(logits, rows).mean()


def write(model, key):
    """A digit that the model makes up, row by row."""

    def row(number, image):
        chance = jax.nn.sigmoid(model(image, key)[number])
        dots = jax.random.bernoulli(jax.random.fold_in(key, number), chance)
        return image.at[number].set(dots.astype(jnp.float32))

    return jax.lax.fori_loop(0, ROWS, row, jnp.zeros((ROWS, ROWS)))


def main(steps=2000, width=64, depth=2, batch_size=32, folder=None):
    folder = pathlib.Path(folder or tempfile.mkdtemp())
    data = tr.batches(tr.data.digits("train")[0], batch_size, shuffle=True, repeat=True)
    model = GPT(width, depth, jax.random.key(0))
    tap = tr.Tap("grad/blocks/*/weight", mode=tr.every(10), reduce="norm")
    trainer = tr.Trainer(loss_fn, optax.adam(1e-3), model, observe=[tap], run_dir=folder / "run")
    held_out, keep = tr.batches(tr.data.digits("test")[0], 100), folder / "checkpoints"
    history = trainer.fit(data, steps=steps, validation_data=held_out, checkpoint=keep)
    tr.open_run(folder / "run").heatmap("grad/*").save(folder / "gradients.png")
    losses = (history.loss[0], history.loss[-1], history["val_loss"][-1])
    print("loss {:.3f} at first, {:.3f} at last, test {:.3f}".format(*losses))
    print(f"see {folder}: {len(trainer.records)} gradients, first {trainer.records.names[0]}")
    image = write(eqx.nn.inference_mode(trainer.model), jax.random.key(1))
    print("\n".join("".join(" #"[int(dot)] for dot in line) for line in image))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--folder", help="where run, checkpoints and picture go")
    main(**vars(parser.parse_args()))
