"""One call of `tr.Trainer.fit`, from its arguments to its end.

It opens what a fit needs (journal, outfeeds, signals, checkpoints), resumes from a checkpoint
directory, lets `Fit` run the steps, and closes everything however they end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tailrace.data.adapters import as_dataset
from tailrace.devices.processes.launched import tell_launcher
from tailrace.feeds.elements import effective_batch_size
from tailrace.program.compiling.compilations import listening
from tailrace.records.history import History
from tailrace.trainer.callbacks.callback import AnyTrainer, Callback, tell_all
from tailrace.trainer.checkpoints.saving import Saving, TakenUp
from tailrace.trainer.engine import Engine
from tailrace.trainer.fitting.fit import Fit
from tailrace.trainer.fitting.fit_progress import Duration, Progress
from tailrace.trainer.fitting.interrupts import meaning
from tailrace.trainer.fitting.notebook_view import progress_view
from tailrace.trainer.fitting.pace import Pace
from tailrace.trainer.fitting.validation import Validation
from tailrace.trainer.observation.description import describe
from tailrace.trainer.observation.journal import Journal


@dataclasses.dataclass
class FitCall:
    """The arguments of one call of `fit`.

    Attributes:
        dataset: the training data.
        duration: the requested duration.
        total: the number of steps; None if it is known only by reading the dataset.
        validation: when to validate, and on which data.
        callbacks: the callbacks.
        shown: whether to show a progress bar.
        saving: its checkpoints, if it has any.
        timeout_s: the longest wait for an element of the dataset.
        progress: its progress.
        seconds_per_step: the mean over all its steps; None if it made none.
    """

    dataset: Any
    duration: Duration
    total: int | None
    validation: Validation
    callbacks: list[Callback]
    shown: bool | None
    saving: Saving | None
    timeout_s: float | None
    progress: Progress
    seconds_per_step: float | None = None
    _begun: bool = False

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps per epoch; None if it is known only by reading the dataset."""
        if self.total is None or not self.duration.epochs:
            return None
        return self.total // self.duration.epochs

    @property
    def epochs_begun(self) -> int:
        """The number of passes over the data that were begun; repeating data has many."""
        progress = self.progress
        fast = as_dataset(self.dataset).fast
        # Repeating data has no end of an epoch that a fit would notice: passes are counted by
        # elements.
        if fast is not None and fast.repeat:
            return -(-progress.elements // fast.batches_per_epoch)
        return progress.epochs + (progress.steps > progress.epoch_start)

    def take_up(self, journal: Journal) -> TakenUp | None:
        """Resume this fit from the checkpoint directory, if possible; the journal gets its history."""
        taken = self.saving.take_up() if self.saving is not None else None
        if taken is not None:
            self.progress = taken.progress
            # The run directory is cut back to this mark when the journal opens it.
            journal.take_up(taken.history, taken.run_end)
        return taken

    def prepare(self, trainer: AnyTrainer, engine: Engine, journal: Journal, pace: Pace) -> Fit:
        """The fit, ready to run on the current program."""
        feed = engine.runner.infeeds[0]
        count, replicas = engine.accumulation.microbatches, engine.placement.replicas
        batch = effective_batch_size(feed.spec(), count * replicas)
        bar = progress_view(self.total, batch, self.shown, done=self.progress.steps)
        return Fit(
            trainer,
            engine,
            feed,
            self.dataset,
            journal,
            pace,
            self.progress,
            self.validation,
            self.callbacks,
            self.saving,
            bar,
            self.timeout_s,
        )

    def run(self, fit: Fit, taken: TakenUp | None, steps_per_execution: int | None) -> None:
        """Train to the end, or until something stops it; then save."""
        saving = self.saving
        # Signals are recorded while steps run, and raised again while `_open` closes the journal, which
        # may wait for a disk.
        with self._open(fit, steps_per_execution), fit.interrupts:
            self._begun = True
            tell_all(self.callbacks, lambda one: one.on_fit_begin(fit.trainer))
            if saving is not None:
                saving.begin(fit.parts, fresh=taken is None)
                if taken is not None:
                    fit.resume(taken)
            fit.journal.training_goes_on()
            fit.train(self.duration, self.steps_per_epoch)  # a second signal raises in it
            fit.agree()
            if fit.asked is not None:
                fit.collect()
                if saving is not None:
                    saving.save(wait=True)
                    tell_launcher(f"saved step {fit.engine.step}")
                # Only after the state is saved: the process is to end now.
                raise meaning(fit.asked)
        if saving is not None:  # after callbacks: one of them may restore the best state
            saving.save(ended=True, wait=True)

    @contextmanager
    def _open(self, fit: Fit, steps_per_execution: int | None) -> Iterator[None]:
        """Collect results however the fit ends, and call callbacks at its end."""
        engine, journal = fit.engine, fit.journal
        started, compiled, first = time.perf_counter(), engine.runner.compile_s, engine.step
        directory = None if self.saving is None else self.saving.directory

        def info() -> dict[str, Any]:
            found = describe(engine, steps_per_execution, fit.trainer.config)
            return {**found, "checkpoint": directory}

        try:
            with engine.delivering(), journal.open(info), fit.bar, listening(fit.note_compilation):
                try:
                    yield
                except BaseException:
                    fit.collect()  # steps before the failure are part of the history
                    raise
                fit.collect()
            if engine.step > first:
                # Without compiling: reports compare it with the time that stages take alone.
                took = time.perf_counter() - started - (engine.runner.compile_s - compiled)
                self.seconds_per_step = took / (engine.step - first)
        finally:
            # Also after an error: callbacks close their files there. Not of a fit that has not begun:
            # one of an earlier fit would end that again.
            history: History = journal.history
            begun = self.callbacks if self._begun else []
            tell_all(begun, lambda one: one.on_fit_end(fit.trainer, history))
