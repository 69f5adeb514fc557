"""What `make demo` runs: a classifier of real digits, trained with feeds and without.

With feeds, many steps run in one device program, and their losses come out together; without, the
host calls the device once for each step. The model, the data and the results are the same.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from tailrace.data import digits

BATCH = 32


def init_params():
    keys = jax.random.split(jax.random.key(0))
    normal = jax.nn.initializers.he_normal()
    return {
        "hidden": {"kernel": normal(keys[0], (784, 128)), "bias": jnp.zeros(128)},
        "output": {"kernel": normal(keys[1], (128, 10)), "bias": jnp.zeros(10)},
    }


def logits(params, images):
    # Pixels travel as uint8 and become floats here, on the device.
    x = images.reshape(-1, 784).astype(jnp.float32) / 255
    x = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return x @ params["output"]["kernel"] + params["output"]["bias"]


def loss_fn(params, images, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels)
    return losses.mean()


def accuracy(params, images, labels):
    return {"accuracy": (logits(params, images).argmax(axis=1) == labels).mean()}


def with_feeds(data, steps, optimizer, run_dir=None):
    """Seconds, executions, losses and the trainer; what is compiled is compiled before."""
    options = {"steps_per_execution": min(250, steps), "run_dir": run_dir}
    trainer = tr.Trainer(loss_fn, optimizer, init_params(), **options)
    trainer.explain(next(iter(data)))
    started = time.perf_counter()
    history = trainer.fit(data, steps=steps)
    return time.perf_counter() - started, trainer.executions, history.loss, trainer


def without_feeds(data, steps, optimizer):
    """The same steps, one call each."""

    @jax.jit
    def step(params, state, images, labels):
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, losses = init_params(), []
    state = optimizer.init(params)
    jax.block_until_ready(step(params, state, *next(iter(data))))
    started = time.perf_counter()
    for _, batch in zip(range(steps), data, strict=False):
        params, state, loss = step(params, state, *batch)
        losses.append(loss)
    losses = np.array(jax.device_get(losses))
    return time.perf_counter() - started, steps, losses


def main(steps=10_000, run_dir=None):
    optimizer = optax.sgd(0.01)
    train = tr.batches(digits("train"), BATCH, shuffle=True, repeat=True)
    test = tr.batches(digits("test"), 100)
    print(f"{steps:,} steps of {BATCH} digits, classifier 784-128-10")
    fed_s, fed_executions, fed_losses, trainer = with_feeds(train, steps, optimizer, run_dir)
    alone_s, alone_executions, alone_losses = without_feeds(train, steps, optimizer)
    print(f"with feeds      {fed_s:6.2f} s  {fed_executions:6,} executions")
    print(f"without feeds   {alone_s:6.2f} s  {alone_executions:6,} executions")
    print(f"losses equal to the last bit: {np.array_equal(fed_losses, alone_losses)}")
    found = trainer.evaluate(test, accuracy)["accuracy"]
    print(f"loss {fed_losses[-100:].mean():.4f}, accuracy on 1,000 held-out digits {found:.1%}")
    if run_dir is not None:
        print(f"Look at the run: tailrace view {run_dir}")
    return {"with_feeds": fed_executions, "without_feeds": alone_executions, "accuracy": found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--run-dir", help="a new directory that keeps the run, to look at it")
    main(**vars(parser.parse_args()))
