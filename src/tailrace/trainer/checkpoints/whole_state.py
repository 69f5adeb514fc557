"""Saving and restoring a trainer's state without a fit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailrace.errors import CheckpointError, RunError
from tailrace.runs.info import RUN_FILE, read_info
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.directory import CheckpointDirectory, check_no_file
from tailrace.trainer.checkpoints.snapshot import Snapshot, put_state, state_arrays, trainer_note
from tailrace.trainer.checkpoints.together import each_does, first_does
from tailrace.trainer.engine import Engine


def save_state(engine: Engine, epochs: int, path: str | os.PathLike[str]) -> None:
    """Write the state, step, seed and the number of epochs begun to a new directory."""
    where = Path(path).absolute()
    first_does(lambda: _check_new(where))
    arrays, keys = state_arrays(engine)
    note = trainer_note(engine, keys, epochs)
    first_does(lambda: orbax_files.write(where, Snapshot(arrays, note).on_host(), note))


def restore_state(engine: Engine, path: str | os.PathLike[str]) -> int:
    """Restore the engine's state from `path`; returns the number of epochs begun."""
    where = Path(first_does(lambda: _found(Path(path).absolute())))
    arrays, note = each_does(lambda: orbax_files.read(where))
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
    if where.exists() or where.is_symlink():
        raise CheckpointError(
            f"save writes a new directory, and {str(where)!r} is there already. Give another "
            f"path, or use fit(checkpoint=...), which keeps several."
        )


def _found(where: Path) -> str:
    """The checkpoint at a path: the path itself, or the newest one in a directory of a fit."""
    kept = CheckpointDirectory(where).newest()
    if kept is not None:
        return str(kept.path)
    if orbax_files.is_checkpoint(where):
        return str(where)
    raise CheckpointError(
        f"restore reads what trainer.save or fit(checkpoint=...) wrote, and {str(where)!r} is "
        f"{_described(where)}."
    )


def _described(where: Path) -> str:
    """What is at a path that has no checkpoint."""
    if not where.is_dir():
        return "a file" if where.exists() else "nothing"
    if (where / RUN_FILE).exists():
        named = None
        with contextlib.suppress(RunError):
            named = read_info(where).get("checkpoint")
        hint = f"This run's checkpoints are in {named!r}" if named else "It has none of them"
        return f"a run directory: records, not the state of a trainer. {hint}"
    return "a directory without a checkpoint" if any(where.iterdir()) else "an empty directory"
