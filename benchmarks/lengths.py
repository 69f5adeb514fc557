"""Fits of many lengths: how often they compile, and what a loop costs whose length is data.

    python -m benchmarks.lengths                # a small MLP: microseconds a step, and compilations
    python -m benchmarks.lengths --gpt          # GPT-2 small: what fits of 1, 64, 64 steps compile

The rows of the MLP run in this process, interleaved. Each row of GPT-2 has a process of its own: the
first program that a process compiles also pays for choosing kernels and loading libraries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr


def mlp(sizes=(784, 128, 10)):
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return [
        {"w": jax.random.normal(k, (a, b)) / a**0.5, "b": jnp.zeros(b)}
        for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=False)
    ]


def mlp_loss(params, x, y):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def small(repeats: int) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(32 * 200, 784)).astype(np.float32)
    y = random.integers(0, 10, 32 * 200).astype(np.int32)
    data = tr.batches((x, y), 32, repeat=True)
    steps, params = 4000, mlp()
    trainers = {
        "tr.Trainer": tr.Trainer(mlp_loss, optax.sgd(0.1), params, steps_per_execution=100),
        "tr.Trainer, auto": tr.Trainer(mlp_loss, optax.sgd(0.1), params),
        "every(10)": tr.Trainer(
            mlp_loss,
            optax.sgd(0.1),
            params,
            steps_per_execution=100,
            observe=[tr.Tap("grad/*", mode=tr.every(10))],
        ),
    }
    optimizer = optax.sgd(0.1)

    def step(state, batch):
        params, held = state
        loss, grads = jax.value_and_grad(mlp_loss)(params, *batch)
        updates, held = optimizer.update(grads, held, params)
        return (optax.apply_updates(params, updates), held), loss

    blocks = (jnp.asarray(x).reshape(200, 32, 784)[:100], jnp.asarray(y).reshape(200, 32)[:100])
    scan = jax.jit(lambda s, xs: jax.lax.scan(step, s, xs), donate_argnums=0)
    state = jax.tree.map(jnp.copy, (params, optimizer.init(params)))
    times: dict[str, list[float]] = {"scan, data on the device": [], **{n: [] for n in trainers}}
    for number in range(repeats + 2):
        started = time.perf_counter()
        for _ in range(steps // 100):
            state, losses = scan(state, blocks)
        jax.block_until_ready(losses)
        took = {"scan, data on the device": time.perf_counter() - started}
        for name, trainer in trainers.items():
            started = time.perf_counter()
            trainer.fit(data, steps=steps)
            took[name] = time.perf_counter() - started
        if number >= 2:
            for name, seconds in took.items():
                times[name].append(seconds / steps * 1e6)
    print(f"MLP 784-128-10, batch 32, {steps} steps a fit, {repeats} rounds, us a step (medians)")
    for name, values in times.items():
        print(f"  {name:26} {statistics.median(values):8.1f}   best {min(values):8.1f}")


def gpt_model(layers: int, width: int, length: int, vocabulary: int = 50304):
    """Parameters and loss function of a GPT in bfloat16; its vocabulary that of GPT-2, padded."""
    heads = width // 64
    kernel = "cudnn" if jax.devices()[0].platform == "gpu" else None
    keys = iter(jax.random.split(jax.random.key(0), 2 + 4 * layers))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32) * 0.02

    params = {
        "embed": normal(vocabulary, width),
        "position": normal(length, width),
        "blocks": [
            {
                "qkv": normal(width, 3 * width),
                "out": normal(width, width),
                "up": normal(width, 4 * width),
                "down": normal(4 * width, width),
                "scale": jnp.ones((2, width)),
            }
            for _ in range(layers)
        ],
    }

    def norm(x, scale):
        x = x.astype(jnp.float32)
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return (x * scale).astype(jnp.bfloat16)

    def loss_fn(params, tokens):
        p = jax.tree.map(lambda v: v.astype(jnp.bfloat16), params)
        x = p["embed"][tokens[:, :-1]] + p["position"]
        for i, (own, block) in enumerate(zip(params["blocks"], p["blocks"], strict=True)):
            with jax.named_scope(f"block_{i}"):
                h = norm(x, own["scale"][0])
                qkv = (h @ block["qkv"]).reshape(*h.shape[:2], 3 * heads, 64)
                with jax.named_scope("attention"):
                    q, k, v = jnp.split(qkv, 3, axis=2)
                    a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
                x = x + a.reshape(h.shape) @ block["out"]
                h = norm(x, own["scale"][1])
                with jax.named_scope("mlp"):
                    h = jax.nn.gelu(h @ block["up"]) @ block["down"]
                x = x + h
        logits = (x @ p["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return params, loss_fn


def gpt_tokens(batch: int, length: int, vocabulary: int = 50304) -> list[np.ndarray]:
    """Elements of the dataset: random tokens."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (16, batch, length + 1))
    return [row.astype(np.int32) for row in tokens]


