"""A classifier 784-256-128-64-32-10 on one device, and as a pipeline on two.

Cut in two ways (a mark inside one function; a list of stage functions) and run by each schedule.
All of them compute the same: a pipeline changes where and when, never what. On a CPU the devices
are virtual.
"""

import argparse
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from tailrace.data import digits

WIDTHS = (784, 256, 128, 64, 32, 10)
ASSIGNMENT = (0, 0, 1, 1, 1)  # the stage of each layer
BATCH_SIZE, MICROBATCHES = 32, 4


def create_dataset():
    return tr.batches(digits("train"), BATCH_SIZE, shuffle=True, repeat=True)


def create_params():
    keys = jax.random.split(jax.random.key(0), len(WIDTHS) - 1)
    normal = jax.nn.initializers.he_normal()
    return [
        {"kernel": normal(key, shape), "bias": jnp.zeros(shape[1])}
        for key, shape in zip(keys, itertools.pairwise(WIDTHS), strict=True)
    ]


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def one_function(params, images, labels):
    """The whole model, with a mark where the second stage begins; without a pipeline it is nothing."""
    x = images.reshape(-1, 784).astype(jnp.float32) / 255
    x = jax.nn.relu(dense(params[0], x))
    x = jax.nn.relu(dense(params[1], x))
    x = tr.stage_boundary(x)
    x = jax.nn.relu(dense(params[2], x))
    x = jax.nn.relu(dense(params[3], x))
    return cross_entropy(dense(params[4], x), labels)


def stage0(params, images, labels):
    x = images.reshape(-1, 784).astype(jnp.float32) / 255
    for p in params:
        x = jax.nn.relu(dense(p, x))
    return x, labels  # what a later stage needs is handed on


def stage1(params, x, labels):
    for p in params[:-1]:
        x = jax.nn.relu(dense(p, x))
    return dense(params[-1], x), labels


def train(name, loss_fn, params, steps, **options):
    optimizer = optax.sgd(0.01, momentum=0.9)
    trainer = tr.Trainer(loss_fn, optimizer, params, steps_per_execution=min(steps, 50), **options)
    started = time.perf_counter()
    history = trainer.fit(create_dataset(), steps=steps, progress=False)
    seconds = time.perf_counter() - started
    print(f"{name:24} loss {history.loss[0]:.4f} -> {history.loss[-1]:.4f} in {seconds:.1f} s")
    return history.loss


def main(steps=100):
    tr.configure(devices=2)
    params = create_params()
    by_stage = [[p for p, s in zip(params, ASSIGNMENT, strict=True) if s == n] for n in (0, 1)]
    losses = [train("one device", one_function, params, steps, accumulation=MICROBATCHES)]
    for schedule in tr.PipelineSchedule:
        pipeline = tr.Pipeline(
            [stage0, stage1], cross_entropy, accumulation=MICROBATCHES, schedule=schedule
        )
        losses.append(train(f"two stages, {schedule}", pipeline, by_stage, steps))
    pipeline = tr.Pipeline(one_function, accumulation=MICROBATCHES)
    losses.append(train("one function, grouped", pipeline, params, steps))
    largest = max(float(np.abs(each - losses[0]).max()) for each in losses)
    print(f"largest difference between the losses: {largest:.1e}")
    print(tr.plan(stages=2, microbatches=MICROBATCHES))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    main(**vars(parser.parse_args()))
