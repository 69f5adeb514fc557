"""What all benchmarks share: interleaved timing, medians, tables, and the record of a machine."""

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "keras", "torch")


@dataclass
class Contender:
    """One way to do the work.

    Attributes:
        name: what it is called in the table.
        run: does the work once, all results on the host when it returns.
        note: what a reader should know about it.
        seconds: what each timed run took.
    """

    name: str
    run: Callable[[], Any]
    note: str = ""
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratio_to(self, other: "Contender") -> float:
        """The median of the ratios of runs that were made one after the other.

        A machine that is busy for a while slows both; the ratio of neighbours cancels that.
        """
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def measure(contenders: Sequence[Contender], repeats: int, *, say: bool = True) -> None:
    """Time all contenders `repeats` times, one after the other in each round.

    Every second round goes backwards, so that nobody always runs after the same neighbour.
    """
    for number in range(repeats):
        order = contenders if number % 2 == 0 else contenders[::-1]
        for contender in order:
            gc.collect()
            started = time.perf_counter()
            contender.run()
            contender.seconds.append(time.perf_counter() - started)
        if say:  # at once: a machine that is lent may go before the end
            shown = ", ".join(f"{c.name} {c.seconds[-1]:.3f}" for c in contenders)
            print(f"  round {number + 1} of {repeats}, seconds: {shown}", file=sys.stderr)


def settle(trainers: Sequence[Any], wait_s: float = 300.0) -> None:
    """Wait for the loops of fixed length that a training of hours would run in; each has been fitted.

    On an accelerator a thread compiles them beside the training, if that is long enough.
    """
    found = [(one.engine, one._fits.pace(one.engine)) for one in trainers]  # what users do not see
    for engine, pace in found:
        seconds, period = pace.seconds_per_step, engine.sight.period
        engine.runner.fix(engine.loop_state, period, seconds, remaining=10**12)
    for engine, _ in found:
        if engine.runner.fixed.compiling is not None:
            engine.runner.fixed.compiling.result(wait_s)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that reads well as text too: columns padded, all but the first to the right."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *rest])} |"

    dashes = ["-" * (width + 2) for width in widths]
    rule = f"|{'|'.join([dashes[0], *(f'{each[:-1]}:' for each in dashes[1:])])}|"
    return "\n".join([line(headings), rule, *map(line, rows)])


def timing_table(
    contenders: Sequence[Contender], baseline: Contender, count: int, unit: str
) -> str:
    """Seconds, microseconds a unit, and the ratio to `baseline`, in the order given."""
    rows = [
        (
            c.name,
            f"{c.median:.3f}",
            f"{min(c.seconds):.3f}",
            f"{c.median / count * 1e6:.1f}",
            f"{c.ratio_to(baseline):.3f}",
        )
        for c in contenders
    ]
    headings = ("", "median s", "fastest s", f"us a {unit}", f"of {baseline.name}")
    notes = [f"- {c.name}: {c.note}" for c in contenders if c.note]
    return "\n".join([markdown_table(headings, rows), *(["", *notes] if notes else [])])


# -- the record of a run ------------------------------------------------------------------------


def machine_record() -> str:
    """Date, processor, accelerator and versions, one line each."""
    import jax

    versions = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    found = jax.devices()
    devices = f"{len(found)} x {found[0].device_kind} ({found[0].platform})"
    load = f", load {os.getloadavg()[0]:.1f} at the end" if hasattr(os, "getloadavg") else ""
    return "\n".join(
        [
            f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
            f"- processor: {_processor()}, {os.cpu_count()} cores{load}",
            f"- devices: {devices}",
            f"- versions: {', '.join(versions)}",
        ]
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def publish(title: str, command: str, parts: Sequence[str], *, path: Path | None) -> None:
    """Print a result, and append it to the record at `path` unless that is None."""
    text = "\n\n".join([f"## {title}", f"`{command}`", machine_record(), *parts])
    print(text)
    if path is not None:
        before = path.read_text() if path.exists() else "# Results\n"
        path.write_text(f"{before.rstrip()}\n\n{text}\n")
        print(f"\nappended to {path}", file=sys.stderr)


def common_flags(description: str | None, *, steps: int, repeats: int) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=steps, help="steps in a run (%(default)s)")
    parser.add_argument("--repeats", type=int, default=repeats, help="timed rounds (%(default)s)")
    parser.add_argument("--only", default="", help="comma-separated parts of the names to run")
    parser.add_argument("--no-peers", action="store_true", help="leave Keras and PyTorch out")
    parser.add_argument("--no-record", action="store_true", help="do not append to RESULTS.md")
    return parser


def chosen(contenders: Sequence[Contender], only: str, baseline: str) -> list[Contender]:
    """Those whose name contains one of the parts in `only`; the baseline stays in any case."""
    parts = [part.strip() for part in only.split(",") if part.strip()]
    return [
        c for c in contenders if not parts or c.name == baseline or any(p in c.name for p in parts)
    ]
