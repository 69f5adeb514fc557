"""A Flax Linen network with BatchNorm and Dropout: its variables are given to the trainer.

Of the collections, "params" is trained and "batch_stats" goes from step to step: the loss function
returns what `model.apply` says has changed. `tr.training()` tells a step from an evaluation. Started
again with the same folder, a script that was killed goes on.
"""

import argparse
import pathlib
import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import tailrace as tr


class Network(nn.Module):
    """Two hidden layers."""

    @nn.compact
    def __call__(self, images, train):
        x = images.reshape(len(images), -1).astype(jnp.float32) / 255
        for number, features in enumerate((128, 64)):
            x = nn.Dense(features, name=f"hidden{number}")(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, name=f"norm{number}")(x))
            x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10, name="head")(x)


MODEL = Network()


def loss_fn(variables, images, labels):
    train = tr.training()
    keys = {"dropout": tr.key()} if train else {}
    logits, updates = MODEL.apply(variables, images, train, rngs=keys, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (updates, {"accuracy": (logits.argmax(-1) == labels).mean()})


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
    images, labels = tr.data.digits("test")
    trainer = tr.Trainer(
        loss_fn,
        optax.adam(1e-3),
        MODEL.init(jax.random.key(0), images[:1], False),
        observe=[tr.Tap("activation/hidden*", mode=tr.every(20))],
        run_dir=folder / "run",
    )
    keep = folder / "checkpoints"
    trainer.fit(train, epochs=epochs, validation_data=test, checkpoint=keep, callbacks=[Report()])
    tr.open_run(folder / "run").heatmap("activation/hidden?").save(folder / "activations.png")
    for name in trainer.records.names:
        if ":" not in name:  # what layers return, without each operation in them
            print(f"{name}: standard deviation {trainer.records[name].values['std'][-1]:.3f}")
    logits = MODEL.apply(trainer.model, images[:10], False)  # all collections, as trained
    print("predicted", logits.argmax(-1).tolist(), "of", labels[:10].tolist())
    print(f"see {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--folder", help="where run, checkpoints and picture go")
    main(**vars(parser.parse_args()))
