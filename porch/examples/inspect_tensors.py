"""Statistics of gradients and activations, printed once an epoch, chosen by filters.

A hand-written training loop with gradient accumulation: what is sent to an outfeed in the loop waits
on the host until the epoch ends. A filter is part of a name; `none` chooses everything.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import tailrace as tr
from tailrace.records.filtered_outfeed import MaybeOutfeedQueue
from tailrace.records.table import print_summary

LAYERS = {"Dense_256": (784, 256), "Dense_128": (256, 128), "Dense_10": (128, 10)}
BATCH_SIZE, MICROBATCHES, LEARNING_RATE = 32, 4, 0.01


def create_model(seed=0):
    random = np.random.default_rng(seed)
    return {
        name: {
            "kernel": random.normal(0, fan_in**-0.5, (fan_in, fan_out)).astype(np.float32),
            "bias": np.zeros(fan_out, np.float32),
        }
        for name, (fan_in, fan_out) in LAYERS.items()
    }


def create_dataset():
    return tr.batches(tr.data.digits("train"), BATCH_SIZE, shuffle=True, seed=0, repeat=True)


def loss_fn(params, activations, images, labels):
    x = images.reshape(len(images), -1).astype(jnp.float32) / 255
    for name in ("Dense_256", "Dense_128"):
        x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
        if name == "Dense_128":
            activations.maybe_outfeed("Dense_128_acts", x)
    x = jax.nn.softmax(x @ params["Dense_10"]["kernel"] + params["Dense_10"]["bias"])
    activations.maybe_outfeed("Dense_10_acts", x)
    activations.maybe_enqueue()  # in the function that collects: outside, none of it exists
    return -jnp.log(jnp.take_along_axis(x, labels[:, None], axis=1)).mean()


def outfeed_gradients(queue, grads):
    """The last layer first, as gradients are computed."""
    for layer in reversed(LAYERS):
        for kind in ("bias", "kernel"):
            queue.maybe_outfeed(f"{layer}/{kind}:0_grad", grads[layer][kind])
    queue.maybe_enqueue()


def training_program(batches, gradients, activations, before_accumulation):
    """One epoch; returns the program and its infeed."""
    infeed = tr.InfeedQueue(create_dataset())

    def step(params):
        def microbatch(total, images, labels):
            grads = jax.grad(loss_fn)(params, activations, images, labels)
            if before_accumulation:
                outfeed_gradients(gradients, grads)
            return jax.tree.map(jnp.add, total, grads)

        zeros = jax.tree.map(jnp.zeros_like, params)
        total = tr.repeat(MICROBATCHES, microbatch, zeros, infeed=infeed)
        if not before_accumulation:
            outfeed_gradients(gradients, total)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, total)

    return tr.compile(lambda params: tr.repeat(batches // MICROBATCHES, step, params)), infeed


def main(
    steps_per_epoch=500,
    epochs=3,
    gradients_filters=("Dense_128",),
    activations_filters=("none",),
    outfeed_pre_accumulated_gradients=False,
):
    gradients = MaybeOutfeedQueue(filters=list(gradients_filters))
    activations = MaybeOutfeedQueue(filters=list(activations_filters))
    program, infeed = training_program(
        steps_per_epoch, gradients, activations, outfeed_pre_accumulated_gradients
    )
    params, shapes = create_model(), {}
    with infeed:
        for epoch in range(epochs):
            params = program(params)
            for name, queue in (
                ("Gradients callback", gradients),
                ("Multi-layer activations callback", activations),
            ):
                data = queue.maybe_dequeue()
                print_summary(name, data, epoch)
                shapes |= {key: array.shape for key, array in (data or {}).items()}
    return shapes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps-per-epoch", type=int, default=500, help="batches of an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gradients-filters", nargs="*", default=["Dense_128"])
    parser.add_argument("--activations-filters", nargs="*", default=["none"])
    parser.add_argument("--outfeed-pre-accumulated-gradients", action="store_true")
    main(**vars(parser.parse_args()))
