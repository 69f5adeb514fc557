"""From the start of a training to its first step, and then a step: `tr.Trainer` and plain JAX.

    python -m benchmarks.first_step                       # all models: minutes
    python -m benchmarks.first_step --only gpt --repeats 3

Every start is a process of its own that has imported everything and made its data; the clock runs
from there until the loss of the first step is on the host (of the scan: of its first call, 10 steps).
Nothing is cached. Starts of the contenders are interleaved, and one of them runs twice in each round:
`again` is the spread of a program against itself. Cells are medians.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import tailrace as tr
from benchmarks import report
from benchmarks.compiler_options import Model, perceptron, residual

LENGTH = 10
"""Steps in one call of the hand-written scan."""


def gpt(layers: int, width: int, length: int, batch: int, vocabulary: int) -> Model:
    """A transformer in float32, in plain JAX."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)

    def layer() -> dict[str, np.ndarray]:
        return {
            "norms": np.ones((2, width), np.float32),
            "qkv": drawn(width, 3 * width),
            "out": drawn(width, width),
            "up": drawn(width, 4 * width),
            "down": drawn(4 * width, width),
        }

    params = {"embedding": drawn(vocabulary, width), "layers": [layer() for _ in range(layers)]}

    def norm(x: Any, scale: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-5) * scale

    def loss_fn(params: Any, tokens: Any) -> Any:
        x = params["embedding"][tokens[:, :-1]]
        for p in params["layers"]:
            parts = jnp.split(norm(x, p["norms"][0]) @ p["qkv"], 3, -1)
            q, k, v = (part.reshape(batch, length, -1, 64) for part in parts)
            seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + seen.reshape(x.shape) @ p["out"]
            x = x + jax.nn.gelu(norm(x, p["norms"][1]) @ p["up"]) @ p["down"]
        logits = jax.nn.log_softmax(x @ params["embedding"].T)
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    tokens = rng.integers(0, vocabulary, (batch, length + 1)).astype(np.int32)
    return loss_fn, params, [tokens] * LENGTH


MODELS: dict[str, Callable[[], Model]] = {
    "small MLP": lambda: perceptron(128, 784, 320, 100, 10),
    "GPT, 8 layers of 256": lambda: gpt(8, 256, 64, 4, 256),
    "residual convnet, 16 blocks": lambda: residual(16, 32, 8, 16),
}

# -- contenders: each returns a function that trains a number of steps --------------------------------


def one_step(model: Model) -> Callable[..., Any]:
    optimizer = optax.adamw(1e-4)

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        loss, grads = jax.value_and_grad(model[0])(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return step


def begun(model: Model) -> Any:
    params = jax.tree.map(jnp.asarray, model[1])
    return params, optax.adamw(1e-4).init(params)


def by_jit(model: Model) -> Callable[[int], None]:
    step, held = jax.jit(one_step(model), donate_argnums=0), [begun(model)]

    def run(steps: int) -> None:
        losses = []
        for _, batch in zip(range(steps), itertools.cycle(model[2])):
            held[0], loss = step(held[0], batch)
            losses.append(loss)
        np.asarray(losses[-1])

    return run


def by_scan(model: Model) -> Callable[[int], None]:
    step, held, batches = one_step(model), [begun(model)], np.stack(model[2])
    loop = jax.jit(lambda carry, batches: lax.scan(step, carry, batches), donate_argnums=0)

    def run(steps: int) -> None:
        for _ in range(-(-steps // LENGTH)):
            held[0], losses = loop(held[0], batches)
            np.asarray(losses)

    return run


def by_trainer(model: Model, **options: Any) -> Callable[[int], None]:
    loss_fn, params, elements = model
    trainer = tr.Trainer(loss_fn, optax.adamw(1e-4), params, **options)

    def run(steps: int) -> None:
        # An iterator, so that the elements are repeated and none is kept on the device.
        trainer.fit(itertools.cycle(elements), steps=steps, progress=False)

    return run


CONTENDERS: dict[str, Callable[[Model], Callable[[int], None]]] = {
    "jit a step": by_jit,
    "again": by_jit,
    "scan": by_scan,
    "tr.Trainer": by_trainer,
    "rewrites off": lambda model: by_trainer(model, rewrites={"boundaries": False}),
}


def started(name: str, contender: str, steps: int) -> dict[str, float]:
    """In a process of its own: seconds and processor seconds to the first step, and a step."""
    model = MODELS[name]()
    assert tr.Trainer is not None  # imported when first used; every script pays that once
    begin, used = time.perf_counter(), time.process_time()
    run = CONTENDERS[contender](model)
    run(1)
    found = {"first": time.perf_counter() - begin, "processor": time.process_time() - used}
    run(LENGTH)
    begin, used = time.perf_counter(), time.process_time()
    run(steps)
    step, worked = time.perf_counter() - begin, time.process_time() - used
    return {**found, "step": step / steps, "worked": worked / steps}


def start(name: str, contender: str, steps: int) -> dict[str, float]:
    """Start that process, and wait for it."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "TAILRACE_CACHE")}
    code = (
        "import json; from benchmarks.first_step import started; "
        f"print('FOUND', json.dumps(started({name!r}, {contender!r}, {steps})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.rpartition("FOUND ")[2])


def row(name: str, steps: int, repeats: int) -> list[tuple[str, ...]]:
    """The rows of a model, one for each thing that is measured."""
    found: dict[str, list[dict[str, float]]] = {each: [] for each in CONTENDERS}
    for number in range(repeats):
        order = list(CONTENDERS) if number % 2 == 0 else list(CONTENDERS)[::-1]
        for each in order:
            found[each].append(start(name, each, steps))
        print(f"  {name}: round {number + 1} of {repeats}", file=sys.stderr, flush=True)
    rows = []
    for what, text, unit in (
        ("first", "s to the first step", 1.0),
        ("processor", "processor s", 1.0),
        ("step", "ms a step", 1e3),
        ("worked", "processor ms a step", 1e3),
    ):
        cells = []
        for each in CONTENDERS:
            pairs = zip(found[each], found["jit a step"], strict=True)
            ratio = statistics.median(mine[what] / base[what] for mine, base in pairs)
            value = statistics.median(one[what] for one in found[each]) * unit
            cells.append(f"{value:.2f} ({ratio:.2f})")
        rows.append((f"{name}: {text}", *cells))
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = report.common_flags(__doc__, steps=50, repeats=3)
    given = parser.parse_args(arguments)
    wanted = [part for part in given.only.split(",") if part]
    rows = []
    for name in MODELS:
        if not wanted or any(part in name.lower() for part in wanted):
            rows += row(name, given.steps, given.repeats)
    headings = ("median (of jit a step)", *CONTENDERS)
    table = report.markdown_table(headings, rows)
    print(table, flush=True)
    command = f"python -m benchmarks.first_step --steps {given.steps} --repeats {given.repeats}"
    path = None if given.no_record else report.RESULTS
    report.publish("Time to the first step", command, [table], path=path)


if __name__ == "__main__":
    main()
