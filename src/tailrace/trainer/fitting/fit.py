"""One running `fit`: dispatches executions and collects their results, in order."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from tailrace.base.messages import logger
from tailrace.base.spans.span import span
from tailrace.data.adapters import as_dataset
from tailrace.devices.processes import distributed
from tailrace.errors import (
    DataError,
    DataExhausted,
    DeviceMemoryError,
    WaitStopped,
)
from tailrace.feeds.infeed import InfeedQueue
from tailrace.feeds.waiting import Patience
from tailrace.program.compiling.compilations import Compilation
from tailrace.program.running.agreement import agreed_least, agreed_seconds
from tailrace.program.running.result_packing import MOST_BYTES, start_copying
from tailrace.program.step.accumulation import check_weights
from tailrace.records.history import leading, one_of
from tailrace.trainer.callbacks.callback import (
    AnyTrainer,
    Callback,
    Execution,
    Reported,
    listens,
    notify,
    tell_all,
)
from tailrace.trainer.checkpoints.saving import FitParts, Saving, TakenUp
from tailrace.trainer.engine import Engine
from tailrace.trainer.executions import Results, Ticket
from tailrace.trainer.fitting.fit_progress import Duration, Progress
from tailrace.trainer.fitting.interrupts import Interrupts, meaning
from tailrace.trainer.fitting.pace import Pace
from tailrace.trainer.fitting.progress_bar import ProgressView
from tailrace.trainer.fitting.step_counts import (
    ended_early,
    less_than_a_step,
    note_left_out,
    too_short,
)
from tailrace.trainer.fitting.validation import Validation
from tailrace.trainer.observation.duties import Guarding, record_compilation
from tailrace.trainer.observation.journal import Journal
from tailrace.trainer.observation.monitoring import Monitor


class Fit:
    """The loop of `tr.Trainer` around its engine.

    Without callbacks, an execution is dispatched while the previous one runs, so that the device never
    waits for the host. Callbacks must see the state that belongs to their values: with them, an
    execution is collected before the next one is dispatched.

    Args:
        trainer: the argument of callbacks.
        engine: the engine, with the program of this dataset.
        feed: the feed of that program.
        dataset: the dataset that the feed reads.
        journal: receives the results.
        pace: the length of executions.
        progress: the progress so far.
        validation: when to validate.
        callbacks: the callbacks.
        saving: its checkpoints, if it has any.
        bar: the progress bar.
        timeout_s: the longest wait for an element of the dataset, in seconds; None for no limit.
    """

    def __init__(
        self,
        trainer: AnyTrainer,
        engine: Engine,
        feed: InfeedQueue,
        dataset: object,
        journal: Journal,
        pace: Pace,
        progress: Progress,
        validation: Validation,
        callbacks: list[Callback],
        saving: Saving | None,
        bar: ProgressView,
        timeout_s: float | None = None,
    ) -> None:
        self.trainer, self.engine, self.feed, self.journal = trainer, engine, feed, journal
        self.pace, self.progress, self.validation = pace, progress, validation
        self.callbacks, self.saving, self.bar = callbacks, saving, bar
        self.stopping = progress.stopped
        self.interrupts = Interrupts()
        # A wait for the dataset ends when the fit is to end: otherwise one Ctrl-C would never
        # return while the dataset blocks.
        feed.patience = Patience(timeout_s, stopped=lambda: self._leaves)
        self._dataset, self._announced = dataset, ""
        # A resumed fit has skipped steps already, and has a latest validation for its callbacks.
        self._guarding = Guarding(engine, journal.history)
        self.reported: Reported | None = None
        validation.latest = journal.history.last_validation()
        self._pending: deque[Ticket] = deque()
        watched = [getattr(one, "watched", None) for one in callbacks]
        watched += [] if saving is None else [saving.monitor]
        # Which metrics a step has is known only from its results; `collect` checks monitored names
        # at the first of them, not at the end of an epoch.
        self._unchecked = [one for one in watched if isinstance(one, Monitor)]
        # A callback must see the state of the steps it is called for; a sentinel must compare before
        # the next execution overwrites it.
        waits = engine.live or engine.sentinel is not None or any(map(listens, callbacks))
        self._in_flight = 0 if waits else 1
        # Only checkpoints need the processes to agree: saving is a collective, which all of them
        # enter or none.
        self._together = saving is not None and distributed.process_count() > 1
        self._signal: int | None = None

    def stop(self) -> None:
        """End the fit after the running execution, also if it is resumed first."""
        self.stopping = self.progress.stopped = True

    @property
    def parts(self) -> FitParts:
        """The parts of the fit that its checkpoints contain."""
        return FitParts(self.feed, self.callbacks, self.journal, self.progress, self.pace)

    @property
    def asked(self) -> int | None:
        """The signal that ends the fit; with several processes, the one that all know of."""
        return self._signal if self._together else self.interrupts.asked

    def agree(self) -> bool:
        """Whether a checkpoint is due, the same in all processes. A signal to one counts for all."""
        due = self.saving is not None and self.saving.due
        if not self._together:
            return due
        # One meeting for both questions: it is held after every execution.
        answers = distributed.meet({"due": due, "signal": self.interrupts.asked})
        signals = [said["signal"] for said in answers if said["signal"] is not None]
        self._signal = signals[0] if signals else self._signal
        # Checkpoints by time are due at slightly different moments; all follow the first process.
        return answers[0]["due"]

    @property
    def _leaves(self) -> bool:
        """Whether the fit ends here: by a signal, a callback or another thread."""
        return self.stopping or self.interrupts.asked is not None

    def resume(self, taken: TakenUp) -> None:
        """Go to where a checkpoint was taken. A signal ends it: the checkpoint is there already."""
        assert self.saving is not None
        usual = self.feed.patience
        # Not `stop`: a fit that was stopped before it was killed still needs its position.
        signalled = dataclasses.replace(usual, stopped=lambda: self.interrupts.asked is not None)
        self.feed.patience = signalled
        try:
            self.saving.restore_position(self.parts, taken, self._dataset)
        except WaitStopped:
            logger.info("A signal ended the skipping of elements that were used before.")
        finally:
            self.feed.patience = usual
        self.agree()
        if self.asked is not None:
            raise meaning(self.asked)

    # -- how long -------------------------------------------------------------------------------

    def train(self, duration: Duration, steps_per_epoch: int | None) -> None:
        """Train until `duration` is reached, or something stops the fit."""
        progress = self.progress
        if duration.steps is not None:
            self._steps(duration.steps, duration.steps, too_short)
            self._end_epoch()  # not counted: a longer fit would continue the same pass
            return
        # An epoch in which the fit was stopped ends as others do.
        while not progress.reached(duration) and (
            not self.stopping or (self.asked is None and progress.steps > progress.epoch_start)
        ):
            # Not where a fit was resumed in the middle of a pass: it continues there.
            if progress.epochs and progress.steps == progress.epoch_start:
                self._restart(duration)
            self._epoch(steps_per_epoch)
            if self.asked is None and progress.steps > progress.epoch_start:
                self._end_epoch()
                progress.epochs, progress.epoch_start = progress.epochs + 1, progress.steps

    def _restart(self, duration: Duration) -> None:
        """Read the dataset from its start again."""
        source = as_dataset(self._dataset)
        if not source.restartable:
            raise DataError(
                f"fit({duration}) goes through the dataset again and again, but {source.name} "
                f"can be read only once. Give a re-iterable, a function that makes an iterator, or "
                f"use fit(steps=...)."
            )
        # A dataset of which nothing was read is at its start already.
        if self.feed.position:
            self.feed.restart(self._dataset, self.progress.epoch)

    def _steps(self, until: int, asked: int, short: Callable[..., str]) -> None:
        """Train until exactly `until` steps of this fit are done.

        Args:
            until: the number of steps.
            asked: the number of them that the whole dataset should have had.
            short: makes the message for a shorter dataset.
        """
        progress = self.progress
        while progress.steps < until and not self.stopping:
            try:
                self._execute(until - progress.steps)
            except DataExhausted as error:
                # The message gives the dataset's whole length, so count what is left of it.
                missing = (until - progress.steps) * self.engine.runner.elements_per_pass
                found = self.feed.position + self.feed.remaining(missing)
                done = progress.steps - progress.epoch_start
                message = short(self.engine, asked, found, done)
                raise DataExhausted(message) from error

    def _epoch(self, count: int | None) -> None:
        """Train to the end of the dataset, which is after `count` steps if its length is right."""
        start, source = self.progress.epoch_start, as_dataset(self._dataset)
        if count is not None and source.exact and source.fast is not None:
            self._steps(start + count, count, ended_early)
            return
        # Whole executions until one cannot be filled; what is left is then counted, and run as a
        # shorter one. The end itself is read too: loaders have code after their last element.
        while not self.stopping:
            left = 0 if count is None else start + count - self.progress.steps
            try:
                self._execute(left if left > 0 else None)
            except DataExhausted:
                break
        if self.stopping:
            return
        per_step = self.engine.runner.elements_per_pass
        left = self.feed.remaining(self.pace.next(None) * per_step)
        # Processes may have different numbers of elements left, and run only steps that all of them
        # have.
        more = agreed_least(left // per_step) or 0
        if not more and self.progress.steps == start:  # the loop over epochs would never end
            raise DataExhausted(less_than_a_step(self.engine, left, source.when_empty))
        self._steps(self.progress.steps + more, more, ended_early)
        note_left_out(left, per_step)

    # -- executions -----------------------------------------------------------------------------

    def _execute(self, remaining: int | None) -> None:
        """Dispatch one execution, and do what is due after it."""
        engine, pace, progress = self.engine, self.pace, self.progress
        until = self.validation.until_next(progress.steps)
        # An execution ends where a validation is due: it must see the state of that step.
        within = min(filter(None, (remaining, until)), default=None)
        length = engine.runner.aligned(engine.step, pace.next(within), engine.sight.period)
        rest = None if remaining is None else remaining - length
        measuring = pace.is_measuring
        # While lengths are still being tried, the next one is unknown: reading ahead would read the
        # wrong number.
        following = 0 if pace.chosen is None or rest == 0 else pace.next(rest)
        compiled_before = engine.runner.compile_s
        started = time.perf_counter()
        try:
            ticket = engine.dispatch(length, following=following)
        except WaitStopped:
            # A signal to this process ends the others as well.
            self.agree()
            self.stopping = True
            return
        self._pending.append(ticket)
        self.journal.began(ticket.ready)
        # Many small arrays, one after the other, would each wait for the device again.
        start_copying((list(ticket.emitted.values()), ticket.digests), MOST_BYTES)
        # At dispatch, not at collection: it says what the next execution starts from. A failure
        # sets it back.
        progress.steps += length
        progress.elements += length * engine.elements_per_step
        if measuring:
            # The only wait in this loop, and only for the first few executions.
            jax.block_until_ready(ticket.ready)
            # All processes must choose the same length, so they use the same time:
            # `agreed_seconds`.
            seconds = time.perf_counter() - started - (engine.runner.compile_s - compiled_before)
            pace.measured(length, agreed_seconds(seconds))
            logger.info(pace.reason)
        if pace.chosen is not None:
            timed, period = pace.seconds_per_step, engine.sight.period
            engine.runner.fix(engine.loop_state, period, timed, rest)
        # With one in flight, this waits for the execution before the one just dispatched, while
        # that one runs.
        self.collect(self._in_flight)
        if until == length:
            self._validate()
        if self.agree():
            assert self.saving is not None
            self.collect()
            self.saving.save()
        if self.asked is not None:
            self.stopping = True

    def collect(self, in_flight: int = 0) -> None:
        """Collect results until at most `in_flight` executions are in flight."""
        while len(self._pending) > in_flight:
            try:
                results = self.engine.collect(self._pending[0])
            except DeviceMemoryError:
                self._drop_pending()  # they started from what that execution did not make
                raise
            except Exception:
                self._pending.popleft()
                raise
            # Only now, so that an execution is recorded though an interrupt has ended the wait for it.
            self._pending.popleft()
            results = self.journal.add(results)
            if results.weights is not None:  # after the journal has what was trained
                check_weights(results.weights, partial(_place_of, results.first_step))
            # Before callbacks: a bundle needs the state, which one of them may change.
            if self._guarding.keep(results):
                self._drop_pending()  # executions after the bad step changed nothing
            try:
                self._tell(results)
            except Exception:
                self._check(results)  # if a guard has stopped, that is the error
                raise
            self._check(results)

    def _tell(self, results: Results) -> None:
        """Tell callbacks of an execution: one that is recorded, so that they can read it."""
        if self.callbacks and results.steps:
            values = self.journal.one(results)
            execution = Execution(results.first_step, results.steps, values)
            self.reported = Reported(execution.first_step, execution.steps)
            try:
                notify(self.callbacks, self.trainer, execution, self.reported)
            finally:
                self.reported = None
        self.bar.advance(results.steps, one_of(results.scalars), leading(results.scalars))

    def _check(self, results: Results) -> None:
        """Raise the error of an execution, if it has one: its steps are recorded, and sent."""
        # Which values a step has is known now, long before the epoch is over whose end needs them.
        while self._unchecked and results.failure is None:
            self._unchecked.pop().check_logged(self.journal.history.step_names)
        self._guarding.end(results)

    def _drop_pending(self) -> None:
        """Forget executions whose steps do not count; the engine is at the last step that does."""
        self._pending.clear()
        progress = self.progress
        lost = progress.first_step + progress.steps - self.engine.step
        progress.steps -= lost
        progress.elements -= lost * self.engine.elements_per_step

    def note_compilation(self, compilation: Compilation) -> None:
        """A program is about to be compiled, or was."""
        begins, text = not compilation.ended, f"{compilation.purpose}: {compilation.cause}"
        # One that ends in another thread was not announced, and leaves the text of another one.
        if begins or text == self._announced:
            self._announced = text if begins else ""
            self.bar.compiling(self._announced)
        record_compilation(self.journal, compilation)

    # -- between executions ---------------------------------------------------------------------

    def _validate(self) -> None:
        """Evaluate on the validation data; all earlier results have arrived."""
        self.collect()
        with span("validation", step=self.engine.step):
            values = self.validation.run()
        self.journal.add_validation(self.engine.step, values)
        latest = self.validation.latest
        tell_all(self.callbacks, lambda one: one.on_validation_end(self.trainer, dict(latest)))
        if self.saving is not None and not self.validation.at_epochs:
            self.saving.look(self.validation.latest)  # at epochs, once they are closed

    def _end_epoch(self) -> None:
        """Validate and call callbacks, once; not if an interrupt ended the epoch, or it has no step."""
        progress = self.progress
        if self.asked is not None or progress.steps in (progress.epoch_start, progress.closed_at):
            return
        self.collect()
        if self.validation.at_epochs:
            self._validate()
        if self.callbacks or self.saving is not None:
            logs = {**self._epoch_means(), **self.validation.latest}
            epoch = progress.epoch
            tell_all(self.callbacks, lambda one: one.on_epoch_end(self.trainer, epoch, dict(logs)))
            progress.closed_at = progress.steps  # before a checkpoint that says so
            if self.saving is not None:
                self.saving.look(logs)

    def _epoch_means(self) -> dict[str, float]:
        """The means of loss and metrics over the steps of the current epoch."""
        history, first = self.journal.history, self.progress.epoch_start
        found = {name: history[name][first:] for name in history.step_names}
        return {name: float(v.mean(dtype=np.float64)) for name, v in found.items() if len(v)}


def _place_of(first_step: int, index: tuple[int, ...]) -> str:
    """The place of a weight in the training, from its index in those of an execution."""
    parts = zip(
        ("step", "microbatch", "replica"), (first_step + index[0], *index[1:]), strict=False
    )
    trained = "; the state was trained with it"
    return ", ".join(f"{name} {number}" for name, number in parts) + trained
