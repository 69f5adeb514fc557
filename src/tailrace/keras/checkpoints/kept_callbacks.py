"""Keras' list of callbacks in a fit with checkpoints: it knows the position of Keras' loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

import keras

from tailrace.devices.processes.launched import tell_launcher
from tailrace.keras.checkpoints.callback_states import (
    changes,
    plain_state,
    reopen,
    set_plain_state,
)
from tailrace.keras.checkpoints.keeping import Keeping, TrainingProgram
from tailrace.keras.programs.logs import flat
from tailrace.keras.programs.pacing import Pacing
from tailrace.trainer.checkpoints.callback_matching import classes_of


class KeptCallbacks(keras.callbacks.CallbackList):
    """A list of callbacks that saves between executions and after epochs.

    In the resumed epoch, callbacks are not called for batches that were done before.

    Args:
        callbacks: the callbacks, as Keras takes them.
        keeping: the checkpoints.
        pacing: the pacing of the fit.
        users: the user's callbacks, whose state is kept.
        program: returns the training program, which Keras makes before training begins.
        epoch: the first epoch.
        **params: the parameters of a list of callbacks, as in Keras.
    """

    def __init__(
        self,
        callbacks: object,
        keeping: Keeping,
        pacing: Pacing,
        users: list[keras.callbacks.Callback],
        program: Callable[[], TrainingProgram],
        epoch: int,
        **params: Any,
    ) -> None:
        self._keeping, self._pacing, self._users, self._program = keeping, pacing, users, program
        self._first = True
        self._epoch, self._done = epoch, 0
        self._logs: Mapping[str, Any] = {}
        self._before: list[dict[str, Any]] = []
        self._random_then: dict[str, Any] = {}
        self._random_of_epoch: dict[str, Any] = {}
        self._begun = 0
        super().__init__(callbacks, add_history=True, **params)
        # Where a fit has finished before, callbacks get the state of its end without a beginning: that
        # is saved as what differs from here. One with `get_state` may not have any yet.
        self._made = [
            {} if callable(getattr(one, "get_state", None)) else plain_state(one) for one in users
        ]

    # -- what Keras' loop calls -----------------------------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restore all state, after callbacks have begun as usual."""
        states = self._keeping.states(self._users)
        # Before `on_train_begin`, in which a CSVLogger opens its file: to append, or to overwrite.
        put_back = [reopen(one, state) for one, state in zip(self._users, states, strict=True)]
        super().on_train_begin(logs)
        for put in put_back:
            put()
        # After they have begun: most callbacks reset their attributes there, so only what changes
        # later is state.
        self._before = [plain_state(one) for one in self._users]
        model: Any = self.model
        self._keeping.begin(self._program(), model)
        for callback, state in zip(self._users, states, strict=True):
            set_plain_state(callback, state)
        if not self._keeping.took_up:
            self._save(self._epoch, 0)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Seek to the position of the checkpoint, if this is the first epoch."""
        super().on_epoch_begin(epoch, logs)
        program, keeping = self._program(), self._keeping
        resumed = keeping.resumed() if self._first else None
        self._epoch, self._done, self._logs = epoch, 0, {}
        if resumed is not None:
            program.resume(resumed, self._pacing)
            # Rounded up to whole executions: Keras numbers batches by them, also if the last one is
            # shorter.
            self._done = -(-resumed.done // self._pacing.execution) * self._pacing.execution
            if resumed.done:  # callbacks that change variables at the start of an epoch already did
                keeping.put_values(program, of_replicas=True)
                states = keeping.states(self._users)
                for callback, state in zip(self._users, states, strict=True):
                    set_plain_state(callback, state)
        self._random_of_epoch, self._begun = keeping.random(), program.begun
        if self._first:
            self._random_then, self._first = self._random_of_epoch, False

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call callbacks for a batch that is not skipped."""
        if batch >= self._done:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call callbacks for a batch, and save if a checkpoint is due."""
        if batch < self._done:
            return
        if self._keeping.backup is not None:
            self._keeping.backup._should_save_on_batch(batch)  # it counts what it has seen
        super().on_train_batch_end(batch, logs)
        self._logs = logs or {}
        keeping, pacing = self._keeping, self._pacing
        # Where a callback has stopped the fit, its end is saved: a checkpoint of this point would
        # continue. Not asked of `self.model`: whenever that is read, Keras writes all values back to
        # the variables.
        if self._program().model.stop_training:
            return
        if pacing.between and (keeping.due or keeping.interrupts.asked is not None):
            # Keras runs hooks of `async_safe` callbacks in threads: their states must be final
            # before they are saved.
            self._flush_futures()
            self._save(self._epoch, pacing.number, wait=keeping.interrupts.asked is not None)
            keeping.interrupts.reraise()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call callbacks at the end of an epoch, and save if a checkpoint is due."""
        backup = self._keeping.backup
        if backup is not None:
            backup._current_epoch, backup._last_batch_seen = epoch + 1, 0
        super().on_epoch_end(epoch, logs)
        self._epoch, self._logs = epoch + 1, {}
        keeping = self._keeping
        model: Any = self.model
        if model.stop_training:
            return
        asked = keeping.interrupts.asked is not None
        best = keeping.improves(dict(logs or {}))
        if best or asked or keeping.due_after_epoch:
            self._save(epoch + 1, 0, best=best, wait=asked)
        keeping.interrupts.reraise()

    def save_between(self) -> None:
        """Save the position of the fit, if it is between two executions."""
        if self._pacing.between and not self._program().inside:
            self._save(self._epoch, self._pacing.number, wait=True)

    def save_end(self) -> None:
        """Save the end of the fit."""
        self._logs = {}
        self._save(self._epoch, 0, ended=True, wait=True)

    # -- inside ---------------------------------------------------------------------------------

    def _save(self, epoch: int, done: int, **kind: bool) -> None:
        if self._program().begun > self._begun:  # the data under way began in this epoch
            self._random_then = self._random_of_epoch
        since = self._made if kind.get("ended") else self._before
        states = [
            changes(before, plain_state(one))
            for before, one in zip(since, self._users, strict=True)
        ]
        position = {
            "epoch": epoch,
            "done": done,
            "logs": {name: _number(value) for name, value in flat(dict(self._logs))},
            "random_then": self._random_then,
        }
        model: Any = self.model
        self._keeping.save(model, position, states, classes_of(self._users), **kind)
        if self._keeping.interrupts.asked is not None:
            tell_launcher(f"saved {epoch} epochs and {done} batches of the next one")


def _number(value: SupportsFloat) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
