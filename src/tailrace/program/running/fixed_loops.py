"""Loops of fixed length: which one a training should have, and its compilation beside the training.

A loop whose length is data runs dispatches of every length, but on an accelerator the device waits for
the host in each of its iterations. A loop of the most common length has no such wait. It is a second
program for the same steps, so it is compiled in a thread, and only if the training lasts long enough.
"""

from __future__ import annotations

import atexit
import concurrent.futures
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

from tailrace.base.messages import logger, note_once
from tailrace.devices import devices
from tailrace.devices.devices import Device
from tailrace.feeds import dispatch_table
from tailrace.feeds.background import Worker
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.program.running.executable import Executable

REPEATED = 2
"""The number of dispatches of one kind from which a loop for them may pay."""

EXIT_S = 600.0
"""The most seconds that a process which ends waits for compilations."""

_running: set[Future[None]] = set()


@atexit.register
def wait_for_compilations() -> None:
    """Let compilations end: XLA aborts a process that takes its threads down while they compile."""
    if _running:
        logger.info("The process ends when a compilation beside the training has ended.")
        concurrent.futures.wait(list(_running), EXIT_S)


class Kind(NamedTuple):
    """The dispatches that one loop of fixed length can run.

    Attributes:
        length: their number of iterations.
        period: the period of their taps.
        muted: the outfeeds that they do not fill.
    """

    length: int
    period: int
    muted: frozenset[OutfeedQueue]


class FixedLoops:
    """The loops of fixed length of one loop.

    Attributes:
        trials: the seconds of an iteration, as measured by callers that have no other place for them.
        compiling: the latest compilation; None before the first.
    """

    def __init__(self) -> None:
        self.trials: list[float] = []
        self.compiling: Future[None] | None = None
        self._ready: dict[Kind, Executable] = {}
        self._refused: set[Kind] = set()  # another try would end in the same way
        self._usable: dict[Kind, Executable] | None = None
        self._iterations: Counter[Kind] = Counter()
        self._ended = False

    def get(self, kind: Kind, other: Executable) -> Executable:
        """The loop for dispatches of this kind; the `other` one if there is none."""
        usable = self._ready if self._usable is None else self._usable
        return usable.get(kind, other)

    def ran(self, kind: Kind) -> None:
        """Count a dispatch that such a loop could have run."""
        self._iterations[kind] += kind.length

    @contextmanager
    def unchanged(self) -> Generator[None]:
        """A context that uses the loops that are ready now, and none that becomes ready meanwhile."""
        self._usable = dict(self._ready)
        try:
            yield
        finally:
            self._usable = None

    def worth(self, expected_s: float, compile_s: float, last: bool) -> Kind | None:
        """The kind of dispatches whose loop should be compiled now; None for none.

        Args:
            expected_s: how long the training is expected to last.
            compile_s: how long the first program took to compile.
            last: whether the fit, or the epoch, ends here.
        """
        # After the end of a training it would be for nothing. A training that went on after an end will
        # do so again: it consists of many short fits or epochs.
        goes_on, self._ended = self._ended or not last, self._ended or last
        busy = self.compiling is not None and not self.compiling.done()
        if busy or not goes_on or not self._iterations:
            return None
        kind = max(self._iterations, key=lambda one: self._iterations[one])
        repeated = self._iterations[kind] >= REPEATED * kind.length
        pays = expected_s >= dispatch_table.FIXED_WORTH * compile_s
        known = kind in self._ready or kind in self._refused
        return kind if repeated and pays and not known else None

    def compile(self, kind: Kind, executable: Executable, act: Callable[[], object]) -> None:
        """Compile a loop in a thread, by `act`; dispatches use it from then on."""

        def compile_it() -> None:
            try:
                act()
            except BaseException:
                self._refused.add(kind)
                raise
            self._ready[kind] = executable

        worker = Worker("tailrace-compile")
        self.compiling = worker.submit(compile_it)
        worker.stop(0)  # it ends after this call
        _running.add(self.compiling)
        self.compiling.add_done_callback(_ended)


def check_room(fixed: Executable, other: Executable, used: Sequence[Device]) -> None:
    """Raise MemoryError if devices that have room for one program have none for the other.

    A training must not end because a faster program has taken over.
    """
    for device in used:
        left = devices.memory_left(device)
        if left is not None and (more := fixed.peak_bytes - other.peak_bytes) > left:
            raise MemoryError(
                f"it needs {more / 1e6:,.0f} MB more than the other one, and of {device} all but "
                f"{left / 1e6:,.0f} MB have been in use"
            )


def _ended(compilation: Future[None]) -> None:
    _running.discard(compilation)
    error = compilation.exception(timeout=0)  # it is done
    if error is not None:
        note_once(
            f"Training goes on in the loop whose length is an argument, slower by a percent or more: "
            f"a loop of fixed length cannot be used ({type(error).__name__}: "
            f"{str(error)[:200]})."
        )
