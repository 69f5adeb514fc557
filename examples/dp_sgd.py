"""Digits learned with differential privacy: the gradient of each example is clipped, and noise added.

The gradients of single examples are what an ordinary trainer never has; here they are a `jax.vmap` in
the step. How many of them were clipped is a metric, and their norms are tapped.
"""

import argparse
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax

import tailrace as tr

CLIP, NOISE = 1.0, 0.8
OPTIMIZER = optax.sgd(0.5, momentum=0.9)


def logits(params, images):
    x = images.reshape(*images.shape[:-2], 784).astype(jnp.float32) / 255
    with jax.named_scope("hidden"):
        x = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    with jax.named_scope("out"):
        return x @ params["out"]["w"] + params["out"]["b"]


def loss_fn(params, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, image), label)


def norm_of(tree):
    return jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree)))


def private(grads, key):
    """The mean of clipped gradients, with noise of the size of one of them."""
    norms = tr.mark(jax.vmap(norm_of)(grads), "norm/example")
    scale = jnp.minimum(1, CLIP / norms)
    leaves, structure = jax.tree.flatten(grads)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        (
            jnp.einsum("i...,i->...", leaf, scale)
            + NOISE * CLIP * jax.random.normal(k, leaf.shape[1:])
        )
        / len(scale)
        for k, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, noisy), (norms > CLIP).mean()


def step(state, images, labels):
    each = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0, 0))
    losses, grads = each(state["params"], images, labels)
    grads, clipped = private(grads, tr.key())
    updates, opt = OPTIMIZER.update(tr.mark(grads, "grad"), state["opt"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, {"loss": losses.mean(), "clipped": clipped}


def accuracy(state, images, labels):
    return {"accuracy": (logits(state["params"], images).argmax(-1) == labels).mean()}


def main(steps=600, batch_size=200, folder=None):
    folder = pathlib.Path(folder or tempfile.mkdtemp())
    keys = jax.random.split(jax.random.key(0))
    params = {
        "hidden": {"w": jax.random.normal(keys[0], (784, 32)) / 28, "b": jnp.zeros(32)},
        "out": {"w": jax.random.normal(keys[1], (32, 10)) / 6, "b": jnp.zeros(10)},
    }
    trainer = tr.Trainer.from_step(
        step,
        {"params": params, "opt": OPTIMIZER.init(params)},
        eval_fn=accuracy,
        observe=[tr.Tap("grad/*", mode=tr.every(10), reduce="norm"), "norm/example"],
        run_dir=folder / "run",
    )
    data = tr.batches(tr.data.digits("train"), batch_size, shuffle=True, repeat=True)
    held_out, kept = tr.batches(tr.data.digits("test"), 100), folder / "checkpoints"
    history = trainer.fit(data, steps=steps, validation_data=held_out, checkpoint=kept)
    tr.open_run(folder / "run").heatmap("grad/*").save(folder / "gradients.png")
    norms = trainer.records["norm/example"].values[-1]
    print(f"loss {history.loss[0]:.3f} at first, {history.loss[-1]:.3f} at last")
    print(f"clipped {history['clipped'][-1]:.2f} of the examples, norms up to {norms['max']:.2f}")
    print(f"test accuracy {history['val_accuracy'][-1]:.3f}; see {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", help="where run, checkpoints and picture go")
    main(**vars(parser.parse_args()))
