"""Which checkpoint steps are run again from."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.base.messages import note_once
from tailrace.base.paths import is_path
from tailrace.devices.processes import distributed
from tailrace.errors import CheckpointError, OptionError
from tailrace.runs.info import RUN_FILE
from tailrace.taps.tap import Observe
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.checkpoints.directory import CheckpointDirectory, Kept, described
from tailrace.trainer.engine import Engine
from tailrace.trainer.lookback.rerun import Rerun


def check_step(step: object) -> None:
    """Refuse anything but the number of a step."""
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise OptionError(
            f"step is the number of a step that was trained, counted from 0. Received: step={step!r}."
        )


@dataclasses.dataclass(frozen=True)
class Start:
    """The checkpoint that steps are run again from.

    Attributes:
        kept: the checkpoint.
        directory: its directory.
        arrays: its arrays.
        note: its note.
    """

    kept: Kept
    directory: CheckpointDirectory
    arrays: dict[str, np.ndarray]
    note: dict[str, Any]

    def fit(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The arrays and the note of a checkpoint of a fit."""
        if "fit" not in self.note:
            raise CheckpointError(
                f"The checkpoint {str(self.kept.path)!r} was saved without a fit, so it has no "
                f"position in a dataset. Give the directory of fit(checkpoint=...)."
            )
        return self.arrays, self.note

    def rerun(self, engine: Engine, observe: Observe, dataset: object, fingerprint: bool) -> Rerun:
        """The steps from here on; with fingerprints, even if the trainer takes none."""
        where, (arrays, note) = self.directory.directory, self.fit()
        end, duration = self._reached()
        # The fit may have been continued since, by a call that asked for more: the last one counts.
        note = {**note, "fit": {**note["fit"], "duration": duration or note["fit"]["duration"]}}
        return Rerun(engine, observe, dataset, arrays, note, where, fingerprint, end)

    def _reached(self) -> tuple[int | None, Mapping[str, Any] | None]:
        """Where the fit ended, None if it did not, and what its last call asked for, if known."""
        found = self.directory.found(self.kept.fit)
        end = found[-1].step if found[-1].ended else None
        for kept in reversed(found):
            if kept.path == self.kept.path:
                break
            with contextlib.suppress(orbax_files.DamagedCheckpoint):  # an earlier one says less
                return end, orbax_files.read_note(kept.path)[0]["fit"]["duration"]
        return end, None

    def continues(self, step: int) -> bool:
        """Whether a step is known to belong to this fit: a later checkpoint of it says so, and no later
        fit began before the step was over."""
        found = self.directory.found()
        later = [kept.step for kept in found if kept.fit == self.kept.fit]
        return max(later) > step and all(
            kept.step > step for kept in found if kept.fit > self.kept.fit
        )


def nearest(
    checkpoint: Checkpoint | str | os.PathLike[str],
    step: int,
    fits: int | None = None,
    *,
    before: bool = False,
    margin: int = 0,
) -> Start:
    """The last checkpoint at or before a step that is whole; a damaged one is passed over, with a note.

    Args:
        checkpoint: the directory, or a `tr.Checkpoint`.
        step: a step that was trained.
        fits: how many fits of the directory the trainer has made; None for all of them. A script that
            was killed in a later fit, and started again, looks back from where it is.
        before: whether only the state before the step is wanted, so that it may be the next one.
        margin: how many steps of the fit before this one are wanted too, if it has them.
    """
    check_step(step)
    given = checkpoint.directory if isinstance(checkpoint, Checkpoint) else checkpoint
    if not is_path(given):
        raise OptionError(
            f"A replay starts from a checkpoint: checkpoint= is the directory that fit(checkpoint=...) "
            f"was given. Received: checkpoint={checkpoint!r}."
        )
    if distributed.process_count() > 1:
        raise CheckpointError(
            f"A replay runs in one process; this program has {distributed.process_count()}. Use one "
            f"process with as many devices: checkpoints do not depend on the number of processes."
        )
    directory = CheckpointDirectory(Path(given))
    found = [kept for kept in directory.found() if fits is None or kept.fit < fits]
    where = str(directory.directory)
    if not found:
        raise CheckpointError(
            f"A replay starts from a checkpoint, and {where!r} {_without(directory.directory)}. Give "
            f"the directory that fit(checkpoint=...) was given."
        )
    last = found[-1]
    # `before` adds one: the state before the step after the last one is the end itself.
    if last.ended and step >= last.step + before:
        raise CheckpointError(
            f"A replay is of a step that was trained, and the last fit in {where!r} ended with step "
            f"{last.step - 1}. Received: step={step}."
        )
    earlier = [kept for kept in found if kept.step <= step and not _went_back(kept)]
    if not earlier:
        raise CheckpointError(
            f"A replay of step {step} starts from a checkpoint at or before it, and the earliest in "
            f"{where!r} is of step {found[0].step}: the step was trained before, or by another trainer."
        )
    # A later fit may have gone back and taken another way: its own checkpoints count.
    earlier.sort(key=lambda kept: (kept.fit, kept.step, kept.ended))
    while len(earlier) > 1 and earlier[-1].step > step - margin:
        if earlier[-2].fit != earlier[-1].fit:
            break
        earlier.pop()
    while True:
        kept = earlier.pop()
        try:
            return Start(kept, directory, *orbax_files.read(kept.path))
        except orbax_files.DamagedCheckpoint as error:
            # From an earlier one the steps are the same, and are proved in the same way.
            if not earlier or earlier[-1].fit != kept.fit:
                raise
            note_once(f"{error} The replay starts from the checkpoint before it.")


def _without(where: Path) -> str:
    """What is at a path instead of checkpoints."""
    if os.path.isfile(where) or os.path.isfile(where / RUN_FILE):
        return f"is {described(where)}"
    return "contains none" if os.path.isdir(where) else "does not exist"


def _went_back(kept: Kept) -> bool:
    """Whether the end of a fit has an earlier state, which a callback restored, so that the position in
    the dataset is not that of its step; if it is damaged, that is not known."""
    if not kept.ended:
        return False
    with contextlib.suppress(orbax_files.DamagedCheckpoint):
        return int(orbax_files.read_note(kept.path)[0]["step"]) != kept.step
    return True
