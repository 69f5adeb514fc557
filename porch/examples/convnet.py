"""A convnet in plain JAX on digits: validation, early stopping, checkpoints and a picture.

Started again with the same folder, a script that was killed goes on where it was; a finished one prints
its end at once.
"""

import argparse
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax

import tailrace as tr


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "conv0": {"w": jax.random.normal(keys[0], (3, 3, 1, 16)) / 3, "b": jnp.zeros(16)},
        "conv1": {"w": jax.random.normal(keys[1], (3, 3, 16, 32)) / 12, "b": jnp.zeros(32)},
        "head": {"w": jax.random.normal(keys[2], (7 * 7 * 32, 10)) / 40, "b": jnp.zeros(10)},
    }


def model(params, images):
    x = images[..., None].astype(jnp.float32) / 255
    for name in ("conv0", "conv1"):
        with jax.named_scope(name):
            kind = ("NHWC", "HWIO", "NHWC")
            w, b = params[name]["w"], params[name]["b"]
            x = jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=kind) + b
            x = jax.nn.relu(x)
    x = x.reshape(len(x), -1)
    if tr.training():  # dropout
        x = jnp.where(jax.random.bernoulli(tr.key(), 0.8, x.shape), x / 0.8, 0)
    return x @ params["head"]["w"] + params["head"]["b"]


def loss_fn(params, images, labels):
    logits = model(params, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"accuracy": (logits.argmax(-1) == labels).mean()}


def main(epochs=10, batch_size=50, folder=None):
    folder = pathlib.Path(folder or tempfile.mkdtemp())
    trainer = tr.Trainer(
        loss_fn,
        optax.adamw(2e-3),
        init(jax.random.key(0)),
        observe=[tr.Tap(["grad/*", "activation/conv?"], mode=tr.every(10))],
        log=["grad_norm", "examples_per_second"],
        config={"data": "digits", "batch_size": batch_size},
        run_dir=folder / "run",
    )
    history = trainer.fit(
        tr.batches(tr.data.digits("train"), batch_size, shuffle=True),
        epochs=epochs,
        validation_data=tr.batches(tr.data.digits("test"), 100),
        checkpoint=folder / "checkpoints",
        callbacks=[tr.callbacks.EarlyStopping("val_loss", patience=2, restore_best=True)],
    )
    tr.open_run(folder / "run").heatmap(["grad/*", "activation/*"]).save(folder / "layers.png")
    print(trainer)
    print(f"test accuracy {history['val_accuracy'].max():.3f}; see {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", help="where run, checkpoints and picture go")
    main(**vars(parser.parse_args()))
