"""One call of `fit` that keeps checkpoints."""

from __future__ import annotations

from typing import Any

import keras

from tailrace.errors import WaitStopped
from tailrace.feeds.waiting import Patience
from tailrace.keras.checkpoints.fit_forms import callbacks_in, form_of_fit
from tailrace.keras.checkpoints.keeping import Keeping
from tailrace.keras.checkpoints.kept_callbacks import KeptCallbacks
from tailrace.keras.data.batch_counts import remainders
from tailrace.keras.keras_internals import PLAIN
from tailrace.keras.programs.pacing import Pacing
from tailrace.program.running.kernel_choices import choices_in


def fit_kept(adopted: Any, keeping: Keeping, pacing: Pacing, call: dict[str, Any]) -> Any:
    """A fit from the beginning, or from where a checkpoint was taken.

    Args:
        adopted: the model, as Tailrace sees it.
        keeping: its checkpoints.
        pacing: of this fit.
        call: the arguments of Keras' `fit`.
    """
    told = callbacks_in(call)
    epoch = keeping.take_up(form_of_fit(call, pacing), call["initial_epoch"])
    call["x"] = keeping.replay(call["x"])
    if keeping.finished:  # nothing is computed, nobody is told
        call["callbacks"], call["verbose"], told = None, 0, []
    adopted.listen(pacing, call)
    params = {name: call[name] for name in ("verbose", "epochs")}
    params["steps"] = call["steps_per_epoch"] or pacing.batches
    if isinstance(call["callbacks"], keras.callbacks.CallbackList):
        params = dict(call["callbacks"].params or params)
        call["callbacks"] = call["callbacks"].callbacks
    kept = KeptCallbacks(
        call["callbacks"],
        keeping,
        pacing,
        told,
        lambda: adopted.programs["train"],
        epoch,
        model=adopted.model,
        **params,
    )
    call["callbacks"], call["initial_epoch"] = kept, epoch
    interrupts, directory = keeping.interrupts, keeping.choices(adopted.settings.fingerprint)
    pacing.patience = Patience(stopped=lambda: interrupts.asked is not None)
    running = adopted.while_running("train", pacing)
    with running, remainders(pacing.drops), choices_in(*directory):
        with interrupts:
            try:
                history = PLAIN["fit"](**call)
            except WaitStopped:  # a signal, while the data was awaited
                kept.save_between()
                interrupts.reraise()
                raise
        if not keeping.finished:
            kept.save_end()
    return history
