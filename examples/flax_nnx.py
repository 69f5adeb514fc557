"""A convnet of Flax NNX, with BatchNorm and Dropout, given to the trainer as it is.

The module is trained where parameters would be: its `nnx.Param`s by the optimizer, the statistics of
BatchNorm by the model itself, Dropout with new keys for every step. `evaluate` and `predict` see the
module in evaluation mode. Started again with the same folder, a script that was killed goes on.
"""

import argparse
import pathlib
import tempfile

import jax.numpy as jnp
import optax
from flax import nnx

import tailrace as tr


class Block(nnx.Module):
    def __init__(self, features_in, features_out, rngs):
        self.conv = nnx.Conv(features_in, features_out, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(features_out, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.conv(x)))


class Convnet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(1, 8, rngs), Block(8, 16, rngs)])
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.head = nnx.Linear(7 * 7 * 16, 10, rngs=rngs)

    def __call__(self, images):
        x = images[..., None].astype(jnp.float32) / 255
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.reshape(len(x), -1)))


def loss_fn(model, images, labels):
    logits = model(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"accuracy": (logits.argmax(-1) == labels).mean()}


class Report(tr.Callback):
    """A line an epoch."""

    def on_epoch_end(self, trainer, epoch, logs):
        print(
            f"epoch {epoch}: loss {logs['loss']:.3f}, test loss {logs['val_loss']:.3f}, "
            f"test accuracy {logs['val_accuracy']:.3f}"
        )


def main(epochs=5, batch_size=50, folder=None):
    folder = pathlib.Path(folder or tempfile.mkdtemp())
    train = tr.batches(tr.data.digits("train"), batch_size, shuffle=True)
    test = tr.batches(tr.data.digits("test"), batch_size)
    trainer = tr.Trainer(
        loss_fn,
        optax.adam(2e-3),
        Convnet(nnx.Rngs(0)),
        observe=[tr.Tap("grad/*/kernel", mode=tr.every(20), reduce="norm")],
        run_dir=folder / "run",
    )
    keep = folder / "checkpoints"
    trainer.fit(train, epochs=epochs, validation_data=test, checkpoint=keep, callbacks=[Report()])
    tr.open_run(folder / "run").heatmap("grad/*").save(folder / "gradients.png")
    for name in trainer.records.names:
        record = trainer.records[name]
        print(f"{name}: norm {record.values[-1]:.4f} at step {record.steps[-1]}")
    model = trainer.model  # the module with what was learned; the one that was given is unchanged
    model.eval()
    images, labels = tr.data.digits("test")
    print("predicted", model(images[:10]).argmax(-1).tolist(), "of", labels[:10].tolist())
    print(f"see {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--folder", help="where run, checkpoints and picture go")
    main(**vars(parser.parse_args()))
