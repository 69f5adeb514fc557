"""Saving and restoring a trainer's state without a fit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailrace.base.paths import check_path
from tailrace.errors import CheckpointError
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.directory import (
    CheckpointDirectory,
    check_no_file,
    described,
)
from tailrace.trainer.checkpoints.snapshot import Snapshot, put_state, state_arrays, trainer_note
from tailrace.trainer.checkpoints.together import each_does, first_does
from tailrace.trainer.engine import Engine


def save_state(engine: Engine, epochs: int, path: str | os.PathLike[str]) -> None:
    """Write the state, step, seed and the number of epochs begun to a new directory."""
    where = check_path("path", path)
    first_does(lambda: _check_new(where))
    arrays, keys = state_arrays(engine)
    note = trainer_note(engine, keys, epochs)
    first_does(lambda: orbax_files.write(where, Snapshot(arrays, note).on_host(), note))


def restore_state(engine: Engine, path: str | os.PathLike[str]) -> int:
    """Restore the engine's state from `path`; returns the number of epochs begun."""
    given = check_path("path", path)
    where = Path(first_does(lambda: _found(given)))
    # Every process reads the whole checkpoint, and only then is any state replaced: either all
    # restore it or none.
    arrays, note = each_does(lambda: _read(where, given))
    put_state(engine, arrays, note)
    fit = note.get("fit")
    if fit is None:
        return int(note["epochs"])
    return int(note["epochs"]) + _epochs_begun(fit)


def _epochs_begun(fit: Mapping[str, Any]) -> int:
    """The passes over the data that a fit has begun; repeating data has many."""
    progress, position = fit["progress"], fit["positions"][0]
    recipe = position.get("recipe")
    if recipe is not None and recipe["repeat"]:
        return -(-int(position["elements"]) // int(recipe["batches_per_epoch"]))
    return int(progress["epochs"]) + (progress["steps"] > progress["epoch_start"])


def _check_new(where: Path) -> None:
    check_no_file("save writes a directory", where.parent)
    if os.path.lexists(where):
        raise CheckpointError(
            f"save writes a new directory, and {str(where)!r} already exists. Give another "
            f"path, or use fit(checkpoint=...), which keeps several."
        )


def _read(where: Path, given: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint; if it is damaged, the error names the one before it, which the caller may take."""
    try:
        return orbax_files.read(where)
    except orbax_files.DamagedCheckpoint as error:
        kept = [one.path for one in CheckpointDirectory(given).found() if one.path != where]
        if not kept:
            raise
        raise CheckpointError(
            f"{error} The one before it: trainer.restore({str(kept[-1])!r})."
        ) from error


def _found(where: Path) -> str:
    """The checkpoint at a path: the path itself, or the newest one in a directory of a fit."""
    kept = CheckpointDirectory(where).newest()
    if kept is not None:
        return str(kept.path)
    if orbax_files.is_checkpoint(where):
        return str(where)
    raise CheckpointError(
        f"restore reads what trainer.save or fit(checkpoint=...) wrote, and {str(where)!r} is "
        f"{described(where)}."
    )
