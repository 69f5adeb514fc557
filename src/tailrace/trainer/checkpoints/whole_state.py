"""Saving and restoring a trainer's state by itself, without a fit."""

from __future__ import annotations

import os
from pathlib import Path

from tailrace.errors import CheckpointError
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.directory import CheckpointDirectory
from tailrace.trainer.checkpoints.saving import check_processes
from tailrace.trainer.checkpoints.snapshot import Snapshot, put_state, state_arrays, trainer_note
from tailrace.trainer.engine import Engine


def save_state(engine: Engine, epochs: int, path: str | os.PathLike[str]) -> None:
    """Write the state, step, seed and the number of epochs begun to a new directory."""
    where = Path(path).absolute()
    if where.exists() or where.is_symlink():
        raise CheckpointError(
            f"save writes a new directory, and {str(where)!r} is there already. Give another "
            f"path, or use fit(checkpoint=...), which keeps several."
        )
    check_processes()
    arrays, keys = state_arrays(engine)
    note = trainer_note(engine, keys, epochs)
    orbax_files.write(where, Snapshot(arrays, note).on_host(), note)


def restore_state(engine: Engine, path: str | os.PathLike[str]) -> int:
    """Give the engine what is at `path`; returns the number of epochs begun."""
    where = Path(path).absolute()
    kept = CheckpointDirectory(where).newest()
    if kept is None and not where.is_dir():
        raise CheckpointError(f"There is no checkpoint at {str(where)!r}.")
    arrays, note = orbax_files.read(where if kept is None else kept.path)
    put_state(engine, arrays, note)
    fit = note.get("fit")
    if fit is None:
        return int(note["epochs"])
    progress = fit["progress"]
    begun = progress["epochs"] + (progress["steps"] > progress["epoch_start"])
    return int(note["epochs"]) + begun
