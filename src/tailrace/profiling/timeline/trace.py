"""`tr.trace`: records a `with` block as a timeline for Perfetto."""

from __future__ import annotations

import atexit
import itertools
import os
from pathlib import Path
from typing import IO

from tailrace.base.checks import check_count
from tailrace.base.messages import logger
from tailrace.base.paths import check_path
from tailrace.base.spans.recorder import Recorder
from tailrace.base.spans.span import seconds_of_a_span
from tailrace.errors import OptionError
from tailrace.profiling.programs.device_operations import (
    DeviceProfiler,
    ProgramRun,
    program_runs,
)
from tailrace.profiling.timeline.perfetto_file import check_perfetto
from tailrace.profiling.timeline.writing import Cost, write

VARIABLE = "TAILRACE_TRACE"


class Trace:
    """Records events between its start and its end, and writes them to a file.

    Use it as `with tr.trace(directory): ...`; see there.

    Attributes:
        path: the file, once it is written; None before, and if nothing happened.
        cost: the time of recording and writing.
        runs: the program runs on devices, as far as operations were recorded.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        executions: range | None,
        operations: int | None,
    ) -> None:
        self.directory = check_path("trace", directory)
        self.path: Path | None = None
        self.cost: Cost | None = None
        self.runs: tuple[ProgramRun, ...] = ()
        self._executions, self._operations = executions, operations
        self._recorder: Recorder | None = None

    def __enter__(self) -> Trace:
        if self._recorder is not None:
            raise OptionError("This trace is open already. Make another one: tr.trace(directory).")
        check_perfetto()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"A timeline is written into a directory, and {str(self.directory)!r} cannot be one: "
                f"{error.strerror}. Give the path of a directory, or a new one."
            ) from None
        profiler = None if self._operations == 0 else DeviceProfiler(self._operations)
        self._recorder = Recorder(self._executions, profiler)
        self._recorder.open()
        if profiler is not None and self._operations is None and self._executions is None:
            profiler.start()  # records all programs, even those that Tailrace does not dispatch
        return self

    def __exit__(self, *_: object) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        recorder.close()
        operations = recorder.profiler.operations if recorder.profiler is not None else ()
        self.runs = tuple(program_runs(operations))
        # Without events there is no file: an empty one would look like a failure.
        if not (recorder.slices or recorder.counts or recorder.ran or self.runs):
            return
        path, stream = _new_file(self.directory)
        with stream:
            self.cost = write(stream, recorder, seconds_of_a_span())
        self.path = path
        logger.info(f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB). {self.cost}")

    def __repr__(self) -> str:
        return f"Trace({str(self.path or self.directory)!r})"


def trace(
    directory: str | os.PathLike[str],
    *,
    executions: range | None = None,
    operations: int | None = 2,
) -> Trace:
    """Record a `with` block as a timeline that https://ui.perfetto.dev opens.

    It shows the threads of the host (waiting for data, reading, copying, dispatching, collecting,
    callbacks, checkpoints, compiling), the executions, operations on the devices by scope, ticks of
    pipelines, and counters. The file is written even if the block raises. Blocks may be nested.

    Args:
        directory: the directory for a new file `trace-<number>.pftrace`.
        executions: the executions to record, counted from 0 within the block: `range(3, 6)`.
        operations: for how many executions to record the operations on the devices, which costs most;
            0 for none, None for all, including JAX programs that Tailrace does not run.

    Raises:
        OptionError: `executions` or `operations` has an invalid value.

    Example:
        >>> import optax, numpy as np, tailrace as tr, tempfile
        >>> x = np.ones((8, 4), np.float32)
        >>> trainer = tr.Trainer(lambda w, x: ((x @ w) ** 2).mean(), optax.sgd(0.1), x[0])
        >>> with tr.trace(tempfile.mkdtemp()) as timeline:
        ...     history = trainer.fit(tr.batches(x, 4, repeat=True), steps=5, progress=False)
        >>> timeline.path.suffix
        '.pftrace'
    """
    if executions is not None and not (isinstance(executions, range) and executions.step == 1):
        raise OptionError(
            f"executions is a range of their numbers, such as range(3, 6). Received: {executions!r}."
        )
    if operations is not None:
        more = " (0: of no execution), or None (of all)"
        operations = check_count("operations", operations, at_least=0, error=OptionError, more=more)
    return Trace(directory, executions, operations)


def as_trace(given: str | os.PathLike[str] | Trace) -> Trace:
    """Parse the value of `fit(trace=...)`: a directory, or a trace that is not open."""
    return given if isinstance(given, Trace) else trace(given)


def trace_process() -> None:
    """Trace this process until it exits, if the environment variable is set."""
    directory = os.environ.get(VARIABLE)
    if directory:
        timeline = trace(directory).__enter__()
        atexit.register(timeline.__exit__)


def _new_file(directory: Path) -> tuple[Path, IO[bytes]]:
    for number in itertools.count():
        path = directory / f"trace-{number:03}.pftrace"
        try:
            # Created at once, not checked first: two processes may trace into one directory.
            return path, path.open("xb")
        except FileExistsError:
            continue
    raise AssertionError
