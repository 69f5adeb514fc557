"""What spans cost, and a fit with and without a trace: `python -m benchmarks.tracing`."""

import tempfile
import time

import numpy as np
import optax

import tailrace as tr
from tailrace.base.spans.span import seconds_of_a_span, span


def seconds_of(calls, function):
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, time.perf_counter() - started)
    return best / calls


def nothing():
    pass


def one_span():
    with span("dispatch", steps=10):
        pass


def fit(trainer, steps, trace=None):
    x = np.ones((320, 784), np.float32)
    data = tr.batches((x, np.zeros(320, np.int32)), 32, repeat=True)
    started = time.perf_counter()
    trainer.fit(data, steps=steps, progress=False, trace=trace)
    return time.perf_counter() - started


def loss_fn(params, x, y):
    logits = x @ params[0] @ params[1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main():
    off = seconds_of(100_000, one_span) - seconds_of(100_000, nothing)
    print(
        f"a span without a trace: {off * 1e9:.0f} ns; with one: {seconds_of_a_span() * 1e9:.0f} ns"
    )
    params = [np.full((784, 128), 0.01, np.float32), np.full((128, 10), 0.01, np.float32)]
    trainer = tr.Trainer(loss_fn, optax.sgd(0.01), params, steps_per_execution=100)
    fit(trainer, 1000)
    folder = tempfile.mkdtemp()
    for name, trace in {
        "no trace": lambda: None,
        "trace, no operations": lambda: tr.trace(folder, operations=0),
        "trace, operations of 2 executions": lambda: tr.trace(folder),
    }.items():
        took = min(fit(trainer, 2000, trace()) for _ in range(3))
        print(f"{name:34}: {took / 2000 * 1e6:6.1f} us a step")


if __name__ == "__main__":
    main()
