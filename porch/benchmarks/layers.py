"""What taps cost before a program runs: an MLP of many layers, traced, rewritten and lowered.

    python -m benchmarks.layers                       # 100, 300, 1,000 layers with grad/*; 120 with *
    python -m benchmarks.layers --layers 120 --tap '*'

Seconds of the processor in Python, without XLA's compilation. "plain" is the same step as a
scan written by hand.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from tailrace.program.running.executable import Numbers

WIDTH, BATCH = 8, 4


def parameters(layers: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [
        {
            "w": random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5,
            "b": np.zeros(WIDTH, np.float32),
        }
        for _ in range(layers)
    ]


def loss_fn(params, x):
    for number, layer in enumerate(params):
        with jax.named_scope(f"layer{number}"):
            x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x * x).mean()


def plain(layers: int) -> tuple[float, float]:
    """Seconds of tracing and of lowering a scan written by hand."""
    optimizer, params = optax.sgd(0.1), parameters(layers)

    def step(state, x):
        params, held = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, held = optimizer.update(grads, held, params)
        return (optax.apply_updates(params, updates), held), loss

    state, xs = (params, optimizer.init(params)), np.ones((1, BATCH, WIDTH), np.float32)
    started = time.process_time()
    traced = jax.jit(lambda s, x: jax.lax.scan(step, s, x)).trace(state, xs)
    done = time.process_time()
    traced.lower()
    return done - started, time.process_time() - done


def tapped(layers: int, select: str | None) -> tuple[float, float, float, int]:
    """Seconds of tracing (with the catalogue), rewriting and lowering; and the number of taps."""
    observe = [] if select is None else [tr.Tap(select)]
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), parameters(layers), observe=observe)
    started = time.process_time()
    runner, _ = trainer._runner_for([np.ones((BATCH, WIDTH), np.float32)])
    traced = time.process_time()
    known = trainer._activate(runner)
    executable = runner._executable(runner._loop, 1)
    arguments = executable._arguments(known, runner._block_forms(executable), Numbers(0, 0))
    begun = time.process_time()
    rewritten = executable._jitted().trace(*arguments)
    done = time.process_time()
    rewritten.lower()
    count = sum(map(len, runner.wanted.values()))
    return traced - started, done - begun, time.process_time() - done, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[])
    parser.add_argument("--tap", default="grad/*")
    options = parser.parse_args()
    rows = [(count, options.tap) for count in options.layers]
    rows = rows or [(100, "grad/*"), (300, "grad/*"), (1000, "grad/*"), (120, "*")]
    plain(2), tapped(2, None), tapped(2, "*")  # what JAX and we do once in a process
    print("| layers | tap | tensors | trace | rewrite | lower | plain: trace | lower |")
    print("|-------:|-----|--------:|------:|--------:|------:|-------------:|------:|")
    for count, select in rows:
        trace, rewrite, lower, tensors = tapped(count, select)
        by_hand = plain(count)
        print(
            f"| {count} | `{select}` | {tensors} | {trace:.1f} | {rewrite:.1f} | {lower:.1f} | "
            f"{by_hand[0]:.1f} | {by_hand[1]:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
