"""Results that arrive while the program still runs: losses of a training loop, and predictions.

A live outfeed is read by one thread while another runs the program. `predict(live=True)` is an
iterator: the result of each element comes out soon after it is made.
"""

import argparse
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr


def make_data(examples=4096):
    random = np.random.default_rng(0)
    x = random.normal(size=(examples, 64)).astype(np.float32)
    return x, np.tanh(x[:, :8].sum(axis=1))


def model(params, x):
    return jnp.tanh(x @ params["w"]).sum(axis=1)


def loss_fn(params, x, y):
    return ((model(params, x) - y) ** 2).mean()


def watch_losses(steps, data):
    """Train in one call; a second thread notes when each loss arrives."""
    infeed = tr.InfeedQueue(tr.batches(data, 64, shuffle=True, repeat=True))
    outfeed = tr.OutfeedQueue(live=True)

    def step(params, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        outfeed.enqueue({"loss": loss})
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    program = tr.compile(lambda params: tr.repeat(steps, step, params, infeed=infeed))
    arrived = []
    reader = threading.Thread(
        target=lambda: arrived.extend(
            (time.perf_counter(), float(record["loss"])) for record in outfeed.stream()
        )
    )
    reader.start()
    with infeed:
        params = jax.block_until_ready(program({"w": jnp.full((64, 32), 0.01)}))
    ended = time.perf_counter()
    reader.join()
    early = sum(when < ended for when, _ in arrived)
    print(f"{len(arrived):,} losses, {early:,} of them before the program had ended")
    print(f"{program.executions} dispatches; loss {arrived[0][1]:.3f} to {arrived[-1][1]:.3f}")
    return params, arrived, early


def stream_predictions(params, data):
    """Predictions one by one, in the order of the data."""
    trainer = tr.Trainer(loss_fn, optax.sgd(0.01), params)
    started = time.perf_counter()
    first_s = count = 0
    for prediction in trainer.predict(tr.batches(data[0], 64), model, live=True):
        first_s = first_s or time.perf_counter() - started
        count += len(prediction)
    print(f"{count:,} predictions, the first after {first_s:.2f} s (compilation included)")
    return count


def main(steps=5_000):
    data = make_data()
    params, arrived, early = watch_losses(steps, data)
    return {"losses": len(arrived), "early": early, "predictions": stream_predictions(params, data)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5_000)
    main(**vars(parser.parse_args()))
