"""A small GPT in plain JAX on the characters of its own documentation.

Parameters are a dict, the model is a function. Validation, checkpoints, a learning rate schedule in
the history and a picture of the gradients are arguments of the trainer and of `fit`.
"""

import argparse
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr

LENGTH, WIDTH, HEADS, DEPTH = 32, 64, 4, 2


def text():
    """All characters of this project's pages, as numbers."""
    root = pathlib.Path(__file__).parents[1]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    raw = b"".join(page.read_bytes() for page in pages)
    return np.minimum(np.frombuffer(raw, np.uint8), 127).astype(np.int32)


def init(key):
    def normal(*shape):
        nonlocal key
        key, used = jax.random.split(key)
        return 0.02 * jax.random.normal(used, shape)

    def block():
        return {
            "norm": jnp.ones((2, WIDTH)),
            "qkv": normal(WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": normal(HEADS, WIDTH // HEADS, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        }

    blocks = {str(number): block() for number in range(DEPTH)}
    return {"token": normal(128, WIDTH), "place": normal(LENGTH, WIDTH), "blocks": blocks}


def normed(x, scale):
    return x * scale / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def loss_fn(params, ids):
    before, after = ids[:, :-1], ids[:, 1:]
    x = params["token"][before] + params["place"]
    for name, p in params["blocks"].items():
        with jax.named_scope(f"block{name}"):
            q, k, v = jnp.moveaxis(
                jnp.einsum("btd,dshe->btshe", normed(x, p["norm"][0]), p["qkv"]), 2, 0
            )
            h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + jnp.einsum("bthe,hed->btd", h, p["out"])
            x = x + jax.nn.gelu(normed(x, p["norm"][1]) @ p["up"]) @ p["down"]
    logits = x @ params["token"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, after)
    return losses.mean(), {"accuracy": (logits.argmax(-1) == after).mean()}


def main(steps=2000, batch_size=16, folder=None):
    folder = pathlib.Path(folder or tempfile.mkdtemp())
    ids = text()
    rows = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    train = tr.batches(rows[:-256], batch_size, shuffle=True, repeat=True)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    trainer = tr.Trainer(
        loss_fn,
        optax.inject_hyperparams(optax.adamw)(learning_rate=schedule),
        init(jax.random.key(0)),
        observe=[tr.Tap("grad/*", mode=tr.every(10), reduce="histogram")],
        log=["learning_rate", "grad_norm", "tokens_per_second"],
        run_dir=folder / "run",
    )
    history = trainer.fit(
        train,
        steps=steps,
        validation_data=tr.batches(rows[-256:], 64),
        validation_every=max(1, steps // 4),
        checkpoint=folder / "checkpoints",
    )
    tr.open_run(folder / "run").histograms("grad/*").save(folder / "gradients.png")
    print(trainer)
    print(f"test loss {history['val_loss'][-1]:.3f} after {trainer.step} steps; see {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--folder", help="where run, checkpoints and picture go")
    main(**vars(parser.parse_args()))
