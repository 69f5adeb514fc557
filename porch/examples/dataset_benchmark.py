"""Is the data or the device what training waits for? Measure both, and get a sentence."""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

import tailrace as tr
from tailrace.feeds.benchmark.measure import dataset_benchmark
from tailrace.feeds.benchmark.verdict import verdict


def slow_dataset(delay_s):
    """A generator that works for a while on each batch, as decoding images would."""
    random = np.random.default_rng(0)
    while True:
        time.sleep(delay_s)
        yield random.random((32, 784), np.float32)


def step_time_s(batch, repeats=200):
    """Seconds a small step takes on the device when its data is there already."""
    weights = jnp.full((784, 128), 0.01)
    step = jax.jit(lambda w, x: w - 0.01 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w))
    batch = jax.device_put(batch)
    weights = jax.block_until_ready(step(weights, batch))
    started = time.perf_counter()
    for _ in range(repeats):
        weights = step(weights, batch)
    jax.block_until_ready(weights)
    return (time.perf_counter() - started) / repeats


def main(epochs=5, elements=200):
    random = np.random.default_rng(0)
    datasets = {
        "arrays in memory": tr.batches(random.random((3200, 784), np.float32), 32, repeat=True),
        "a slow generator": slow_dataset(0.001),
    }
    device_s = step_time_s(random.random((32, 784), np.float32))
    found = {}
    for name, dataset in datasets.items():
        measured = json.loads(dataset_benchmark(dataset, epochs, elements))
        first = measured["epochs"][0]
        print(f"{name}: {', '.join(f'{key} {value:,.4g}' for key, value in first.items())}")
        found[name] = verdict(measured, step_time_s=device_s)
        print(f"  {found[name]}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--elements", type=int, default=200)
    main(**vars(parser.parse_args()))
