"""One step over many examples: microbatches one after the other, replicas side by side.

The effective batch size is microbatch size x microbatches x replicas. However the examples of a
step are split up, the step is the same, up to rounding. On a CPU the replicas are virtual devices.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr

EXAMPLES = 64  # in a step, however they are split


def make_data(examples=8192):
    random = np.random.default_rng(0)
    x = random.normal(size=(examples, 16)).astype(np.float32)
    return x, (x @ random.normal(size=16)).astype(np.float32)


def loss_fn(w, x, y):
    return ((x @ w - y) ** 2).mean()


def with_trainer(data, steps, microbatches, replicas):
    size = EXAMPLES // (microbatches * replicas)
    accumulation = tr.Accumulation(microbatches, dtype=jnp.float32, reduction="mean")
    trainer = tr.Trainer(
        loss_fn, optax.sgd(0.05), jnp.zeros(16), accumulation=accumulation, replicas=replicas
    )
    history = trainer.fit(tr.batches(data, size, repeat=True), steps=steps)
    print(
        f"{microbatches} microbatches x {replicas} replicas x {size:2} examples = effective batch "
        f"size {microbatches * replicas * size}: loss {history.loss[-1]:.2e}"
    )
    return np.asarray(trainer.params), history


def by_hand(data, steps, replicas):
    """The loop of a replicated program: the gradient is averaged before it is used."""
    infeed = tr.InfeedQueue(tr.batches(data, EXAMPLES // replicas, repeat=True))
    outfeed = tr.OutfeedQueue()

    def step(w, x, y):
        loss, grad = jax.value_and_grad(loss_fn)(w, x, y)
        outfeed.enqueue(loss)
        return w - 0.05 * tr.cross_replica_mean(grad)

    program = tr.compile(lambda w: tr.repeat(steps, step, w, infeed=infeed), replicas=replicas)
    with infeed:
        w = program(jnp.zeros(16))
    losses = outfeed.dequeue()
    print(f"by hand, {replicas} replicas: losses of shape {losses.shape}, one for each replica")
    return np.asarray(w), losses


def main(steps=100, devices=4):
    tr.configure(devices=devices)
    data = make_data()
    plain, _ = with_trainer(data, steps, microbatches=1, replicas=1)
    results = [
        with_trainer(data, steps, microbatches=4, replicas=1)[0],
        with_trainer(data, steps, microbatches=1, replicas=devices)[0],
        with_trainer(data, steps, microbatches=4, replicas=devices)[0],
        by_hand(data, steps, devices)[0],
    ]
    largest = max(float(np.abs(each - plain).max()) for each in results)
    print(f"largest difference between the parameters found: {largest:.1e}")
    return largest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--devices", type=int, default=4)
    main(**vars(parser.parse_args()))
