"""Which options of XLA's compiler suit a program: the measurements behind `suited_options`.

    python -m benchmarks.compiler_options                 # all models, in the size for this platform
    python -m benchmarks.compiler_options --only gpt --options triton

Each model's hand-written step, in a loop on the device, is compiled once with XLA's defaults and once
with each set of options: seconds of XLA, and milliseconds a step in interleaved runs. The defaults are
compiled and run twice, so that the table shows the spread of a program against itself.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks import report
from benchmarks.lengths import gpt_model, gpt_tokens
from benchmarks.models import convolve, he, large, normalised

STEPS = 5
"""Steps in one program."""

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "again": {},
    "no triton": {"xla_gpu_enable_triton_gemm": False},
    "unchecked": {"xla_gpu_autotune_level": "2"},
    "both": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": "2"},
}
"""Sets of options on a GPU. Level 2 of autotuning does not compare the results of what it tries."""

CPU_OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "again": {},
    "cheap passes": {"xla_llvm_disable_expensive_passes": True},
    "one part": {"xla_cpu_parallel_codegen_split_count": "1"},
    "four parts": {"xla_cpu_parallel_codegen_split_count": "4"},
}
"""Sets of options on a CPU."""

Model = tuple[Callable[..., Any], Any, list[Any]]
"""A loss function of parameters and one element, parameters, elements."""


def gpt(layers: int, width: int, length: int, batch: int, vocabulary: int) -> Model:
    params, loss_fn = gpt_model(layers, width, length, vocabulary)
    return loss_fn, params, gpt_tokens(batch, length, vocabulary)


def perceptron(batch: int, *sizes: int) -> Model:
    rng = np.random.default_rng(0)
    params = [he(rng, n, m) for n, m in itertools.pairwise(sizes)]

    def loss_fn(params: Any, x: Any) -> Any:
        for w in params:
            x = jax.nn.relu(x @ w)
        return (x**2).mean()

    return loss_fn, params, [rng.normal(size=(batch, sizes[0])).astype(np.float32)] * STEPS


def residual(blocks: int, width: int, batch: int, pixels: int) -> Model:
    rng = np.random.default_rng(0)
    params = {"stem": he(rng, 3, 3, 3, width)}
    params |= {f"{n}": he(rng, 3, 3, width, width) for n in range(blocks)}

    def loss_fn(params: Any, x: Any) -> Any:
        x = convolve(x, params["stem"])
        for n in range(blocks):
            y = convolve(jax.nn.relu(normalised(x, 1.0)), params[f"{n}"])
            x = x + y
        return (x**2).mean()

    images = rng.normal(size=(batch, pixels, pixels, 3)).astype(np.float32)
    return loss_fn, params, [images] * STEPS


def models() -> dict[str, Callable[[], Model]]:
    if not large():
        return {
            "perceptron": lambda: perceptron(128, 784, 320, 100, 10),
            "convnet": lambda: residual(4, 16, 16, 16),
            "gpt 4 x 128": lambda: gpt(4, 128, 64, 2, 1000),
        }
    found: dict[str, Callable[[], Model]] = {
        "gpt-2 small, 50257": lambda: gpt(12, 768, 1024, 8, 50257),
        "gpt-2 small, 50304": lambda: gpt(12, 768, 1024, 8, 50304),
        "gpt 6 x 512, 50304": lambda: gpt(6, 512, 1024, 8, 50304),
        "gpt 6 x 512, 512 rows": lambda: gpt(6, 512, 512, 8, 50304),
    }
    for width in (384, 512, 768, 1024, 2048):
        for batch in (2, 8):
            name = f"gpt 4 x {width}, {batch} x 1024, 8192"
            found[name] = lambda w=width, b=batch: gpt(4, w, 1024, b, 8192)
    found["perceptron"] = lambda: perceptron(1000, 784, 320, 100, 10)
    found["wide perceptron"] = lambda: perceptron(4096, 4096, 4096, 4096, 4096)
    found["residual convnet"] = lambda: residual(16, 128, 128, 32)
    return found


def compiled(model: Model, options: dict[str, Any]) -> tuple[Callable[[], Any], float]:
    """What runs a model's steps once, and the seconds that XLA took."""
    loss_fn, params, elements = model
    optimizer = optax.adamw(1e-4)

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    def loop(carry: Any, batches: Any) -> Any:
        return lax.scan(step, carry, batches)

    stacked = jnp.asarray(np.stack(elements[:STEPS]))
    start = (jax.tree.map(jnp.array, params), optimizer.init(params))
    lowered = jax.jit(loop, donate_argnums=0).lower(start, stacked)
    started = time.perf_counter()
    program = lowered.compile(compiler_options=options or None)
    seconds = time.perf_counter() - started
    held = {"carry": start}

    def run() -> Any:
        held["carry"], losses = program(held["carry"], stacked)
        return np.asarray(losses)

    return run, seconds


def main(arguments: list[str] | None = None) -> None:
    parser = report.common_flags(__doc__, steps=STEPS, repeats=7)
    parser.add_argument("--options", default="", help="parts of names of sets of options")
    given = parser.parse_args(arguments)
    wanted = [part for part in given.only.split(",") if part]
    chosen = [part for part in given.options.split(",") if part]
    sets = {
        name: options
        for name, options in (OPTIONS if large() else CPU_OPTIONS).items()
        if name in ("defaults", "again") or not chosen or any(part in name for part in chosen)
    }
    rows = []
    for name, make in models().items():
        if wanted and not any(part in name for part in wanted):
            continue
        rows.append(row(name, make(), sets, given.repeats))
        print(" | ".join(rows[-1]), flush=True)
    headings = ("ms a step (s of XLA)", *sets)
    table = report.markdown_table(headings, rows)
    command = f"python -m benchmarks.compiler_options --repeats {given.repeats}"
    path = None if given.no_record else report.RESULTS
    report.publish("Options of XLA's compiler", command, [table], path=path)


def row(name: str, model: Model, sets: dict[str, dict[str, Any]], repeats: int) -> list[str]:
    runs = {each: compiled(model, options) for each, options in sets.items()}
    seconds: dict[str, list[float]] = {each: [] for each in sets}
    for number in range(repeats + 1):
        for each, (run, _) in runs.items():
            started = time.perf_counter()
            run()
            if number:
                seconds[each].append((time.perf_counter() - started) / STEPS)
    base = statistics.median(seconds["defaults"])
    return [
        name,
        *(
            f"{(m := statistics.median(seconds[each])) * 1e3:.3f}, {m / base:.3f} ({xla:.1f})"
            for each, (_, xla) in runs.items()
        ),
    ]


if __name__ == "__main__":
    main()
