"""A graph replicated over two devices, with gradients accumulated and averaged, in the seeds' words.

The number of replicas is nowhere written down: there are two devices, and one copy takes one of them.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax

from tailrace.compat import ipu
from tailrace.compat.ipu import ipu_compiler, ipu_infeed_queue, ipu_outfeed_queue, loops
from tailrace.compat.ipu.optimizers import CrossReplicaGradientAccumulationOptimizerV2


def batches(seed=0):
    """Points on a line, without end."""
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=(16,)).astype(np.float32)
        yield x, 3 * x + 1


def main(iterations=200, devices=2):
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = devices
    cfg.configure_ipu_system()

    slope, offset = ipu.Variable(0.0, name="slope"), ipu.Variable(0.0, name="offset")
    infeed_queue = ipu_infeed_queue.IPUInfeedQueue(batches())
    outfeed_queue = ipu_outfeed_queue.IPUOutfeedQueue()
    optimizer = CrossReplicaGradientAccumulationOptimizerV2(
        optax.sgd(0.1), num_mini_batches=4, reduction_method="mean"
    )

    def body(x, y):
        loss = jnp.mean((slope * x + offset - y) ** 2)
        return outfeed_queue.enqueue(loss), optimizer.minimize(loss)

    train = ipu_compiler.compile(lambda: loops.repeat(iterations, body, [], infeed_queue))
    infeed_queue.initializer()
    train()
    losses = outfeed_queue.dequeue()
    infeed_queue.deleter()
    print(f"losses of shape {losses.shape}: {losses[0].mean():.3f} to {losses[-1].mean():.6f}")
    print(f"slope {float(slope):.3f}, offset {float(offset):.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--devices", type=int, default=2)
    main(**vars(parser.parse_args()))
