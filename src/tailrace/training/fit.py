"""One `fit` while it runs: executions are dispatched, and their results collected, in order."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import jax
import numpy as np

from tailrace.errors import DataExhausted
from tailrace.feeds.infeed import InfeedQueue
from tailrace.messages import logger
from tailrace.program.running.agreement import agreed_least, agreed_seconds
from tailrace.training.callbacks import Callback, Execution, listens, tell
from tailrace.training.engine import Engine
from tailrace.training.executions import Ticket
from tailrace.training.journal import Journal
from tailrace.training.pace import Pace
from tailrace.training.progress import ProgressBar
from tailrace.training.step_counts import note_left_out, too_short

if TYPE_CHECKING:
    from tailrace.training.trainer import Trainer


class Fit:
    """The loop of `tr.Trainer` around its engine.

    Without callbacks an execution is dispatched while the one before runs, so that the device never
    waits for the host. Callbacks see the state that belongs to the values they get: with them, an
    execution is collected before the next one goes out.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        feed: InfeedQueue,
        journal: Journal,
        pace: Pace,
        callbacks: list[Callback],
        bar: ProgressBar,
    ) -> None:
        self.trainer, self.engine, self.feed, self.journal = trainer, engine, feed, journal
        self.pace, self.callbacks, self.bar = pace, callbacks, bar
        self.stopping = False
        self._pending: deque[Ticket] = deque()
        self._in_flight = 0 if engine.live or any(map(listens, callbacks)) else 1

    def steps(self, count: int) -> None:
        """Exactly `count` steps."""
        remaining = count
        while remaining and not self.stopping:
            try:
                remaining -= self.execute(remaining)
            except DataExhausted as error:
                per_step = self.engine.runner.elements_per_pass
                found = self.feed.position + self.feed.remaining(remaining * per_step)
                message = too_short(self.engine, count, found, count - remaining)
                raise DataExhausted(message) from error

    def epoch(self, count: int | None) -> None:
        """To the end of the dataset; `count` steps if that is known."""
        if count is not None:
            self.steps(count)
            return
        while not self.stopping:
            try:
                self.execute(None)
            except DataExhausted:
                break
        if self.stopping:
            return
        per_step = self.engine.runner.elements_per_pass
        left = self.feed.remaining(self.pace.next(None) * per_step)
        self.steps(agreed_least(left // per_step) or 0)
        note_left_out(left, per_step)

    def execute(self, remaining: int | None) -> int:
        """Dispatch one execution; returns how many steps it has."""
        engine, pace = self.engine, self.pace
        length = pace.next(remaining)
        rest = None if remaining is None else remaining - length
        measuring = pace.is_measuring
        following = 0 if pace.chosen is None or rest == 0 else pace.next(rest)
        compiled_before = engine.runner.compile_s
        started = time.perf_counter()
        ticket = engine.dispatch(length, following=following)
        self._pending.append(ticket)
        if measuring:
            jax.block_until_ready(ticket.ready)
            seconds = time.perf_counter() - started - (engine.runner.compile_s - compiled_before)
            pace.measured(length, agreed_seconds(seconds))
            logger.info(pace.reason)
            if pace.chosen is not None:
                period = engine.sight.period
                engine.runner.fix(engine.loop_state, pace.chosen, period, pace.seconds_per_step)
        self.collect(self._in_flight)
        return length

    def collect(self, in_flight: int = 0) -> None:
        """Take in results until at most this many executions are on their way."""
        while len(self._pending) > in_flight:
            results = self.engine.collect(self._pending.popleft())
            self.journal.add(results)
            if results.failure is not None:
                self._pending.clear()  # what was dispatched after the bad step changed nothing
                raise results.failure
            if self.callbacks:
                values = self.journal.one(results)
                tell(
                    self.callbacks,
                    self.trainer,
                    Execution(results.first_step, results.steps, values),
                )
            self.bar.advance(results.steps, float(np.mean(results.scalars["loss"][-1])))
