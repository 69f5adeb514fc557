"""Pipelines on two CPU devices, against torch.distributed.pipelining and against one device."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from typing import Any

import jax
import numpy as np
import optax

import tailrace as tr
from benchmarks.report import (
    RESULTS,
    Contender,
    chosen,
    common_flags,
    markdown_table,
    measure,
    publish,
)
from benchmarks.torch_pipeline import Crew
from benchmarks.workers import Worker, serve

WIDTHS = (784, 1024, 1024, 1024, 10)
CUT = 2  # layers of the first stage
MICROBATCH, COUNT = 128, 8
RATE = 0.01
SCHEDULES = ("grouped", "interleaved", "sequential")
PROFILED = 8  # executions from which the costs of stages are taken
LIMIT_S = 60  # for anything that another process does
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"  # a device has one thread, as a process of torch


def make_params() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [
        {
            "kernel": random.normal(0, (2 / n) ** 0.5, (n, m)).astype(np.float32),
            "bias": np.zeros(m, np.float32),
        }
        for n, m in itertools.pairwise(WIDTHS)
    ]


def make_data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    labels = random.integers(0, 10, MICROBATCH * COUNT).astype(np.int32)
    patterns = random.random((10, WIDTHS[0]), np.float32)
    noise = random.random((len(labels), WIDTHS[0]), np.float32)
    return 0.5 * (patterns[labels] + noise), labels


def layers(params: list[Any], h: Any, *, last: bool) -> Any:
    for number, layer in enumerate(params):
        h = h @ layer["kernel"] + layer["bias"]
        if not (last and number == len(params) - 1):
            h = jax.nn.relu(h)
    return h


def first(params: list[Any], x: Any, y: Any) -> Any:
    return layers(params, x, last=False), y


def second(params: list[Any], h: Any, y: Any) -> Any:
    logits = layers(params, h, last=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def plain(params: list[Any], x: Any, y: Any) -> Any:
    return second(params[CUT:], *first(params[:CUT], x, y))


def trainer_of(schedule: str | None, steps: int) -> tr.Trainer:
    """A trainer with a pipeline of two stages; without a schedule, the same on one device."""
    params = make_params()
    options: dict[str, Any] = {"steps_per_execution": steps}
    if schedule is None:
        return tr.Trainer(plain, optax.sgd(RATE), params, accumulation=COUNT, **options)
    pipeline = tr.Pipeline([first, second], accumulation=COUNT, schedule=schedule)
    return tr.Trainer(pipeline, optax.sgd(RATE), [params[:CUT], params[CUT:]], **options)


def contender(name: str, trainer: tr.Trainer, steps: int, note: str = "") -> Contender:
    data = tr.batches(make_data(), MICROBATCH, repeat=True)
    return Contender(name, lambda: trainer.fit(data, steps=steps, progress=False), note)


def compile_seconds(contenders: list[Contender]) -> dict[str, float]:
    """What the first run of each takes more than the second, in processor time of this process.

    That is tracing and compiling; other processes do not disturb it.
    """
    found = {}
    for each in contenders:
        marks = [time.process_time()]
        for _ in range(2):
            each.run()
            marks.append(time.process_time())
        found[each.name] = (marks[1] - marks[0]) - (marks[2] - marks[1])
    return found


def expectations(
    trainers: dict[str, tr.Trainer],
    contenders: dict[str, Contender],
    compiling: dict[str, float],
    steps: int,
) -> list[list[str]]:
    """For each schedule: what its stages cost, and the simulated step against the real one."""
    rows = []
    for schedule in SCHEDULES:
        if schedule not in contenders:
            continue
        data = tr.batches(make_data(), MICROBATCH, repeat=True)
        times = trainers[schedule].profile(data, executions=PROFILED).pipeline
        assert times is not None
        untraced = statistics.median(contenders[schedule].seconds) / steps
        costs = zip(times.forward, times.backward, strict=True)
        rows.append(
            [
                schedule,
                ", ".join(f"{f * 1e3:.1f}+{b * 1e3:.1f}" for f, b in costs),
                f"{times.predicted * 1e3:.1f}",
                f"{times.step * 1e3:.1f}",
                f"{times.step / times.predicted:.3f}",
                f"{untraced / times.predicted:.3f}",
                f"{times.bubble:.1%}",
                f"{compiling[schedule] / compiling['one device']:.2f}",
            ]
        )
    return rows


def work() -> None:
    """Be the process that trains on one device with all threads, as a user without pipelines does."""
    tr.configure(devices=1, platform="cpu")
    data = tr.batches(make_data(), MICROBATCH, repeat=True)
    trainers: dict[int, tr.Trainer] = {}

    def order(line: str) -> dict[str, float]:
        steps = int(line)
        trainer = trainers.setdefault(steps, trainer_of(None, steps))
        return {"loss": float(trainer.fit(data, steps=steps, progress=False).loss[-1])}

    serve(order)


def main() -> None:
    parser = common_flags(__doc__, steps=4, repeats=7)
    parser.add_argument("--work", action="store_true", help="be the process with all threads")
    flags = parser.parse_args()
    if flags.work:
        return work()
    steps = flags.steps
    all_threads = Worker(["-m", "benchmarks.pipelines", "--work"], LIMIT_S)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()
    tr.configure(devices=2, platform="cpu")
    trainers = {name: trainer_of(name, steps) for name in SCHEDULES}
    trainers["one device"] = trainer_of(None, steps)
    contenders = [contender(name, trainer, steps) for name, trainer in trainers.items()]
    contenders[-1].note = "the unpipelined program; XLA uses both cores in spite of the flag"

    def run_all_threads() -> None:
        all_threads.tell(str(steps))
        all_threads.answer()

    contenders.append(
        Contender("one device, all threads", run_all_threads, "the unpipelined program")
    )
    crew = None if flags.no_peers else Crew(WIDTHS, CUT, COUNT, RATE, LIMIT_S)
    try:
        if crew is not None:
            note = "torch.distributed.pipelining, a process a stage, one thread each, Gloo"
            for schedule in ("GPipe", "1F1B"):
                contenders.append(
                    Contender(f"torch {schedule}", lambda s=schedule: crew.run(s, steps), note)
                )
        contenders = chosen(contenders, flags.only, "one device")
        compiling = compile_seconds(contenders)
        measure(contenders, flags.repeats)
        first_losses = None if crew is None else crew.first_losses
    finally:
        for each in (all_threads, crew):
            if each is not None:
                each.dismiss()
    by_name = {c.name: c for c in contenders}
    peers = [c for c in contenders if c.name.startswith("torch")]
    best = min(peers, key=lambda c: c.median, default=None)
    alone = by_name["one device"]
    timing = markdown_table(
        ("", "median ms a step", "fastest", "of one device", "of torch's best"),
        [
            (
                c.name,
                f"{c.median / steps * 1e3:.1f}",
                f"{min(c.seconds) / steps * 1e3:.1f}",
                f"{c.ratio_to(alone):.3f}",
                "" if best is None else f"{c.ratio_to(best):.3f}",
            )
            for c in contenders
        ],
    )
    expected = markdown_table(
        (
            "",
            "stage times ms (F+B)",
            "simulated ms",
            "profiled ms",
            "profiled, of simulated",
            "unprofiled, of simulated",
            "bubble",
            "compile, of one device's",
        ),
        expectations(trainers, by_name, compiling, steps),
    )
    notes = [f"- {c.name}: {c.note}" for c in contenders if c.note]
    if best is not None and "grouped" in by_name:
        speed = best.ratio_to(by_name["grouped"])
        notes.append(f"- grouped is {speed:.2f} times as fast as torch's best ({best.name})")
    if first_losses:
        ours = float(np.asarray(trainer_of(None, 1).fit(_one_step(), steps=1).loss)[0])
        notes.append(f"- loss of the first step: torch {first_losses[0]:.4f}, here {ours:.4f}")
    publish(
        f"Pipelines: MLP {'-'.join(map(str, WIDTHS))} in two stages, {COUNT} microbatches of "
        f"{MICROBATCH}, on {os.cpu_count()} cores",
        "python -m benchmarks.pipelines",
        [
            timing,
            "\n".join(notes),
            "The simulated step, from what its stages cost in a profile, against the real one; compile "
            "time against that of the unpipelined program:",
            expected,
        ],
        path=None if flags.no_record else RESULTS,
    )


def _one_step() -> Any:
    return tr.batches(make_data(), MICROBATCH)


if __name__ == "__main__":
    main()
