"""Collects the results of executions: history, records, and a run directory if there is one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import jax

from tailrace.base.messages import counted, note_once
from tailrace.base.spans.device_times import DeviceTimes
from tailrace.devices.processes import distributed
from tailrace.program.compiling.compilations import Compilation
from tailrace.records.columns import ValueFile
from tailrace.records.fingerprints import CHAIN
from tailrace.records.history import History
from tailrace.records.records import Records
from tailrace.records.sinks import Finished, Sink, Validated
from tailrace.runs.profiles import PROFILE
from tailrace.runs.tables.tables import READING
from tailrace.runs.writer import RunWriter
from tailrace.trainer.executions import Results
from tailrace.trainer.observation.logged_values import LoggedValues


class Journal:
    """The results of a training so far.

    Args:
        run_dir: a directory to store them in; None for memory. With several processes one of them
            writes.
        sink: another sink to store them in.
        leaving_out: kinds of records that are not stored in the directory.
        logged: additional values of the history.
        timed: whether a run directory gets the times of executions by activity; the loop then calls
            `began`.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        sink: Sink | None = None,
        leaving_out: Collection[str] = (),
        logged: LoggedValues | None = None,
        timed: bool = False,
    ) -> None:
        self.sink: Sink | None = sink
        if run_dir is not None and distributed.writes():
            # One process writes. The others have no sink, and keep records in memory.
            self.sink = RunWriter(run_dir)
        self.records = Records(None if self.sink is None else self.sink.stored)
        self.history = History()
        self.compilations: list[Compilation] = []
        self._leaving_out, self._logged = leaving_out, logged
        self._times = DeviceTimes() if timed and self.sink is not None else None
        self._resumed = self._is_open = False

    @property
    def run_dir(self) -> str | None:
        """The run directory; None if this process writes none."""
        return str(self.sink.directory) if isinstance(self.sink, RunWriter) else None

    def begin(self, first_step: int, microbatches: int, replicas: int) -> None:
        """Start a new history; earlier records are dropped.

        A run directory has each step once: rows of this step and later ones, whose steps were undone,
        are cut off when it is opened.
        """
        self._note_going_back(first_step)
        self._set_history(History(first_step, microbatches, replicas))
        self.records.clear()
        self._is_open = False

    def take_up(self, history: History, end: Mapping[str, Any] | None) -> None:
        """Continue a fit of another process, whose run ended at a mark.

        Raises:
            RunError: the run directory has another run.
        """
        self._note_going_back(history.first_step)
        if self.sink is not None:
            self.sink.take_up(end)
        self._set_history(history)
        self._resumed = True
        if isinstance(self.sink, RunWriter) and len(history) and not self.sink.holds_a_run:
            note_once(
                f"run_dir={str(self.sink.directory)!r} begins in the middle of a training: the fit is "
                f"resumed, and its {counted(len(history), 'step')} so far are not in that directory."
            )
        elif self.sink is None and end is not None and distributed.writes():
            note_once(
                "The fit that is resumed was stored in a run directory. Received: no run_dir=. Its "
                "steps from here on are not stored; give run_dir= to continue there."
            )

    def check_belongs(self, end: Mapping[str, Any] | None) -> None:
        """Refuse a run directory that has another run than that of a mark."""
        if isinstance(self.sink, RunWriter):
            self.sink.check_belongs(end)

    def _note_going_back(self, first_step: int) -> None:
        """Tell the sink where a fit begins before the end of the last one (`restore`, a best state)."""
        end = self.history.first_step + len(self.history)
        if self.sink is not None and end > first_step:
            self.sink.go_back(first_step, end)

    def _set_history(self, history: History) -> None:
        self.history = history
        if isinstance(self.sink, RunWriter):
            # With a disk to write to, millions of steps need not stay in memory.
            history.keep_in(ValueFile(self.sink.unnamed_file))

    def rewind(self, step: int, said: Mapping[str, Any]) -> None:
        """Record that training went back to a step; a run directory is truncated."""
        if isinstance(self.sink, RunWriter):
            self.sink.rewind(step, said)

    def flush(self) -> None:
        """Wait until the run directory has everything."""
        if self.sink is not None:
            self.sink.flush()

    def mark(self) -> Callable[[], Any]:
        """Mark the current end.

        The returned function waits until the run directory has everything before it: a checkpoint must
        not be ahead of its run.
        """
        return (lambda: None) if self.sink is None else self.sink.mark()

    @contextmanager
    def open(self, info: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """While results come in; a fit on batches of several shapes opens it again for each.

        Args:
            info: makes the description of what runs, ready for JSON. It is called only if something
                keeps it: a catalogue of a thousand tensors takes tens of milliseconds.
        """
        self.records.runs.begin()
        # `begin` clears the flag: a second `open` without one belongs to the same fit, whose
        # records continue.
        goes_on, self._is_open = self._is_open, True
        try:
            with (
                self.sink.fitting(info(), goes_on) if self.sink is not None else nullcontext(),
                self._times.open() if self._times is not None else nullcontext(),
            ):
                yield
        finally:
            self.records.runs.end()

    def began(self, ready: jax.Array, dispatches: int = 1) -> None:
        """Note that an execution was dispatched, in parts; `ready` is ready at its end."""
        if self._times is not None:
            self._times.began(ready, dispatches)

    def training_goes_on(self) -> None:
        """Measure rates from now on: what came before (callbacks, a validation) is not training."""
        if self._logged is not None:
            self._logged.restart()

    def add(self, results: Results) -> Results:
        """Add an execution that has just ended; returns it with the logged values."""
        if self._logged is not None:
            results = self._logged.complete(results)
        self.history.add(results.scalars, results.weights, arrays=results.arrays)
        if results.arrays and self.sink is not None:
            note_once(
                f"A run directory has scalars by step. The arrays of aux, "
                f"{', '.join(map(repr, results.arrays))}, are in trainer.history and in checkpoints."
            )
        if not results.steps:  # its first step was a bad one: nothing happened
            return results
        for part in results.parts:
            self.records.add(part)
        first, steps, marks = results.first_step, results.steps, dict(results.fingerprint)
        if marks:
            # Each link depends on all before it: two runs whose last links agree agreed throughout.
            marks[CHAIN] = self.history.add_fingerprint(first, steps, marks)
        if self.sink is not None:
            parts = [part for part in results.parts if part.kind not in self._leaving_out]
            done = Finished(
                first,
                steps,
                parts,
                results.scalars,
                results.weights,
                fingerprint=marks,
                elements=results.elements,
                reading=self._reading(results),
                times=() if self._times is None else self._times.ended(),
            )
            self.sink.execution(done)
        return results

    def add_profile(self, text: str) -> None:
        """Store a profile in the run directory, if there is one."""
        if isinstance(self.sink, RunWriter):
            self.sink.keep(PROFILE, text)

    def _reading(self, results: Results) -> dict[str, int]:
        """The elements that an execution consumed, for an audit."""
        if results.reading is None:
            return {}
        epoch, first, count = results.reading
        # The first execution after a resume says so: an audit must not take its elements for read
        # twice.
        resumed, self._resumed = int(self._resumed), False
        fit = self.history.first_step
        return dict(zip(READING, (fit, epoch, first, count, resumed), strict=True))

    def add_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Add the results of a validation after `step` steps."""
        self.history.add_validation(step, values)
        if self.sink is not None:
            self.sink.validation(Validated(step, dict(values)))
        self.training_goes_on()

    def add_compilation(self, compilation: Compilation) -> None:
        """Add a compilation."""
        self.compilations.append(compilation)
        if self.sink is not None:
            self.sink.compilation(dataclasses.asdict(compilation))

    def one(self, results: Results) -> dict[str, Any]:
        """The values of one execution, one per step: means over microbatches and replicas."""
        # A history of its own, so that means and weights follow the rules of the history itself.
        alone = History(results.first_step, self.history.microbatches, self.history.replicas)
        alone.add(results.scalars, results.weights)
        return {name: alone[name] for name in alone}
