"""The classifier of mnist_with_feeds.py, with one call of the device for each step."""

import argparse
import time

import jax
import numpy as np

from mnist_with_feeds import create_dataset, create_model, loss_fn


@jax.jit
def training_step(model, images, labels):
    loss, grads = jax.value_and_grad(loss_fn)(model, images, labels)
    return jax.tree.map(lambda p, g: p - 0.01 * g, model, grads), loss


def main(steps=10_000):
    model, losses = create_model(), []
    started = time.perf_counter()
    for _, (images, labels) in zip(range(steps), create_dataset(), strict=False):
        model, loss = training_step(model, images, labels)
        losses.append(loss)
    losses = np.array(jax.device_get(losses))
    print(f"Time taken without infeed/outfeed queues: {time.perf_counter() - started:.2f} seconds")
    print(f"{steps:,} executions, {len(losses):,} losses, last {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    main(**vars(parser.parse_args()))
