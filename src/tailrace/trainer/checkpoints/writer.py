"""Writes checkpoints during training: one thread, one checkpoint at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tailrace.base.messages import logger
from tailrace.base.spans.span import span
from tailrace.devices.processes import distributed
from tailrace.errors import CheckpointError
from tailrace.feeds.background import Worker
from tailrace.feeds.waiting import Lasting, Patience
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.checkpoints.directory import CheckpointDirectory
from tailrace.trainer.checkpoints.freed_memory import give_back
from tailrace.trainer.checkpoints.snapshot import Snapshot

THREAD = "tailrace-checkpoint"


class CheckpointWriter:
    """Decides when a checkpoint is due, and writes it while training continues.

    At most one snapshot is in flight: the host needs memory for one state, and for Orbax to write it.
    A write that fails (a full disk) is logged, and retried when the next one is due; only the last one
    of a fit must succeed.

    Args:
        checkpoint: the directory and the period.
        fit: the index of the fit.
    """

    def __init__(self, checkpoint: Checkpoint, fit: int) -> None:
        self.checkpoint, self.fit = checkpoint, fit
        self.directory = CheckpointDirectory(checkpoint.directory, checkpoint.keep)
        self._worker: Worker | None = None
        self._busy: Future[Any] | None = None
        self._latest: Future[Any] | None = None
        self._last_step, self._last_time = 0, time.monotonic()

    def due(self, step: int) -> bool:
        """Whether it is time for a checkpoint."""
        # By the monotonic clock: a change of the system time must not hold up checkpoints.
        seconds, steps = self.checkpoint.seconds, self.checkpoint.steps
        if seconds is not None:
            return time.monotonic() - self._last_time >= seconds
        return steps is not None and step - self._last_step >= steps

    def save(self, step: int, take: Callable[[], Snapshot], **kind: bool) -> None:
        """Write a checkpoint in the thread; waits only for the previous one. One of several processes
        writes, and all take part in `take`.

        Args:
            step: the trainer's step.
            take: takes the snapshot.
            kind: the kind of checkpoint; see `CheckpointDirectory.write`.
        """
        # Before the snapshot is taken: two of them would be a second copy of the state.
        self.wait()
        # In a list, from which the thread takes the last reference.
        snapshots = [take()]
        # In processes that do not write, too: all must agree on when the next one is due.
        self._last_step, self._last_time = step, time.monotonic()
        if not distributed.writes():
            return
        if self._worker is None:
            self._worker = Worker(THREAD)

        def write() -> None:
            with span("checkpoint write", step=step):
                # Released there: its memory is freed before it is given back.
                self.directory.write(self.fit, step, snapshots.pop(), **kind)
            give_back()

        self._busy = self._latest = self._worker.submit(write)
        self.directory.written_by(self._latest)

    def started_at(self, step: int) -> None:
        """Start counting: the fit begins, or resumes, at this step."""
        self._last_step, self._last_time = step, time.monotonic()

    def wait(self, last: bool = False) -> None:
        """Wait for the checkpoint that is being written; if it is the last one, raise its error."""
        # Cleared first: an error is reported once, not again by each later wait.
        busy, self._busy = self._busy, None
        if busy is None:
            return
        self._wait_for(busy)
        try:
            busy.result()
        except CheckpointError as error:
            if last:
                raise
            logger.warning("%s Training goes on; the next checkpoint is tried again.", error)

    def close(self) -> None:
        """End the thread, once it has written what it writes."""
        # Also where the wait for it was interrupted before: until it has ended, the directory is its.
        worker, self._worker = self._worker, None
        if worker is not None and self._latest is not None:
            try:
                self._wait_for(self._latest)
            finally:
                worker.stop(0.0)

    def _wait_for(self, write: Future[Any]) -> None:
        """As long as it takes, with a note from time to time; only a signal ends it."""
        what = f"the checkpoint of step {self._last_step} to be written"
        Patience().wait_for(write, Lasting(what))
