"""The fits of a trainer: one at a time, and what one leaves for the next."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from tailrace.data.adapters import as_dataset
from tailrace.errors import DataExhausted, ElementError, OptionError, ProducerError, ProgramError
from tailrace.feeds.infeed import InfeedQueue
from tailrace.feeds.waiting import Patience
from tailrace.profiling.timeline.trace import Trace
from tailrace.trainer.callbacks.callback import AnyTrainer
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.checkpoints.passes import Passes
from tailrace.trainer.checkpoints.saving import Saving, saving_of
from tailrace.trainer.engine import Engine
from tailrace.trainer.fitting.fit import Fit
from tailrace.trainer.fitting.fit_call import FitCall
from tailrace.trainer.fitting.fit_progress import Duration
from tailrace.trainer.fitting.pace import Pace, pace_for
from tailrace.trainer.fitting.validation import Validation
from tailrace.trainer.observation.journal import Journal


class Fits:
    """Runs calls of `fit`, and keeps what outlasts them.

    Args:
        engine: the engine.
        journal: receives the results.
        steps_per_execution: the given number of steps per dispatch; None for automatic.
        observe_bytes: the most bytes of one execution's records on the device.

    Attributes:
        steps_per_execution: the given number of steps per dispatch; None for automatic.
        epochs: the number of epochs begun, over all fits.
        kept: the number of fits with checkpoints.
        seconds_per_step: the mean over the latest fit that made steps; None before that.
    """

    def __init__(
        self, engine: Engine, journal: Journal, steps_per_execution: int | None, observe_bytes: int
    ) -> None:
        self.epochs = self.kept = 0
        self.seconds_per_step: float | None = None
        self._engine, self._journal = engine, journal
        self.steps_per_execution, self._observe_bytes = steps_per_execution, observe_bytes
        self._pace: Pace | None = None
        self._passed: Saving | None = None  # the latest fit that was finished before
        self._running: Fit | None = None
        self._turn = threading.Lock()
        self._thread: int | None = None  # of the running fit

    def check_alone(self) -> None:
        """Raise an error if a fit is running: there is one state, and one place in it."""
        if self._turn.locked():
            raise _not_alone()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The turn of one fit, from its arguments on: another thread may call `fit` meanwhile."""
        if not self._turn.acquire(blocking=False):
            raise _not_alone()
        self._thread = threading.get_ident()
        try:
            with self._engine.placement.outside():
                yield
        finally:
            self._thread = None
            self._turn.release()

    def check_thread(self, what: str) -> None:
        """Refuse what another thread does to the state of a running fit; a callback may do it."""
        thread = self._thread
        if thread is not None and thread != threading.get_ident():
            raise ProgramError(
                f"A fit of this trainer is running, and its steps go on meanwhile: {what} from "
                f"another thread would belong to another step. Do it in a callback, which runs "
                f"between executions, or after the fit."
            )
        self._check_reported()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Say why the state cannot be read: by another thread while a fit runs, or in a step that it
        does not belong to."""
        self._check_reported()
        try:
            with self._engine.placement.outside():
                yield
        except (RuntimeError, ValueError) as error:
            # JAX's words for an array that an execution has overwritten.
            if self._turn.locked() and "deleted" in str(error):
                raise ProgramError(
                    "The executions of a running fit overwrite the state of its trainer, so that "
                    "another thread cannot read it. Read it, evaluate and predict in a callback, or "
                    "after the fit."
                ) from error
            raise

    def _check_reported(self) -> None:
        reported = None if self._running is None else self._running.reported
        if reported is not None and self._thread == threading.get_ident():
            reported.check_reads()

    def stop(self) -> None:
        """End the current fit after the running execution."""
        if self._running is not None:
            self._running.stop()

    def saving(
        self,
        checkpoint: Checkpoint | str | os.PathLike[str] | None,
        duration: Duration,
        validation: Validation,
    ) -> Saving | None:
        """The checkpoints of the next fit, which is one of several in their directory."""
        saving = saving_of(checkpoint, self.kept, self._engine, duration)
        run_dir = self._journal.run_dir
        if saving is not None and run_dir is not None and _same_place(run_dir, saving.directory):
            raise OptionError(
                f"A run and its checkpoints are in two directories. Received: {run_dir!r} as run_dir= "
                f"and as checkpoint=. Give another one, such as {os.path.join(run_dir, 'kept')!r}."
            )
        if saving is not None and saving.monitor is not None:
            saving.monitor.check_validates("tr.Checkpoint", "best", validation.has_data)
        return saving

    def pace(self, engine: Engine) -> Pace:
        """The pace on the engine's current program: the one found before, if it still applies."""
        return pace_for(engine, self.steps_per_execution, self._observe_bytes, self._pace)

    @property
    def length_reasons(self) -> tuple[str, ...]:
        """The reason for the length of executions, if it was chosen."""
        return (
            (self._pace.reason,)
            if self._pace is not None and self.steps_per_execution is None
            else ()
        )

    def run(self, trainer: AnyTrainer, call: FitCall, trace: Trace | None) -> None:
        """One fit, from the beginning or from a checkpoint.

        Args:
            trainer: the argument of callbacks.
            call: the arguments of the fit.
            trace: its timeline; None for none.
        """
        call.validation.check_readable(call.duration, call.total)
        with (
            trace if trace is not None else nullcontext(),
            call.saving.open() if call.saving is not None else nullcontext(),
        ):
            # Also of a fit that fails: fits are numbered as the script makes them, whatever becomes
            # of them.
            self.kept += call.saving is not None
            if call.saving is None and self._passed is not None:
                self._passed.check_last(self._journal)
            self._run(trainer, call)

    def _run(self, trainer: AnyTrainer, call: FitCall) -> None:
        engine, journal, feed = self._engine, self._journal, None
        # Before `use`: a finished fit needs no program, and so no compilation.
        taken = call.take_up(journal)
        try:
            passes = None
            if taken is not None:
                passes = Passes(call.dataset, taken.progress, taken.position)
                passes.set_out()
            if taken is not None and passes is not None and taken.finished:
                self._pass_by(call, passes)
                taken.put_states(call.callbacks)  # the script may ask them what they have seen
                self._passed = call.saving
                return
            # In the order of its epoch. A resumed fit has a position, and is brought there later.
            feed = engine.use(call.dataset, call.timeout_s, call.progress.first_epoch)
            # After `use`: which elements, and so how many bytes a step reads, is known only now.
            self._pace = self.pace(engine)
            # Before the first dispatch: the capacity is compiled in.
            engine.runner.capacity = self._pace.capacity(engine.runner.capacity, call.total)
            if taken is None:
                microbatches = engine.accumulation.microbatches
                journal.begin(engine.step, microbatches, engine.placement.replicas)
            else:
                # Those of the previous fit; the history continues from the checkpoint, records from the
                # run directory.
                journal.records.clear()
                if call.saving is not None:
                    call.saving.note_later(journal)
                self._pace.choose_as(taken.pace)
            self._running = call.prepare(trainer, engine, journal, self._pace)
            call.run(self._running, taken, self.steps_per_execution)
            self.seconds_per_step = call.seconds_per_step or self.seconds_per_step
        finally:
            self._running = None
            # Also after a failure: the next fit must shuffle differently from the pass that was begun.
            self.epochs = call.progress.first_epoch + call.epochs_begun
            if feed is not None:
                engine.let_go(call.dataset, feed)

    def _pass_by(self, call: FitCall, passes: Passes) -> None:
        """Bring a dataset to where a finished fit has left it: later fits continue from there."""
        dataset, source = call.dataset, as_dataset(call.dataset)
        if source.fast is not None or passes.is_there:
            return
        # If it has become shorter, or raises, the next fit reports it.
        with suppress(DataExhausted, ProducerError, ElementError):
            if not source.continues:
                with InfeedQueue(dataset, timeout_s=call.timeout_s) as queue:
                    queue.spec()
                    passes.bring(queue)
                    queue.leave()
                return
            feed = self._engine.use(dataset, call.timeout_s)
            assert isinstance(feed, InfeedQueue)
            feed.patience = Patience(call.timeout_s)
            passes.bring(feed)
            self._engine.let_go(dataset, feed)


def _same_place(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _not_alone() -> ProgramError:
    return ProgramError(
        "A trainer runs one fit at a time, and one is running. Call this after it has ended (a "
        "callback ends it with trainer.stop()), or make a second trainer."
    )
