"""What checkpoints cost a training that keeps one every ten seconds.

    python -m benchmarks.checkpoints                    # GPT-2 small (124 M parameters), bfloat16
    python -m benchmarks.checkpoints --layers 2 --width 128 --length 64 --seconds 3

Fits with and without checkpoints are interleaved in one process; each is as long as several periods.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import tempfile
import time
from pathlib import Path

import jax
import optax

import tailrace as tr
from benchmarks.lengths import gpt_model, gpt_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="between checkpoints")
    parser.add_argument("--periods", type=float, default=2.2, help="of a fit")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    params, loss_fn = gpt_model(given.layers, given.width, given.length)
    data = gpt_tokens(given.batch, given.length)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) * 3
    trainer = tr.Trainer(loss_fn, optax.adamw(1e-4), params, steps_per_execution=10)
    trainer.fit(itertools.cycle(data), steps=40)
    started = time.perf_counter()
    trainer.fit(itertools.cycle(data), steps=200)
    per_step = (time.perf_counter() - started) / 200
    steps = max(20, int(given.seconds * given.periods / per_step) // 10 * 10)
    took: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            for name in took:
                directory = Path(folder) / str(number)
                kept = tr.Checkpoint(directory, f"{given.seconds}s", keep=1)
                begun = Clock()
                trainer.fit(
                    itertools.cycle(data),
                    steps=steps,
                    checkpoint=kept if name == "with" else None,
                    callbacks=[begun],
                )
                took[name].append(begun.seconds / (begun.steps - begun.skipped))
                if name == "with":
                    trainer._fits.kept = 0  # each round is the first fit of its own directory
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rows = {name: statistics.median(values) * 1e3 for name, values in took.items()}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, state {size / 1e9:.2f} GB")
    print(f"a checkpoint every {given.seconds:g} s, fits of {steps} steps, {given.rounds} rounds")
    for name, value in rows.items():
        print(f"  {name:8} {value:9.3f} ms a step   {[round(v * 1e3, 3) for v in took[name]]}")
    print(f"  ratio    {rows['with'] / rows['without']:9.4f}   host memory at most {peak:.2f} GB")


class Clock(tr.Callback):
    """The time of a fit's steps, without its first executions and without the save at its end."""

    def __init__(self, skipped: int = 20) -> None:
        self.skipped, self.steps, self.seconds, self._started = skipped, 0, 0.0, 0.0

    def on_execution_end(self, trainer, execution) -> None:
        self.steps += execution.steps
        if self.steps == self.skipped:
            self._started = time.perf_counter()
        self.seconds = time.perf_counter() - self._started


if __name__ == "__main__":
    main()
