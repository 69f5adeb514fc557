"""A classifier trained in a loop on the device, with the loop, the step and the feeds by hand.

Compare with mnist_without_feeds.py: the same model, one call of the device for each step.
"""

import argparse
import time

import jax
import jax.numpy as jnp

import tailrace as tr
from tailrace.data import digits


def create_dataset():
    return tr.batches(digits("train"), 32, shuffle=True, repeat=True)


def create_model():
    keys = jax.random.split(jax.random.key(0))
    normal = jax.nn.initializers.he_normal()
    return [
        (normal(keys[0], (784, 128)), jnp.zeros(128)),
        (normal(keys[1], (128, 10)), jnp.zeros(10)),
    ]


def loss_fn(model, images, labels):
    (w1, b1), (w2, b2) = model
    x = images.reshape(-1, 784).astype(jnp.float32) / 255
    logits = jax.nn.relu(x @ w1 + b1) @ w2 + b2
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


def main(steps=10_000, steps_per_execution=250):
    infeed = tr.InfeedQueue(create_dataset())
    outfeed = tr.OutfeedQueue()

    def training_step(model, images, labels):
        loss, grads = jax.value_and_grad(loss_fn)(model, images, labels)
        outfeed.enqueue(loss)
        return jax.tree.map(lambda p, g: p - 0.01 * g, model, grads)

    @tr.compile
    def training_loop(model):
        return tr.repeat(steps_per_execution, training_step, model, infeed=infeed)

    model = create_model()
    started = time.perf_counter()
    with infeed:
        for _ in range(0, steps, steps_per_execution):
            model = training_loop(model)
    losses = outfeed.dequeue()
    print(f"Time taken using infeed/outfeed queues: {time.perf_counter() - started:.2f} seconds")
    print(f"{training_loop.executions} executions, {len(losses):,} losses, last {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--steps-per-execution", type=int, default=250)
    main(**vars(parser.parse_args()))
