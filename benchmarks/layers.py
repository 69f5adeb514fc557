"""What taps cost before a program runs: an MLP of many layers, traced, rewritten and lowered.

    python -m benchmarks.layers                       # 100, 300, 1,000 layers with grad/*; 120 with *
    python -m benchmarks.layers --layers 120 --tap '*'

Seconds without XLA's compilation, and with one step of the program. "plain" is the same step as a
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


KINDS = {"jaxpr_trace": "trace", "jaxpr_to_mlir_module": "lower", "backend_compile": "compile"}
"""Parts of the names of JAX's events."""


class Durations:
    """What JAX says about the programs that it makes while the context is open."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys([*KINDS.values(), "all"], 0.0)
        self._open = False
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_: object) -> None:
        for key, kind in KINDS.items():
            if self._open and key in event:
                self.seconds[kind] += seconds

    def __enter__(self) -> Durations:
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self._open, self._began = True, time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds["all"] += time.perf_counter() - self._began
        self._open = False

    @property
    def before(self) -> float:
        """Seconds in Python before XLA: traces, names, taps, lowering."""
        return self.seconds["all"] - self.seconds["compile"]


HEARD = Durations()


def plain(layers: int) -> tuple[float, float]:
    """Seconds before XLA, and of lowering, of a scan written by hand."""
    optimizer, params = optax.sgd(0.1), parameters(layers)

    def step(state, x):
        params, held = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, held = optimizer.update(grads, held, params)
        return (optax.apply_updates(params, updates), held), loss

    state, xs = (params, optimizer.init(params)), np.ones((1, BATCH, WIDTH), np.float32)
    with HEARD:
        jax.block_until_ready(jax.jit(lambda s, x: jax.lax.scan(step, s, x))(state, xs))
    return HEARD.before, HEARD.seconds["lower"]


def tapped(layers: int, select: str | None) -> tuple[float, float, int]:
    """The same for a fit of one step, and the number of recorded tensors."""
    observe = [] if select is None else [tr.Tap(select)]
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), parameters(layers), observe=observe)
    with HEARD:
        trainer.fit([np.ones((BATCH, WIDTH), np.float32)], steps=1, progress=False)
    return HEARD.before, HEARD.seconds["lower"], len(trainer.records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[])
    parser.add_argument("--tap", default="grad/*")
    options = parser.parse_args()
    rows = [(count, options.tap) for count in options.layers]
    rows = rows or [(100, "grad/*"), (300, "grad/*"), (1000, "grad/*"), (120, "*")]
    plain(2), tapped(2, None), tapped(2, "*")  # what JAX and we do once in a process
    print("| layers | tap | tensors | before XLA | lowering | plain: before XLA | lowering |")
    print("|-------:|-----|--------:|-----------:|---------:|------------------:|---------:|")
    for count, select in rows:
        ours, lowering, tensors = tapped(count, select)
        theirs, their_lowering = plain(count)
        numbers = f"{ours:.1f} | {lowering:.1f} | {theirs:.1f} | {their_lowering:.1f}"
        print(f"| {count:,} | `{select}` | {tensors:,} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
