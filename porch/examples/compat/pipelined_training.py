"""A pipeline over four devices, two stages of it side by side, in the seeds' words.

The learning rate is a variable that only the optimizer reads; the host changes it from call to call.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.compat import ipu
from tailrace.compat.ipu import (
    ipu_compiler,
    ipu_infeed_queue,
    ipu_outfeed_queue,
    optimizers,
    pipelining_ops,
)


def batches(seed=0):
    """Points and whether they lie in a ring, without end."""
    rng = np.random.default_rng(seed)
    while True:
        x = rng.uniform(-2, 2, size=(32, 2)).astype(np.float32)
        yield x, (np.abs(np.hypot(x[:, 0], x[:, 1]) - 1.2) < 0.5).astype(np.float32)


class Descent(optimizers.Optimizer):
    """Plain descent with a learning rate that is a value of the program."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        for grad, var in grads_and_vars:
            var.assign_sub(self.rate * grad)


def main(calls=4, repeat_count=50):
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 4
    cfg.configure_ipu_system()

    rng = np.random.default_rng(1)
    made = {
        name: ipu.Variable(rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[0]), name=name)
        for name, shape in {"w0": (2, 16), "w1a": (16, 8), "w1b": (16, 8), "w2": (16, 1)}.items()
    }

    def stage0(x, y):
        return jnp.tanh(x @ made["w0"].value()), y

    def stage1a(h, y):
        return jnp.tanh(h @ made["w1a"].value())

    def stage1b(h, y):
        return jax.nn.relu(h @ made["w1b"].value()), y

    # The arguments are what the stages side by side returned, one after the other.
    def stage2(a, b, y):
        return jnp.concatenate([a, b], axis=1) @ made["w2"].value(), y

    def stage3(logits, y):
        p = jax.nn.sigmoid(logits[:, 0])
        return -jnp.mean(y * jnp.log(p + 1e-6) + (1 - y) * jnp.log(1 - p + 1e-6))

    rate = ipu.Variable(2.0, trainable=False, name="rate")
    infeed_queue = ipu_infeed_queue.IPUInfeedQueue(batches())
    outfeed_queue = ipu_outfeed_queue.IPUOutfeedQueue()

    def my_net():
        return pipelining_ops.pipeline(
            computational_stages=[stage0, [stage1a, stage1b], stage2, stage3],
            gradient_accumulation_count=8,
            repeat_count=repeat_count,
            infeed_queue=infeed_queue,
            outfeed_queue=outfeed_queue,
            optimizer_function=lambda loss: pipelining_ops.OptimizerFunctionOutput(
                Descent(rate), loss
            ),
            device_mapping=[0, [1, 2], 2, 3],
            reduction_method="mean",
            outfeed_loss=True,
        )

    train = ipu_compiler.compile(my_net)
    infeed_queue.initializer()
    means = []
    for _ in range(calls):
        train()
        means.append(float(outfeed_queue.dequeue().mean()))
        rate.assign(rate * 0.8)
    infeed_queue.deleter()
    print("mean losses:", ", ".join(f"{mean:.3f}" for mean in means))
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--repeat-count", type=int, default=50)
    main(**vars(parser.parse_args()))
