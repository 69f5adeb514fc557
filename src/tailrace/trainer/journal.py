"""Where the results of executions go: history, records, and a run directory if there is one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from tailrace.devices.processes import distributed
from tailrace.records.history import History
from tailrace.records.records import Records
from tailrace.records.sinks import Finished, Sink
from tailrace.runs.writer import RunWriter
from tailrace.trainer.executions import Results


class Journal:
    """What a training has left behind so far.

    Args:
        run_dir: a directory that keeps it; None keeps it in memory. With several processes one of
            them writes.
        sink: something else that keeps it.
        leaving_out: kinds of records that are not for the directory.
    """

    def __init__(
        self, run_dir: Any = None, sink: Sink | None = None, leaving_out: Collection[str] = ()
    ) -> None:
        keeps = run_dir is not None and distributed.writes()
        self.sink: Sink | None = RunWriter(run_dir) if keeps else sink
        self.records = Records(None if self.sink is None else self.sink.stored)
        self.history = History()
        self._leaving_out = leaving_out

    def begin(self, first_step: int, microbatches: int, replicas: int) -> None:
        """Start a new history; records of before are forgotten."""
        self.history = History(first_step, microbatches, replicas)
        self.records.clear()

    def take_up(self, history: History, end: Any) -> None:
        """Go on with a fit of another process, whose run ended at a mark."""
        self.history = history
        if self.sink is not None:
            self.sink.take_up(end)

    def mark(self) -> Callable[[], Any]:
        """Mark what has come in so far. The call that is returned waits until the run directory has all
        of it: a checkpoint must not be ahead of its run."""
        return (lambda: None) if self.sink is None else self.sink.mark()

    @contextmanager
    def open(self, info: Mapping[str, Any]) -> Iterator[None]:
        """While results come in; `info` says what runs, ready for JSON."""
        self.records.runs.begin()
        try:
            with self.sink.fitting(info) if self.sink is not None else nullcontext():
                yield
        finally:
            self.records.runs.end()

    def add(self, results: Results) -> None:
        """Take in one execution."""
        for part in results.parts:
            self.records.add(part)
        self.history.add(results.scalars, results.weights)
        if self.sink is not None:
            parts = [part for part in results.parts if part.kind not in self._leaving_out]
            done = Finished(
                results.first_step, results.steps, parts, results.scalars, results.weights
            )
            self.sink.execution(done)

    def add_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Take in what a validation after `step` steps found."""
        self.history.add_validation(step, values)

    def one(self, results: Results) -> dict[str, Any]:
        """The values of one execution, one a step: means over microbatches and replicas."""
        alone = History(results.first_step, self.history.microbatches, self.history.replicas)
        alone.add(results.scalars, results.weights)
        return {name: alone[name] for name in alone}
