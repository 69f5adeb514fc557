"""One call of fit, evaluate or predict: what an execution takes, and who hears of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tailrace.feeds.waiting import Patience
from tailrace.keras.data.resident_arrays import Rows
from tailrace.program.running.dispatch_lengths import good_piece, most_bytes

LONG_S = 1.0
"""An execution that takes longer is cut, so that the progress bar moves while it runs."""

TOGETHER = 128
"""Executions of fewer batches run together, up to so many, while nobody listens. Longer ones are cut
into pieces of so many where only the numbers of rows are read."""

SHORTEST = 4
"""Pieces that are all alike may be so many times as short as they could be."""

PIECES = 10
"""Into how many pieces an execution is cut whose steps are reported while it runs."""


@dataclasses.dataclass
class Pacing:
    """How batches are taken, and who is told of each step.

    Attributes:
        execution: the batches of one execution, over all replicas.
        unit: pieces of an execution are a multiple of so many batches.
        replicas: how many replicas share them.
        batches: the batches of an epoch; None: until there are no more.
        every_step: callbacks to be told of every step, not only the last one of an execution.
        phase: what they hear of: "train", "test" or "predict".
        bar: the progress bar, to be moved while a long execution runs.
        ahead: whether to read on while an execution runs.
        resident: the arrays, of which batches are rows, that are kept on the device.
        drops: whether batches at the end of an epoch are left out.
        heard: whether any callback listens to the logs of batches.
        patience: how waits for data end.
        alone: whether callbacks look at the model between executions. Where none does, short ones
            run together: nobody can tell.
    """

    execution: int = 1
    unit: int = 1
    replicas: int = 1
    batches: int | None = None
    every_step: Sequence[Any] = ()
    phase: str = "train"
    bar: Any = None
    ahead: bool = False
    resident: Rows | None = None
    drops: bool = False
    heard: bool = True
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
        """Count from the start again."""
        self._left, self._number, self._ready_at = self.batches, 0, None
        self._owed = 0

    def go_on(self, done: int) -> None:
        """So many batches of this epoch were done before: they are counted along, and not run."""
        self._number = self._owed = done
        if self._left is not None:
            self._left -= done

    @property
    def number(self) -> int:
        """How many batches of this epoch are done."""
        return self._number

    @property
    def between(self) -> bool:
        """Whether what has run is what Keras has counted, and the epoch goes on as far as is known."""
        return not self._owed and self._left != 0

    def wanted(self, bytes_per_batch: int = 0) -> int:
        """How many batches the next execution takes, with those that run together with it."""
        self._together = False
        if self._left is None or (self._left <= 0 and self.replicas == 1):
            return self.execution  # as long as Keras asks for more
        if self.alone or self.execution >= TOGETHER or not self.batches:
            return min(self.execution, self._left)
        most = min(TOGETHER, most_bytes() // max(1, bytes_per_batch))
        count = good_piece(self.batches // self.execution, max(1, most // self.execution))
        self._together = count > 1
        return min(count * self.execution, self._left)

    def already(self) -> bool:
        """Whether the next execution has run, together with one before."""
        if not self._owed:
            return False
        self._owed = max(0, self._owed - self.execution)
        return True

    def last_step(self, batches: int) -> int:
        """Which of `batches` that ran together is the last one of this execution, on a replica."""
        return (batches - self._owed) // self.replicas - 1

    def piece(self, bytes_per_batch: int, wanted: int) -> int:
        """How many of the batches that are wanted one dispatch takes."""
        if wanted == 1:
            return 1
        most = max(1, most_bytes() // max(1, bytes_per_batch))
        if self.every_step or (self.bar is not None and self._seconds > LONG_S):
            most = min(most, max(1, self.execution // PIECES))
        if (
            self.resident is not None
        ):  # little travels: what counts is how soon the first piece is read
            most = min(most, TOGETHER)
        longest = min(wanted, most)
        for piece in range(longest - longest % self.unit, longest // SHORTEST, -self.unit):
            if wanted % piece == 0:
                return piece
        return good_piece(wanted, most, self.unit)

    def reads_on(self, after: int, piece: int) -> int:
        """How many batches to read ahead after so many of this execution: none of the next epoch.

        What callbacks change at the end of an epoch has its effect on the data at once.
        """
        if not self.ahead:
            return 0
        return piece if self._left is None else max(0, min(piece, self._left - after))

    def took(self, count: int) -> None:
        """An execution, and those that ran together with it, took so many."""
        self._owed = max(0, count - self.execution)
        self._number += count
        if self._left is not None:
            self._left -= count

    def ready(self, share: float) -> None:
        """A dispatch, so much of an execution, is over: how long do they take?"""
        now = time.perf_counter()
        if self._ready_at is not None:
            self._seconds = (now - self._ready_at) / max(share, 1e-9)
        self._ready_at = now

    @property
    def hears_steps(self) -> bool:
        """Whether anybody wants the logs of steps before the last one of a dispatch."""
        return bool(self.every_step) or (self.heard and self._together)

    # -- telling --------------------------------------------------------------------------------

    @property
    def tells(self) -> bool:
        """Whether somebody wants to hear of steps inside an execution."""
        return bool(self.every_step) or (self.bar is not None and self._seconds > LONG_S)

    def tell(
        self, done: int, count: int, last: bool, logs_of: Callable[[int], Mapping[str, Any]]
    ) -> None:
        """Tell of the `count` steps after the first `done` of this execution.

        Keras itself tells of the last step of an execution, and of the beginning of the first.
        """
        for step in range(count // self.replicas - last):
            number = self._number + done + (step + 1) * self.replicas - 1
            logs = logs_of(step) if self.every_step else {}
            for callback in self.every_step:
                getattr(callback, f"on_{self.phase}_batch_end")(number, logs)
                getattr(callback, f"on_{self.phase}_batch_begin")(number + 1, {})
        if self.bar is not None and not last:
            self.bar.on_train_batch_end(self._number + done + count - 1, logs_of(-1))


class Watch(keras.callbacks.Callback):
    """Tells the program when an epoch begins."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self._pacing = program

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count the batches of this epoch."""
        self._pacing.begin_epoch()
