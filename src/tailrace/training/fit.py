"""One `fit` while it runs: executions go out ahead, their results come in one behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tailrace.errors import DataExhausted
from tailrace.feeds.infeed import InfeedQueue
from tailrace.messages import logger, note_once
from tailrace.program.running.agreement import agreed_least, agreed_seconds
from tailrace.program.running.engine import LoopRunner
from tailrace.program.running.executable import STOPPED, Numbers
from tailrace.program.tracing.tap_selection import Sight
from tailrace.records.history import History, split_emission
from tailrace.records.records import take_records
from tailrace.records.sinks import Finished
from tailrace.taps.frame import Emission
from tailrace.taps.tap import StopOnNonfinite
from tailrace.training.callbacks import Callback, Execution, tell
from tailrace.training.nonfinite_guard import diagnose, first_bad_step
from tailrace.training.progress import ProgressBar

if TYPE_CHECKING:
    from tailrace.training.trainer import Trainer


class Fit:
    """One `fit` while it runs: dispatches ahead, and takes in results one execution behind."""

    def __init__(
        self,
        trainer: Trainer,
        runner: LoopRunner,
        infeed: InfeedQueue,
        known: dict[Any, Any],
        sight: Sight,
        callbacks: list[Callback],
        bar: ProgressBar,
    ) -> None:
        self.trainer, self.runner, self.infeed, self.known = trainer, runner, infeed, known
        self.sight, self.callbacks, self.bar = sight, callbacks, bar
        self.pending: deque[tuple[int, int, int, dict[Hashable, Emission], Any]] = deque()
        self.guarded = any(isinstance(one.tap, StopOnNonfinite) for one in sight.chosen)
        self.live = any(getattr(one.tap, "live", False) for one in sight.chosen)
        runner.keep_elements = self.guarded

    def steps(self, count: int) -> None:
        """Exactly so many steps."""
        remaining = count
        while remaining and not self.trainer.stopping:
            try:
                remaining -= self.execute(remaining)
            except DataExhausted as error:
                done = count - remaining
                found = self.infeed.position + self.infeed.remaining(
                    remaining * self.runner.elements_per_pass
                )
                raise DataExhausted(self.trainer.too_short(count, found, done)) from error

    def epoch(self, count: int | None) -> None:
        """To the end of the dataset; `count` steps if that is known."""
        if count is not None:
            self.steps(count)
            return
        while not self.trainer.stopping:
            try:
                self.execute(None)
            except DataExhausted:
                break
        if self.trainer.stopping:
            return
        per_step = self.runner.elements_per_pass
        assert self.trainer.pace is not None
        left = self.infeed.remaining(self.trainer.pace.next(None) * per_step)
        self.steps(agreed_least(left // per_step) or 0)
        note_left_out(left, per_step)

    def execute(self, remaining: int | None) -> int:
        """Dispatch one execution; returns how many steps it has."""
        pace = self.trainer.pace
        assert pace is not None
        length = pace.next(remaining)
        rest = None if remaining is None else remaining - length
        measuring = pace.is_measuring
        following = 0 if pace.chosen is None or rest == 0 else pace.next(rest)
        compiled_before = self.runner.compile_s
        started = time.perf_counter()
        ticket = self.run(length, following, self.sight.period)
        if measuring:
            jax.block_until_ready(ticket)
            seconds = time.perf_counter() - started - (self.runner.compile_s - compiled_before)
            seconds = agreed_seconds(seconds)
            pace.measured(length, seconds)
            logger.info(pace.reason)
            if pace.chosen is not None:
                fixed = self.sight.period, pace.seconds_per_step
                self.runner.fix(self.known, pace.chosen, *fixed)
        if len(self.pending) > (0 if self.live else 1):
            self.take_in()
        return length

    def run(self, length: int, following: int | None = None, period: int = 1) -> Any:
        """Dispatch one execution of `length` steps; returns an array that is ready after it.

        Args:
            length: how many steps.
            following: how many the next execution will have (0: none; None: as many again), so that
                its elements can be staged meanwhile.
            period: periodic taps look at every so many steps of this execution.
        """
        trainer = self.trainer
        numbers = Numbers(trainer.seed, trainer.step)
        # The counter of the loop starts at 0 in each execution; the step it belongs to is told.
        emitted, ticket = self.runner.dispatch(self.known, length, numbers, following, period)
        self.pending.append((trainer.step, length, self.sight.period, emitted, self.runner.taken))
        trainer.step += length
        return ticket

    def finish(self) -> None:
        """Take in everything that is still on its way."""
        while self.pending:
            self.take_in()

    def take_in(self) -> dict[str, np.ndarray]:
        """The results of the oldest execution: history, callbacks, progress.

        Returns:
            The loss and the scalar aux values by name, of shape (steps, microbatches, replicas).
        """
        first_step, steps, period, emitted, taken = self.pending.popleft()
        trainer = self.trainer
        parts = take_records(
            emitted,
            self.sight.chosen,
            first_step=first_step,
            steps=steps,
            replicas=trainer.replicas,
            period=period,
        )
        for part in parts:
            trainer.records.add(part)
        out = trainer.scalars
        structure = self.runner.traced.outfeeds[out].structure
        scalars = jax.tree.unflatten(structure, emitted.pop(out).value)
        self.runner.traced.deliver(emitted)
        count, replicas = trainer.accumulation.microbatches, trainer.replicas
        values = {"loss": scalars["loss"], **scalars["aux"]}
        arrays = {name: split_emission(v, count, replicas) for name, v in values.items()}
        weights = scalars["weight"]
        if weights is not None:
            weights = split_emission(weights, count, replicas).astype(np.float64)
        bad = first_bad_step(emitted, replicas) if self.guarded else None
        if bad is not None:
            arrays = {name: values[: bad[0]] for name, values in arrays.items()}
            weights = weights[: bad[0]] if weights is not None else None
        trainer.history.add(arrays, weights)
        if trainer.sink is not None:
            kept = len(arrays["loss"])
            trainer.sink.execution(Finished(first_step, kept, parts, arrays, weights))
        if bad is not None:
            # What was dispatched after the bad step changed nothing: the guard stays down until here.
            trainer.step = first_step + bad[0]
            self.known.pop(STOPPED, None)
            self.pending.clear()
            raise diagnose(
                self.runner,
                self.known,
                taken[self.infeed],
                bad,
                first_step=first_step,
                seed=trainer.seed,
                microbatches=count,
            )
        if self.callbacks:
            one = History(first_step, count, replicas)
            one.add(arrays, weights)
            tell(self.callbacks, trainer, Execution(first_step, steps, {n: one[n] for n in one}))
        self.bar.advance(steps, float(np.mean(arrays["loss"][-1])))
        return arrays


def note_left_out(elements: int, per_step: int) -> None:
    """Say, once, that elements at the end do not fill a step."""
    if left := elements % per_step:
        note_once(
            f"The last {left} elements of the dataset do not fill a step of {per_step} and are "
            f"left out.",
            key="incomplete step",
        )
