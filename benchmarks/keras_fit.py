"""Keras' `fit`, the same with Tailrace's trainer, and `tr.Trainer` on the same model, in one run.

    python -m benchmarks.keras_fit --steps 2000
    python -m benchmarks.keras_fit --pipeline
    python -m benchmarks.keras_fit --callback --rounds 20

784-128-10, batch 32, arrays on the host, not shuffled. Contenders take turns; the best round counts,
with `--callback` (a callback that Keras calls after each batch, at one step an execution) the median.
Times are those of a batch; in brackets, how many times as long as that `tk fit` takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr

BATCH, FEATURES, HIDDEN, CLASSES, RATE = 32, 784, 128, 10, 0.01
POOL = 500
"""Batches in the arrays; an epoch."""
MICROBATCHES = 4
"""Batches of a step of the pipeline."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help=f"a multiple of {POOL}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--executions", type=int, nargs="+", default=[1, 10, 100, 500])
    parser.add_argument("--pipeline", action="store_true", help="two stages instead")
    parser.add_argument("--callback", action="store_true", help="call back after each batch")
    given = parser.parse_args(arguments)
    if given.callback:
        found = measured(called_back(given.steps), given.rounds, given.steps, statistics.median)
        shown = "  ".join(f"{name} {seconds * 1e6:7.1f} us" for name, seconds in found.items())
        print(f"a callback for each batch   {shown}", flush=True)
        return
    if given.pipeline:
        tr.configure(devices=2)
    make = pipelined if given.pipeline else plain
    for execution in given.executions:
        if given.pipeline and execution % MICROBATCHES:
            print(
                f"steps_per_execution={execution:<4} refused: a step of the pipeline takes "
                f"{MICROBATCHES} batches, which do not divide it",
                flush=True,
            )
            continue
        found = measured(make(execution, given.steps), given.rounds, given.steps)
        base = found["tk fit"]
        shown = "  ".join(
            f"{name} {seconds * 1e6:7.1f} us ({base / seconds:.2f})"
            for name, seconds in found.items()
        )
        print(f"steps_per_execution={execution:<4} {shown}", flush=True)


def measured(
    contenders: dict[str, Any], rounds: int, steps: int, of_all: Callable[[Any], float] = min
) -> dict[str, float]:
    """Seconds a step of each, the best of several rounds; the first warms up."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            if round_number:
                found[name].append((time.perf_counter() - started) / steps)
    return {name: of_all(seconds) for name, seconds in found.items()}


def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(POOL * BATCH, FEATURES)).astype(np.float32)
    return images, rng.integers(0, CLASSES, POOL * BATCH).astype(np.int32)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    images, labels = arrays()
    return [(images[i : i + BATCH], labels[i : i + BATCH]) for i in range(0, POOL * BATCH, BATCH)]


def init_params() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "w1": rng.normal(0, 0.05, (FEATURES, HIDDEN)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": rng.normal(0, 0.1, (HIDDEN, CLASSES)).astype(np.float32),
        "b2": np.zeros(CLASSES, np.float32),
    }


def loss_of(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


def loss_fn(params: Any, images: Any, labels: Any) -> Any:
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"])
    return loss_of(hidden @ params["w2"] + params["b2"], labels)


def keras_fit(
    execution: int, steps: int, adopted: bool, stages: bool = False, callback: bool = False
) -> Callable[[], Any]:
    import tailrace.keras as tk  # isort: skip  (before keras: it chooses the backend)
    import keras

    dense = keras.layers.Dense
    model: Any = keras.Sequential([keras.Input((FEATURES,)), dense(HIDDEN, "relu"), dense(CLASSES)])
    model.set_weights(list(init_params().values()))
    if adopted:
        model = tk.adopt(model)
    if stages:
        model.set_pipeline_stage_assignment([0, 1])
        model.set_pipelining_options(MICROBATCHES, gradient_accumulation_reduction_method="mean")
    model.compile(
        keras.optimizers.SGD(RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=execution,
    )
    images, labels = arrays()
    call: dict[str, Any] = {"verbose": 0, "shuffle": False}
    if callback:
        called = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: logs["loss"])
        call["callbacks"] = [called]
    return lambda: model.fit(images, labels, BATCH, steps // POOL, **call)


def called_back(steps: int) -> dict[str, Any]:
    return {
        "tk fit": keras_fit(1, steps, adopted=True, callback=True),
        "Keras fit": keras_fit(1, steps, adopted=False, callback=True),
    }


def plain(execution: int, steps: int) -> dict[str, Any]:
    trainer = tr.Trainer(loss_fn, optax.sgd(RATE), init_params(), steps_per_execution=execution)
    data = batches()
    return {
        "tk fit": keras_fit(execution, steps, adopted=True),
        "Keras fit": keras_fit(execution, steps, adopted=False),
        "tr.Trainer": lambda: trainer.fit(data, epochs=steps // POOL, progress=False),
    }


def pipelined(execution: int, steps: int) -> dict[str, Any]:
    def first(params: Any, images: Any, labels: Any) -> Any:
        return jax.nn.relu(images @ params["w1"] + params["b1"]), labels

    def second(params: Any, hidden: Any, labels: Any) -> Any:
        return loss_of(hidden @ params["w2"] + params["b2"], labels)

    whole = init_params()
    params = [{k: whole[k] for k in ("w1", "b1")}, {k: whole[k] for k in ("w2", "b2")}]
    trainer = tr.Trainer(
        tr.Pipeline([first, second], accumulation=MICROBATCHES),
        optax.sgd(RATE),
        params,
        steps_per_execution=execution // MICROBATCHES,
    )
    data = batches()
    return {
        "tk fit": keras_fit(execution, steps, adopted=True, stages=True),
        "tr.Pipeline": lambda: trainer.fit(data, epochs=steps // POOL, progress=False),
    }


if __name__ == "__main__":
    main()
