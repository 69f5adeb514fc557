"""A long training with everything switched on: memory, threads, handles and compilations over time.

    python -m benchmarks.soak [--steps N] [--every N] [--run-dir DIR] [--checkpoint DIR]

Trains a small model for 2,000,000 steps with taps, an outfeed that is read in a callback, a run
directory, and a checkpoint every 10,000 steps. After each tenth it prints resident memory, threads,
open files and how many programs were compiled; a checkpoint that is being written is waited for.
Flat means: after the first tenth, memory grows by less than 2 %, and nothing else grows. Memory is
what is in use; in brackets with what the allocator keeps of what was freed.
"""

import argparse
import gc
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np
import optax

import tailrace as tr
from tailrace.trainer.checkpoints.freed_memory import give_back

TENTHS = 10
ALLOWED = 1.02
STEPS = 200  # of an execution: short, so that there are many
BETWEEN = 10_000  # steps from one checkpoint to the next


def resident() -> tuple[int, int]:
    """Bytes of this process that are in memory: with, and without what the allocator keeps unused."""

    def now() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = now()
    give_back()
    return before, now()


def lasting_threads() -> int:
    """Threads, without those that come for one write and go, and without those of asyncio's pool."""
    # Zarr's loop starts threads of its pool when all others are busy: up to four more than processors.
    passing = ("run-disk", "asyncio_")
    return sum(not any(p in thread.name for p in passing) for thread in threading.enumerate())


class Compilations(logging.Handler):
    """Counts what JAX compiles."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "Finished XLA compilation" in record.getMessage()


class Drain(tr.Callback):
    """Reads the outfeed after each execution, and says at each tenth how things are."""

    def __init__(
        self, outfeed: tr.OutfeedQueue, steps: int, compiled: Compilations, checkpoints: Path
    ) -> None:
        self.outfeed, self.steps, self.compiled = outfeed, steps, compiled
        self.checkpoints = checkpoints
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.executions = self.elements = 0
        self.began = time.perf_counter()

    def on_execution_end(self, trainer, execution) -> None:
        self.executions += 1
        self.elements += len(self.outfeed.dequeue())
        done = execution.first_step + execution.steps
        if done * TENTHS // self.steps > len(self.rows):
            len(trainer.records)  # what waits to be written is written: it is no growth
            while list(
                self.checkpoints.glob("fit-*/*.unfinished*")
            ):  # its memory is given back soon
                time.sleep(0.05)
            gc.collect()
            handles = len(os.listdir("/proc/self/fd"))
            whole, used = resident()
            row = (done, used, lasting_threads(), handles, self.compiled.count)
            self.rows.append(row)
            print(
                f"{done:>12,} steps {used / 1e6:8.1f} MB ({whole / 1e6:.0f}) {row[2]:3} threads "
                f"{row[3]:4} handles {row[4]:4} compiled {self.executions:7,} executions "
                f"{time.perf_counter() - self.began:7.0f} s",
                flush=True,
            )


def soak(steps: int, every: int, run_dir: Path, checkpoints: Path) -> Drain:
    """Train, and look."""
    compiled = Compilations()
    logger = logging.getLogger("jax._src.dispatch")
    logger.addHandler(compiled)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, 8)).astype(np.float32)
    params = {"a": rng.normal(size=(8, 16)).astype(np.float32), "b": np.ones(16, np.float32)}
    outfeed = tr.OutfeedQueue(most_bytes=1 << 24)

    def loss_fn(params, x, y):
        h = jax.nn.tanh(x @ params["a"]) @ params["b"]
        outfeed.enqueue(h.mean())
        return ((h - y) ** 2).mean()

    trainer = tr.Trainer(
        loss_fn,
        optax.adam(1e-3),
        params,
        observe=[tr.Tap("grad/*"), tr.Tap("grad/a", mode=tr.every(100), reduce="histogram")],
        run_dir=run_dir,
        steps_per_execution=STEPS,
    )
    data = tr.batches((x, x.sum(axis=1)), 8, shuffle=True, repeat=True)
    drain = Drain(outfeed, steps, compiled, checkpoints)
    kept = tr.Checkpoint(checkpoints, every=every, keep=3)
    trainer.fit(data, steps=steps, callbacks=[drain], checkpoint=kept, progress=False)
    assert drain.elements == steps, f"{drain.elements} elements of {steps} left the outfeed"
    assert len(tr.open_run(run_dir).history) == steps
    return drain


def grown(drain: Drain) -> list[str]:
    """What grew that should not have."""
    _, memory, threads, handles, compiled = zip(*drain.rows[: TENTHS - 1], strict=True)
    found = []
    if max(memory[1:]) > ALLOWED * memory[0]:
        found.append(f"memory by {100 * (max(memory[1:]) / memory[0] - 1):.1f} %")
    for name, values in (("threads", threads), ("handles", handles), ("compilations", compiled)):
        if max(values[1:]) > values[0]:
            found.append(f"{name} from {values[0]} to {max(values[1:])}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument(
        "--every", type=int, default=BETWEEN, help="steps from one checkpoint to the next"
    )
    parser.add_argument("--run-dir", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument(
        "--checkpoint", type=Path, help="where to save (default: a temporary directory)"
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        drain = soak(
            arguments.steps,
            arguments.every,
            arguments.run_dir or folder / "run",
            arguments.checkpoint or folder / "checkpoints",
        )
        found = grown(drain)
    finally:
        shutil.rmtree(folder)
    print("flat" if not found else f"grew: {'; '.join(found)}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
