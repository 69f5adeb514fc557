"""What a loop owes to its executions, whichever front end it belongs to.

Around a dispatch, compilations are recorded; once the journal has the results of an execution, the
guard's word counts: a bundle, or an end after too many skipped steps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from tailrace.base.messages import logger
from tailrace.errors import NonFiniteError
from tailrace.program.compiling.compilations import Compilation, listening
from tailrace.records.history import SKIPPED, History
from tailrace.trainer.engine import Engine
from tailrace.trainer.executions import Results
from tailrace.trainer.observation.bundles import keep_bundle
from tailrace.trainer.observation.journal import Journal
from tailrace.trainer.observation.nonfinite_guard import too_many_skipped


class Guarding:
    """Ends a training where its guard says so.

    Args:
        engine: the engine that trains.
        history: the history that the training goes on with: steps skipped in it count.
    """

    def __init__(self, engine: Engine, history: History) -> None:
        self._engine, self._skipped = engine, _skipped_in(history)
        self._ended = False

    def check(self, results: Results) -> None:
        """Raise if the training ends with this execution; called once the journal has it.

        Executions that were in flight then may be checked as well: they count, and end nothing again.
        """
        self.keep(results)
        self.end(results)

    def keep(self, results: Results) -> bool:
        """Whether a guard has stopped the training; its bundle is then written."""
        # Before the error leaves: the bundle needs the engine's state, which a caller may train on
        # from.
        if isinstance(results.failure, NonFiniteError):
            keep_bundle(self._engine, results.failure)
            return True
        return False

    def end(self, results: Results) -> None:
        """Raise if the training ends with this execution."""
        self._count(results)
        if results.failure is not None:
            raise results.failure

    def go_on(self) -> None:
        """Take note that the caller trains on after an end."""
        self._ended = False

    def _count(self, results: Results) -> None:
        guard = self._engine.guard
        if guard is None or not guard.skips or SKIPPED not in results.scalars:
            return
        bad = np.flatnonzero(results.scalars[SKIPPED].max(axis=(1, 2)))
        self._skipped += [results.first_step + int(number) for number in bad]
        if bad.size and len(self._skipped) > guard.limit and not self._ended:
            self._ended = True
            raise too_many_skipped(self._skipped, guard.limit)


def record_compilation(journal: Journal, compilation: Compilation) -> None:
    """Log and record a compilation that has ended."""
    if compilation.ended:
        logger.info(f"Compiled {compilation}.")
        journal.add_compilation(compilation)


def recording(journal: Journal) -> AbstractContextManager[None]:
    """Record the compilations of this context, also those that a thread ends later."""
    return listening(lambda compilation: record_compilation(journal, compilation))


def _skipped_in(history: History) -> list[int]:
    """The steps of a history that a guard skipped."""
    if SKIPPED not in history.step_names:
        return []
    return [int(step) for step in history.steps[history.each(SKIPPED).max(axis=(1, 2)) > 0]]
