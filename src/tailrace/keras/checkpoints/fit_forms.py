"""The arguments of `fit` that matter to its checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from tailrace.base.messages import note_once
from tailrace.data.positions.random_sources import generators_in
from tailrace.errors import MissingDependency
from tailrace.keras.checkpoints.keeping import FitForm, Keeping
from tailrace.keras.data.batch_counts import batches_in, read_once
from tailrace.keras.programs.pacing import Pacing
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.checkpoint import Checkpoint

_METADATA = "training_metadata.json"
"""The file of a backup that Keras itself has written."""


def form_of_fit(call: dict[str, Any], pacing: Pacing) -> FitForm:
    """What must be the same when a fit is resumed, and how its data is read."""
    x, steps, split = call["x"], call["steps_per_epoch"], call["validation_split"]
    share = 1.0 - split if split and call["validation_data"] is None else 1.0
    # `tf.data.Dataset`, without importing TensorFlow.
    from_tensorflow = hasattr(x, "cardinality")
    arrays = all(isinstance(leaf, np.ndarray | jax.Array) for leaf in keras.tree.flatten(x))
    return FitForm(
        epochs=call["epochs"],
        batches=pacing.batches,
        per_step=pacing.unit,
        execution=pacing.execution,
        # With steps_per_epoch, an epoch reads on where the one before ended.
        continues=steps is not None or read_once(x),
        size=batches_in(x, call["batch_size"], steps, share),
        # tf.data has generators of its own. Of arrays the order is drawn when an epoch begins,
        # except with shuffle="batch".
        draws=not from_tensorflow and (not arrays or call["shuffle"] == "batch"),
        dataset=x if from_tensorflow or read_once(x) or _is_loader(x) else None,
        shuffle=call["shuffle"] if arrays else None,
        generators=[] if from_tensorflow or arrays else generators_in(x),
        drawn=_is_loader(x) and _drawn(x),
    )


def _is_loader(x: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.utils.data.DataLoader)


def _drawn(loader: Any) -> bool:
    """Whether generators alone decide the order of a loader: all that has a say is PyTorch's own."""
    data = sys.modules["torch"].utils.data
    parts = (loader, loader.sampler, loader.batch_sampler)
    own = all(one is None or type(one).__module__.startswith(data.__name__) for one in parts)
    return own and not isinstance(loader.dataset, data.IterableDataset)


def callbacks_in(call: dict[str, Any]) -> list[Any]:
    """The callbacks among the arguments of `fit`."""
    given = call["callbacks"]
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    own = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
    return [one for one in keras.tree.flatten(given or []) if not isinstance(one, own)]


def backups_of(call: dict[str, Any], number: int, per_step: int) -> Keeping | None:
    """The checkpoints that Keras' BackupAndRestore requests; it is removed from the callbacks.

    By itself it saves weights and the epoch, and loses the seeds of dropout, metrics and the position
    in the epoch. Here it means checkpoints in its directory. A backup that Keras itself has left there
    is Keras' to restore: the fit that it belongs to began without Tailrace.
    """
    kind = keras.callbacks.BackupAndRestore
    # Not of a subclass: that may have changed what it saves.
    backup = next((one for one in callbacks_in(call) if type(one) is kind), None)
    if backup is None:
        return None
    try:
        orbax_files.import_orbax()
    except MissingDependency:
        note_once(
            "BackupAndRestore runs as Keras has it: weights and the epoch, without the seeds of "
            "dropout and the place in the epoch. It is exact with Orbax: pip install "
            "'tailrace[checkpoint]'."
        )
        return None
    if Path(backup.backup_dir, _METADATA).exists():
        note_once(
            f"BackupAndRestore runs as Keras has it, because {str(backup.backup_dir)!r} holds a backup "
            f"that Keras has written: weights and the epoch. Later fits are kept whole."
        )
        return None
    given = call["callbacks"]
    if isinstance(given, keras.callbacks.CallbackList):
        given.callbacks.remove(backup)
    else:
        call["callbacks"] = [one for one in keras.tree.flatten(given) if one is not backup]
    at_epochs = backup.save_freq == "epoch" or not backup.save_freq
    every = 1 if at_epochs else max(1, int(backup.save_freq) // per_step)
    keep = 2 if backup.double_checkpoint else 1
    checkpoint = Checkpoint(str(backup.backup_dir), every=every, keep=keep)
    removed = bool(backup.delete_checkpoint)
    return Keeping(checkpoint, number, at_epochs, removed=removed, backup=backup)
