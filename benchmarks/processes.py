"""Two processes against one process with two devices, on the same machine: the price of a process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

import tailrace as tr
from benchmarks.report import RESULTS, common_flags, markdown_table, publish

WIDTHS = ((784, 128), (784, 1024))
"""Inputs and hidden units: a small exchange of gradients, and a larger one."""


def train(replicas: int, hidden: int, steps: int, repeats: int) -> list[float]:
    """Seconds a step, of each repeat."""
    random = np.random.default_rng(0)
    data = [
        (
            random.normal(size=(64, 784)).astype(np.float32),
            random.integers(0, 10, 64).astype(np.int32),
        )
        for _ in range(16)
    ]
    params = {
        "hidden": np.float32(random.normal(size=(784, hidden)) * 0.05),
        "out": np.float32(random.normal(size=(hidden, 10)) * 0.1),
    }

    def loss_fn(params, x, y):
        logits = jax.nn.relu(x @ params["hidden"]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    trainer = tr.Trainer(
        loss_fn, optax.sgd(0.01), params, replicas=replicas, steps_per_execution=steps
    )

    def forever():
        while True:
            yield from data

    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        trainer.fit(forever, steps=steps, progress=False)
        seconds.append((time.perf_counter() - started) / steps)
    return seconds[1:]  # the first one compiles


def in_processes(processes: int, devices: int, hidden: int, steps: int, repeats: int) -> float:
    """The median of a step, in microseconds, as the first process measures it."""
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    what = json.dumps([processes * devices, hidden, steps, repeats])
    command = [sys.executable, "-m", "tailrace", "launch", "-n", str(processes)]
    done = subprocess.run(
        [*command, "--devices", str(devices), __file__, what],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("SECONDS"))
    return statistics.median(json.loads(line.removeprefix("SECONDS"))) * 1e6


def main() -> None:
    flags = common_flags(__doc__, steps=200, repeats=5).parse_args()
    rows = []
    for _, hidden in WIDTHS:
        one = in_processes(1, 2, hidden, flags.steps, flags.repeats)
        two = in_processes(2, 1, hidden, flags.steps, flags.repeats)
        rows.append([f"784-{hidden}-10", f"{one:.0f}", f"{two:.0f}", f"{two / one:.2f}"])
    headings = [
        "two replicas of batch 64",
        "one process, us a step",
        "two, us a step",
        "two / one",
    ]
    publish(
        f"Processes on {os.cpu_count()} cores: two replicas in one process and in two",
        "python -m benchmarks.processes",
        [
            markdown_table(headings, rows),
            "Gradients are exchanged once a step: inside one process in memory, between two through "
            "Gloo over the loopback interface. Both share the same cores.",
        ],
        path=None if flags.no_record else RESULTS,
    )


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        tr.distributed.initialize()
        measured = train(*json.loads(sys.argv[1]))
        if tr.distributed.writes():
            print("SECONDS", json.dumps(measured), flush=True)
    else:
        main()
