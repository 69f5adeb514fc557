"""One call of `fit` with checkpoints."""

from __future__ import annotations

from typing import Any

import keras

from tailrace.errors import WaitStopped
from tailrace.feeds.waiting import Patience
from tailrace.keras.checkpoints.callback_states import set_plain_state
from tailrace.keras.checkpoints.fit_forms import callbacks_in, form_of_fit
from tailrace.keras.checkpoints.keeping import Keeping
from tailrace.keras.checkpoints.kept_callbacks import KeptCallbacks
from tailrace.keras.checkpoints.option_texts import option_texts
from tailrace.keras.data.batch_counts import remainders
from tailrace.keras.handles import AnyAdopted
from tailrace.keras.keras_internals import PLAIN
from tailrace.keras.programs.call_pacing import listen
from tailrace.keras.programs.pacing import Pacing
from tailrace.program.compiling.kernel_choices import choices_in


def fit_kept(adopted: AnyAdopted, keeping: Keeping, pacing: Pacing, call: dict[str, Any]) -> Any:
    """A fit from the beginning, or from a checkpoint.

    Args:
        adopted: the adopted model.
        keeping: its checkpoints.
        pacing: the pacing of this fit.
        call: the arguments of Keras' `fit`.
    """
    listeners = callbacks_in(call)
    options = option_texts(adopted.model, adopted.settings)
    epoch = keeping.take_up(form_of_fit(call, pacing), call["initial_epoch"], options)
    before = adopted.first_batch.epochs
    keeping.looked = lambda: adopted.first_batch.epochs - before
    # Before Keras looks at the data: it reads the first batches of an iterator to build the model.
    interrupts = keeping.interrupts
    patience = Patience(pacing.patience.timeout_s, lambda: interrupts.asked is not None)
    with interrupts:
        try:
            call["x"] = keeping.replay(call["x"], patience)
            call["x"] = adopted.first_batch.of_generator(call["x"], patience.timeout_s)
        except WaitStopped:  # there is nothing new to save
            interrupts.reraise()
            raise
    ended: list[Any] = []
    if keeping.finished:  # nothing is computed, and no callback is called
        call["callbacks"], call["verbose"], ended, listeners = None, 0, listeners, []
    listen(adopted.model, adopted.settings, pacing, call)
    kept = _callback_list(adopted, keeping, pacing, call, listeners, epoch)
    call["callbacks"], call["initial_epoch"] = kept, epoch
    directory, pacing.patience = keeping.choices(adopted.settings.fingerprint), patience
    running = adopted.while_running("train", pacing)
    with running, remainders(pacing.drops), choices_in(*directory):
        with interrupts:
            try:
                history = PLAIN["fit"](**call)
            except WaitStopped:  # a signal during a wait for data
                kept.save_between()
                interrupts.reraise()
                raise
        if not keeping.finished:
            kept.save_end()
        for callback, state in zip(ended, keeping.states(ended), strict=True):
            set_plain_state(callback, state)  # the script may ask them what they have seen
        interrupts.reraise()  # a signal in the last epoch of a fit that a callback stopped
    return history


def _callback_list(
    adopted: AnyAdopted,
    keeping: Keeping,
    pacing: Pacing,
    call: dict[str, Any],
    listeners: list[Any],
    epoch: int,
) -> KeptCallbacks:
    """The list of callbacks that Keras is given, in place of the one that it would make itself."""
    # What Keras gives to a list of callbacks that it makes itself.
    params = {name: call[name] for name in ("verbose", "epochs")}
    params["steps"] = call["steps_per_epoch"] or pacing.batches
    callbacks = call["callbacks"]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks, params = callbacks.callbacks, dict(callbacks.params or params)
    return KeptCallbacks(
        callbacks,
        keeping,
        pacing,
        listeners,
        lambda: adopted.programs["train"],
        epoch,
        model=adopted.model,
        **params,
    )
