"""Stages that work on one microbatch at the same time, and a value that changes from call to call.

The image is read by two towers side by side, [stage0, [stage1a, stage1b], stage2, stage3], on devices
[0, [1, 2], 2, 3]. How strongly the loss smooths its labels is an input of the pipeline: it may
change with every fit, and nothing is compiled again. The pipeline is compared with the one in which
the towers follow each other.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from tailrace.data import digits

MICROBATCHES = 16


def normal(seed, *shape):
    return jax.nn.initializers.he_normal()(jax.random.key(seed), shape)


def stage0(p, smoothing, images, labels):
    x = images.reshape(-1, 784).astype(jnp.float32) / 255
    return jax.nn.relu(x @ p), smoothing, labels


def stage1a(p, x, smoothing, labels):
    return jax.nn.relu(x @ p), smoothing, labels


def stage1b(p, x, smoothing, labels):
    return jnp.tanh(x @ p)


def stage2(p, left, smoothing, labels, right):
    """Gets what both members of stage 1 return, one after the other."""
    return jax.nn.relu(jnp.concatenate([left, right], axis=1) @ p), smoothing, labels


def stage3(p, x, smoothing, labels):
    return x @ p, smoothing, labels


def loss_fn(logits, smoothing, labels):
    target = optax.smooth_labels(jax.nn.one_hot(labels, 10), smoothing)
    return optax.softmax_cross_entropy(logits, target).mean()


def main(steps=40):
    tr.configure(devices=4)
    pipeline = tr.Pipeline(
        [stage0, [stage1a, stage1b], stage2, stage3],
        loss_fn,
        accumulation=MICROBATCHES,
        device_mapping=[0, [1, 2], 2, 3],
        inputs=(np.float32(0.2),),
    )
    params = [
        normal(0, 784, 64),
        [normal(1, 64, 32), normal(2, 64, 16)],
        normal(3, 48, 32),
        normal(4, 32, 10),
    ]
    trainer = tr.Trainer(pipeline, optax.adam(0.003), params, steps_per_execution=steps)
    data = tr.batches(digits("train"), 16, shuffle=True, repeat=True)
    for smoothing in (0.2, 0.1, 0.0):
        history = trainer.fit(data, steps=steps, inputs=(np.float32(smoothing),), progress=False)
        print(f"smoothing {smoothing}: loss {history.loss[0]:.3f} -> {history.loss[-1]:.3f}")
    check = tr.verify(pipeline, params, next(iter(data)), optimizer=optax.sgd(0.1))
    print(f"equal to the plain step: {check.within(1e-6)}")
    side_by_side = tr.plan([1, 2, 1, 1], 40, device_mapping=[0, [1, 2], 3, 4])
    in_a_row = side_by_side.serialised()
    print(f"side by side: stash of {side_by_side.stash_total}, bubble {side_by_side.bubble:.1%}")
    print(f"in a row:     stash of {in_a_row.stash_total}, bubble {in_a_row.bubble:.1%}")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    main(**vars(parser.parse_args()))