ROWS = {
    "one step by hand": None,
    "tr.Trainer": (),
    "every(10)": (tr.Tap("grad/*", mode=tr.every(10)),),
}


def gpt_rows(tiny: bool) -> None:
    """Compile each row in a process of its own, and compare it with the step by hand."""
    seconds: dict[str, float] = {}
    for name in ROWS:
        command = [sys.executable, "-m", "benchmarks.lengths", "--gpt", "--row", name]
        done = subprocess.run(
            command + ["--tiny"] * tiny, check=True, capture_output=True, text=True, timeout=600
        )
        found = json.loads(done.stdout.splitlines()[-1])
        seconds[name] = found["lowered"] + found["compiled"]
        print(
            f"  {name:18} {found['executables']} executable(s), traced and lowered in "
            f"{found['lowered']:.1f} s, compiled in {found['compiled']:.1f} s: "
            f"{seconds[name] / seconds['one step by hand']:.2f} of the step by hand",
            flush=True,
        )


def gpt_row(name: str, layers: int, width: int, length: int, batch: int) -> None:
    """Compile one row in this process; print its seconds."""
    params, loss_fn = gpt_model(layers, width, length)
    data = gpt_tokens(batch, length) * 9
    optimizer, taps = optax.adamw(1e-4), ROWS[name]
    jax.block_until_ready(params)
    compiled: list[float] = []

    def timed(self: jax.stages.Lowered, *args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return plain(self, *args, **options)
        finally:
            compiled.append(time.perf_counter() - begun)

    # One clock for all rows: what is not compilation is tracing and lowering.
    plain, jax.stages.Lowered.compile = jax.stages.Lowered.compile, timed
    started, executables = time.perf_counter(), 1
    if taps is None:

        def step(state, batch):
            params, held = state
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            updates, held = optimizer.update(grads, held, params)
            return (optax.apply_updates(params, updates), held), loss

        state = (params, optimizer.init(params))
        jax.jit(step, donate_argnums=0).lower(state, data[0]).compile()
        took = time.perf_counter() - started
    else:
        trainer = tr.Trainer(loss_fn, optimizer, params, steps_per_execution=10, observe=taps)
        trainer.fit(data, steps=1, progress=False)
        took = time.perf_counter() - started
        for _ in range(2):
            trainer.fit(data, steps=64, progress=False)
        executables = len(trainer.engine.runner._executables)  # what users do not see
    row = {"executables": executables, "lowered": took - sum(compiled), "compiled": sum(compiled)}
    print(json.dumps(row))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpt", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a GPT of two layers, for a CPU")
    parser.add_argument("--row", choices=ROWS, help="one row of GPT-2, in this process")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print(jax.__version__, jax.devices()[0].device_kind)
    if options.row:
        gpt_row(options.row, *((2, 128, 64, 2) if options.tiny else (12, 768, 1024, 8)))
    elif options.gpt:
        gpt_rows(options.tiny)
    else:
        small(options.repeats)
