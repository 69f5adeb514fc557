"""What a run directory costs the training loop, and what a long run takes to write and to open.

    python -m benchmarks.records [--steps N] [--repeats N]

The first part trains the classifier of benchmarks.feeds with the statistics of its four gradients
observed in every step. Compared are two trainers that differ in `run_dir=` alone, in turns: one keeps
what executions left behind in memory as it came, and merges nothing, as nobody asks for a record; the
other one merges, compresses and writes all of it, forces it to the disk and closes the directory
before `fit` returns. Three figures: the time of a fit; the processor time of the whole process, which
other programs on the machine disturb less; and the processor time that writing takes on its own, with
the same executions handed to a writer while nothing else runs, written as often as in a fit. The last
is an upper bound of the cost where the training keeps all cores busy.

The second part trains a small model with 100 parameters for 100,000 steps, with the norm of each
gradient observed in every step.
"""

import contextlib
import dataclasses
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from benchmarks import report, workload
from benchmarks.report import Contender
from benchmarks.workload import BATCH, HostBatches
from tailrace.records.sinks import Finished
from tailrace.runs import writer

MEMORY, DISK = "in memory", "run directory"
LONG_STEPS, TENSORS = 100_000, 100


def main(arguments: list[str] | None = None) -> None:
    flags = report.common_flags(__doc__, steps=30_000, repeats=5).parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="tailrace-records-"))
    try:
        contenders = report.chosen(cost(flags.steps, folder), flags.only, MEMORY)
        for contender in contenders:
            for _ in range(2):  # the second one compiles what the first one has learnt
                contender.run()
            processor_s[contender.name].clear()
        report.measure(contenders, flags.repeats)
        baseline = next(c for c in contenders if c.name == MEMORY)
        parts = [
            f"Four gradients, their statistics in every step, {flags.steps:,} steps:",
            report.timing_table(contenders, baseline, flags.steps, "step"),
            processor_table(baseline, alone(flags.steps, folder / "alone")),
            f"{LONG_STEPS:,} steps, {TENSORS} tensors, the norm of each in every step:",
            long_run(folder / "long"),
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    command = " ".join(["python -m benchmarks.records", *(arguments or sys.argv[1:])])
    title = f"Run directories: a classifier 784-128-10, batch {BATCH}; and a long run"
    report.publish(title, command, parts, path=None if flags.no_record else report.RESULTS)


processor_s: dict[str, list[float]] = {MEMORY: [], DISK: []}
"""The processor time of each timed run, of all threads together."""
writes: list[int] = []
"""How often the run directory had been written after each fit."""


def observed(run_dir: Path | None) -> tr.Trainer:
    return tr.Trainer(
        workload.loss_fn,
        optax.sgd(workload.RATE),
        workload.init_params(),
        observe=[tr.Tap("grad/*")],
        run_dir=run_dir,
    )


def cost(steps: int, folder: Path) -> list[Contender]:
    """The same training twice; all records are asked for at the end by neither."""
    batches = HostBatches(steps)

    def contender(name: str, made: tr.Trainer, note: str) -> Contender:
        def run() -> None:
            before = time.process_time()
            made.fit(batches, steps=steps, progress=False)
            processor_s[name].append(time.process_time() - before)
            if isinstance(sink := made._journal.sink, writer.RunWriter):
                writes.append(sink.writes)

        return Contender(name, run, note)

    return [
        contender(MEMORY, observed(None), "statistics are kept as rows and not merged yet"),
        contender(
            DISK, observed(folder / "cost"), "statistics merged, compressed, forced to the disk"
        ),
    ]


@dataclasses.dataclass
class Kept:
    """A sink that keeps the executions of a fit, to be written again."""

    executions: list[Finished]

    def fitting(self, info: Any, goes_on: bool = False) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def execution(self, done: Finished) -> None:
        self.executions.append(done)

    def compilation(self, row: Any) -> None:
        """Not measured."""

    def flush(self) -> None:
        """Nothing waits."""

    def mark(self) -> Any:
        return lambda: None

    def take_up(self, end: Any) -> None:
        """There is no earlier fit."""

    def stored(self) -> dict[Any, Any]:
        return {}


def alone(steps: int, run_dir: Path) -> float:
    """The processor time of writing a fit while nothing else runs, as often as the last fit did."""
    trainer, kept = observed(None), Kept([])
    trainer._journal.sink = kept
    trainer.fit(HostBatches(steps), steps=steps, progress=False)
    often = writes[-1] - writes[-2] if len(writes) > 1 else 1
    together = -(-len(kept.executions) // often)
    sink = writer.RunWriter(run_dir)
    started = time.process_time()
    with sink.fitting({"catalogue": []}):
        for number, done in enumerate(kept.executions, start=1):
            sink.execution(done)
            if number % together == 0:
                sink.stored()  # has them written
    return time.process_time() - started


def processor_table(baseline: Contender, written_s: float) -> str:
    whole = {name: statistics.median(found) for name, found in processor_s.items() if found}
    rows = [(name, f"{s:.3f} s", f"{s / whole[MEMORY]:.3f}") for name, s in whole.items()]
    share = f"{written_s / baseline.median:.2%} of the time of a fit"
    rows.append(("writing alone", f"{written_s:.3f} s", share))
    return report.markdown_table(("processor time", "median", f"of {MEMORY}"), rows)


# -- a long run ---------------------------------------------------------------------------------


def long_loss(params: Any, x: Any) -> Any:
    return sum(((p - n * x) ** 2).mean() for n, p in enumerate(params.values(), start=1))


class SmallElements:
    """Vectors of four values, as many as asked for."""

    def __init__(self, count: int) -> None:
        self.rows = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[np.ndarray]:
        for number in range(self.count):
            yield self.rows[number]


def long_run(run_dir: Path) -> str:
    params = {f"p{number:02}": jnp.full(4, float(number)) for number in range(TENSORS)}
    trainer = tr.Trainer(
        long_loss,
        optax.sgd(0.01),
        params,
        observe=[tr.Tap("grad/*", reduce="norm")],
        run_dir=run_dir,
    )
    started = time.perf_counter()
    trainer.fit(SmallElements(LONG_STEPS), steps=LONG_STEPS, progress=False)
    jax.block_until_ready(trainer.params)
    trained = time.perf_counter() - started
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    stored = sum(path.stat().st_size for path in files)
    raw = LONG_STEPS * TENSORS * 4
    timed = {"train and write": trained}
    started = time.perf_counter()
    run = tr.open_run(run_dir)
    timed["open"] = time.perf_counter() - started
    started = time.perf_counter()
    one = run.records["grad/p50"]
    timed["read one tensor"] = time.perf_counter() - started
    assert one.values.shape == (LONG_STEPS,)
    started = time.perf_counter()
    for pair in run.records:
        run.records[pair]
    timed[f"read all {TENSORS} tensors, one by one"] = time.perf_counter() - started
    started = time.perf_counter()
    assert len(run.history) == LONG_STEPS
    timed["read the history"] = time.perf_counter() - started
    rows = [(name, f"{seconds:.3f} s") for name, seconds in timed.items()]
    rows.append(("bytes on disk", f"{stored / 1e6:.1f} MB ({raw / 1e6:.0f} MB of norms)"))
    rows.append(("files", f"{len(files)}"))
    return report.markdown_table(("", "measured"), rows)


if __name__ == "__main__":
    main()
