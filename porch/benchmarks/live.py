"""What a live outfeed costs: the workload of benchmarks.feeds, its losses read while it runs.

    python -m benchmarks.live [--steps N] [--repeats N]

A second thread takes every loss as it arrives. The loop is then run in short dispatches.
"""

import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

import tailrace as tr
from benchmarks import report, workload
from benchmarks.report import Contender
from benchmarks.workload import BATCH, HostBatches

PLAIN = "read at the end"


def main(arguments: list[str] | None = None) -> None:
    flags = report.common_flags(__doc__, steps=10_000, repeats=7).parse_args(arguments)
    batches = HostBatches(flags.steps)
    runs = {PLAIN: Run(batches, live=False), "live": Run(batches, live=True)}
    contenders = report.chosen(
        [Contender(name, run) for name, run in runs.items()], flags.only, PLAIN
    )
    for contender in contenders:
        for _ in range(2):  # the second one compiles what the first one has learnt
            contender.run()
    report.measure(contenders, flags.repeats)
    baseline = next(c for c in contenders if c.name == PLAIN)
    rows = [(c.name, *runs[c.name].shown()) for c in contenders]
    headings = ("", "dispatches", "first value after ms", "longest wait for one ms")
    parts = [
        report.timing_table(contenders, baseline, flags.steps, "step"),
        report.markdown_table(headings, rows),
    ]
    command = " ".join(["python -m benchmarks.live", *(arguments or sys.argv[1:])])
    title = f"Live outfeeds: {flags.steps:,} steps of a classifier 784-128-10, batch {BATCH}"
    report.publish(title, command, parts, path=None if flags.no_record else report.RESULTS)


class Run:
    """One way to get the losses out, and when they came."""

    def __init__(self, batches: HostBatches, *, live: bool) -> None:
        self.infeed, self.outfeed = tr.InfeedQueue(batches), tr.OutfeedQueue(live=live)
        self.params, self.count = workload.init_params(), len(batches)
        self.program = tr.compile(
            lambda params: tr.repeat(self.count, self._body, params, infeed=self.infeed)
        )
        self.first_ms: list[float] = []
        self.longest_ms: list[float] = []
        self.dispatches = 0

    def _body(self, params: Any, images: Any, labels: Any) -> Any:
        params, loss = workload.sgd_step(params, images, labels)
        self.outfeed.enqueue(loss)
        return params

    def __call__(self) -> None:
        self.infeed.restart()
        arrived: list[float] = []
        read: Callable[[], Any] = lambda: arrived.extend(  # noqa: E731
            time.perf_counter() for _ in self.outfeed.stream()
        )
        reader = threading.Thread(target=read)
        before, started = self.program.executions, time.perf_counter()
        if self.outfeed.live:
            reader.start()
        jax.block_until_ready(self.program(self.params))
        if self.outfeed.live:
            reader.join()
        else:
            self.outfeed.dequeue()
            arrived = [time.perf_counter()] * self.count
        assert len(arrived) == self.count
        self.dispatches = self.program.executions - before
        self.first_ms.append((arrived[0] - started) * 1e3)
        pairs = zip(arrived, [started, *arrived], strict=False)
        self.longest_ms.append(max(now - last for now, last in pairs) * 1e3)

    def shown(self) -> tuple[str, str, str]:
        first, longest = (statistics.median(v[2:]) for v in (self.first_ms, self.longest_ms))
        return f"{self.dispatches:,}", f"{first:.1f}", f"{longest:.1f}"


if __name__ == "__main__":
    main()
