"""One call of fit, evaluate or predict: the batches of an execution, and the callbacks to call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tailrace.feeds import dispatch_table
from tailrace.feeds.waiting import Patience
from tailrace.keras.data.resident_arrays import Rows
from tailrace.program.running.dispatch_lengths import good_piece


@dataclasses.dataclass
class Pacing:
    """How batches are taken, and which callbacks are called for each step.

    Attributes:
        execution: the batches of one execution, over all replicas.
        unit: pieces of an execution are a multiple of this number of batches.
        replicas: the number of replicas that share them.
        batches: the batches of an epoch; None for all of the data.
        every_step: callbacks to call for every step, not only the last one of an execution.
        phase: "train", "test" or "predict".
        bar: the progress bar, which moves while a long execution runs.
        ahead: whether to prefetch while an execution runs.
        arrays: whether the data are arrays, which are read without side effects.
        resident: the arrays that are kept on the device, whose rows are the batches.
        drops: whether batches at the end of an epoch are dropped.
        listeners: whether any callback uses the logs of batches.
        patience: the limits of waits for data.
        of_fit: whether it is one of these calls, and not that of a batch alone (`train_on_batch`).
        alone: whether callbacks read the model between executions. If none does, short ones run
            together, without a visible difference.
    """

    execution: int = 1
    unit: int = 1
    replicas: int = 1
    batches: int | None = None
    every_step: Sequence[Any] = ()
    phase: str = "train"
    bar: Any = None
    ahead: bool = False
    arrays: bool = False
    resident: Rows | None = None
    drops: bool = False
    listeners: bool = True
    of_fit: bool = True
    alone: bool = True
    patience: Patience = dataclasses.field(default_factory=Patience)
    _together: bool = False
    _left: int | None = None
    _owed: int = 0
    _number: int = 0
    _seconds: float = 0.0
    _ready_at: float | None = None

    def __post_init__(self) -> None:
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Reset the counts."""
        # The time between two epochs (validation, callbacks) is not the time of a dispatch.
        self._left, self._number, self._ready_at = self.batches, 0, None
        self._owed = 0

    def skip(self, done: int) -> None:
        """Skip `done` batches of this epoch, which are counted but not run."""
        self._number = self._owed = done
        if self._left is not None:
            self._left -= done

    @property
    def number(self) -> int:
        """The number of batches of this epoch done so far."""
        return self._number

    @property
    def between(self) -> bool:
        """Whether exactly the batches that Keras has counted have run, and the epoch continues."""
        return not self._owed and self._left != 0

    def wanted(self, bytes_per_batch: int = 0, together: bool = True) -> int:
        """The number of batches of the next execution, with those that may run together with it."""
        self._together = False
        if self._left is None or (self._left <= 0 and self.replicas == 1):
            return self.execution  # as long as Keras asks for more
        alone = self.alone or not together
        if alone or self.execution >= dispatch_table.TOGETHER or not self.batches:
            return min(self.execution, self._left)
        most = min(dispatch_table.TOGETHER, dispatch_table.most_bytes() // max(1, bytes_per_batch))
        # Whole executions only, so that Keras can count through them one by one.
        count = good_piece(self.batches // self.execution, max(1, most // self.execution))
        self._together = count > 1
        return min(count * self.execution, self._left)

    @property
    def single(self) -> bool:
        """Whether each execution is one batch, and runs alone."""
        return self.execution == 1 and (self.alone or not self.batches)

    @property
    def owes(self) -> bool:
        """Whether the next execution is only counted: it has run together with an earlier one."""
        return self._owed > 0

    def already(self) -> bool:
        """Whether the next execution has already run, together with an earlier one."""
        if not self._owed:
            return False
        # Down to 0, not below: the last execution of an epoch may be shorter.
        self._owed = max(0, self._owed - self.execution)
        return True

    def last_step(self, batches: int) -> int:
        """The index of this execution's last step among `batches` that ran together, per replica."""
        return (batches - self._owed) // self.replicas - 1

    def piece(self, bytes_per_batch: int, wanted: int) -> int:
        """The number of batches per dispatch, of those wanted."""
        if wanted == 1:
            return 1
        most = max(1, dispatch_table.most_bytes() // max(1, bytes_per_batch))
        # Results arrive when a dispatch has ended: to report steps in between, it is cut.
        if self.every_step or (self.bar is not None and self._seconds > dispatch_table.LONG_S):
            most = min(most, max(1, self.execution // dispatch_table.PIECES))
        # Only row numbers travel: what counts is how soon the first piece is read.
        if self.resident is not None:
            most = min(most, dispatch_table.TOGETHER)
        longest = min(wanted, most)
        shortest = longest // dispatch_table.SHORTEST
        # Equal pieces first: a shorter last one would need a program of its own.
        for piece in range(longest - longest % self.unit, shortest, -self.unit):
            if wanted % piece == 0:
                return piece
        return good_piece(wanted, most, self.unit)

    def reads_on(self, after: int, piece: int) -> int:
        """The number of batches to prefetch after `taken` of this execution; none of the next epoch.

        So changes that callbacks make at the end of an epoch affect the data at once.
        """
        if not self.ahead:
            return 0
        return piece if self._left is None else max(0, min(piece, self._left - after))

    def took(self, count: int) -> None:
        """Record the number of batches that an execution, and those run together with it, took."""
        self._owed = max(0, count - self.execution)
        self._number += count
        if self._left is not None:
            self._left -= count

    def ready(self, share: float) -> None:
        """Record that a dispatch, a fraction of an execution, has finished, to learn its duration."""
        now = time.perf_counter()
        # From one end to the next: dispatches are queued, so their beginnings say nothing.
        if self._ready_at is not None:
            self._seconds = (now - self._ready_at) / max(share, 1e-9)
        self._ready_at = now

    @property
    def hears_steps(self) -> bool:
        """Whether any callback uses the logs of steps before the last one of a dispatch."""
        return bool(self.every_step) or (self.listeners and self._together)

    # -- callbacks ------------------------------------------------------------------------------

    @property
    def tells(self) -> bool:
        """Whether any callback listens to steps inside an execution."""
        return bool(self.every_step) or (
            self.bar is not None and self._seconds > dispatch_table.LONG_S
        )

    def call_callbacks(
        self, done: int, count: int, last: bool, logs_of: Callable[..., Mapping[str, Any]]
    ) -> None:
        """Call callbacks for the `count` batches after the first `done`, on each replica.

        Keras calls them for the last batch of an execution, and for the beginning of the first.
        """
        first = self._number + done
        for number in range(count - last):
            step, replica = divmod(number, self.replicas)
            logs = logs_of(step, replica) if self.every_step else {}
            for callback in self.every_step:
                getattr(callback, f"on_{self.phase}_batch_end")(first + number, logs)
                getattr(callback, f"on_{self.phase}_batch_begin")(first + number + 1, {})
        if self.bar is not None and not last:
            self.bar.on_train_batch_end(first + count - 1, logs_of(-1))
