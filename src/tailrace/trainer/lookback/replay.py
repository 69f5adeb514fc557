"""`trainer.replay`: a past step again, with any tap, and whether it is the step that happened."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.data.paths import is_path
from tailrace.devices.processes import distributed
from tailrace.devices.surroundings import SURROUNDINGS, changed_since
from tailrace.errors import CheckpointError, OptionError
from tailrace.messages import counted, note_once
from tailrace.records.fingerprints import elements_fingerprint, loss_fingerprint
from tailrace.records.records import Record, Records
from tailrace.runs.info import RUN_FILE
from tailrace.taps.tap import Observe
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.checkpoints.directory import CheckpointDirectory, Kept, described
from tailrace.trainer.checkpoints.snapshot import HISTORY, history_of
from tailrace.trainer.engine import Engine
from tailrace.trainer.executions import Results
from tailrace.trainer.lookback.recorded import Recorded, differences_of, same_bits
from tailrace.trainer.lookback.rerun import Rerun


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that differs from the recorded one.

    Attributes:
        step: the step, or the last one of the execution.
        what: "loss", or the group of tensors whose fingerprint differs.
        recorded: the value that the training recorded.
        replayed: the value in the replay.
    """

    step: int
    what: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        if self.what == "loss" and not isinstance(self.recorded, int):
            return f"step {self.step}: loss {self.recorded} recorded, {self.replayed} replayed"
        marks = f"{self.recorded:016x} recorded, {self.replayed:016x} replayed"
        return f"after step {self.step}: {self.what} {marks}"


class Replay(Mapping[Any, Record]):
    """A replayed step: the records of its taps, by name, and whether it provably equals the original.

    As a condition it is true if it is proved, whatever was observed.

    Attributes:
        step: its index.
        loss: its loss.
        proved: True if everything that was recorded is equal bit for bit; False if something
            differs; None if nothing was recorded.
        differences: what differs, the earliest first.
        evidence: a description of what was compared.
        started_at: the step of the checkpoint that the replay started from.
        changed: the versions, flags and devices that have changed since, which are the likely causes
            of a difference.
    """

    def __init__(
        self,
        step: int,
        loss: float,
        records: Records,
        differences: list[Difference],
        compared: list[str],
        started_at: int,
        changed: Sequence[str] = (),
        source: str = "checkpoint",
    ) -> None:
        self.step, self.loss, self.started_at = step, loss, started_at
        self._records, self._source = records, source
        self.differences, self.changed = differences, list(changed)
        self.evidence = ", ".join(dict.fromkeys(compared))
        self.proved = not differences if compared else None

    def __getitem__(self, name: str | tuple[str, str]) -> Record:
        return self._records[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __bool__(self) -> bool:
        # Not the number of records: `assert trainer.replay(...)` must not pass without proof.
        return self.proved is True

    def __str__(self) -> str:
        said = {
            True: f"proved: equal to what was recorded, bit for bit ({self.evidence})",
            False: "NOT PROVED: it differs from what was recorded",
            None: "not proved: nothing was recorded of it",
        }[self.proved]
        lines = [
            f"step {self.step}, loss {self.loss:.7g}, from the {self._source} of {self.started_at}"
        ]
        lines += [said, *(f"  {one}" for one in self.differences[:10])]
        if any(one.what == "elements" for one in self.differences):
            lines.append(
                "the elements differ: the dataset or its order is not that of the training"
            )
        elif self.differences and "elements" in self.evidence:
            lines.append("the elements are equal: the model, optimizer, options or machine differ")
        if not self.proved:
            lines += [f"  changed since: {one}" for one in self.changed]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Replay(step {self.step}, proved={self.proved}, {len(self)} records)"


def replay(
    engine: Engine,
    step: int,
    dataset: object,
    observe: Observe,
    checkpoint: Checkpoint | str | os.PathLike[str],
    recorded: Recorded,
    fits: int | None = None,
) -> Replay:
    """Run a past step again; see `tr.Trainer.replay`."""
    start = nearest(checkpoint, step, fits)
    note = start.note
    recorded = known_of(start, step, recorded, engine)
    rerun = start.rerun(engine, observe, dataset, recorded)
    # Before the first dispatch: a step beyond the end would be missed only there.
    rerun.check(step)
    around = recorded.around(step)
    comparison = Comparison(recorded)
    with rerun.closing():
        # Stop where executions ended: fingerprints were taken there, so they can be compared only
        # there.
        for end in recorded.ends(rerun.step, step):
            comparison.take_all(rerun.advance(end))
        comparison.take_all(rerun.advance(step))
        seen = rerun.look()
        comparison.take(seen)
        # On to the end of the execution that the step was in: its fingerprint is the only proof of
        # the state after the step. Without fingerprints, the next loss depends on that state.
        if around is not None:
            comparison.take_all(rerun.advance(sum(around)))
        elif start.continues(step + 1):
            comparison.take_all(rerun.advance(step + 2))
    return replay_of(seen, comparison, note)


def replay_of(seen: Results, comparison: Comparison, note: Mapping[str, Any]) -> Replay:
    """What a replay found: the step that was looked at, and what all steps were compared with.

    Args:
        seen: the results of the step.
        comparison: the comparison with what was recorded.
        note: the note of the checkpoint.
    """
    loss, step = float(np.mean(seen.scalars["loss"])), seen.first_step
    found, compared = comparison.differences, comparison.compared
    if comparison.proved(step, step + 1) is None:
        compared = []  # only steps on the way to it were recorded
    changed = changed_since(note.get(SURROUNDINGS))
    return Replay(step, loss, seen.records, found, compared, int(note["step"]), changed)


class Comparison:
    """What was recorded of steps that are run again, against what they are now.

    A replay may cut an execution into several dispatches: losses and elements are put together, and
    the state and gradients are those of the last of them.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self.differences: list[Difference] = []
        self.compared: list[str] = []
        self._steps: set[int] = set()
        self._losses: list[np.ndarray] = []
        self._elements: list[np.ndarray] = []
        self._first: int | None = None

    def take_all(self, several: Iterable[Results]) -> None:
        """Take in dispatches."""
        for results in several:
            self.take(results)

    def take(self, results: Results) -> None:
        """Take in one dispatch."""
        losses, first = results.scalars["loss"], results.first_step
        for number, found in enumerate(losses, start=first):
            was = self._recorded.losses.get(number)
            if was is None:
                continue
            self.compared.append("loss")
            self._steps.add(number)
            # Bits: NaN is equal to NaN here, and 0.0 is not -0.0.
            if not same_bits(was, found):
                mean = float(np.mean(was)), float(np.mean(found))
                self.differences.append(Difference(number, "loss", *mean))
        self._losses.append(losses)
        if results.elements is not None:
            self._elements.append(results.elements)
        self._first = first if self._first is None else self._first
        self._compare_execution(results, first + results.steps)

    def proved(self, first: int, end: int) -> bool | None:
        """Whether steps are what happened; None if one of them was not recorded."""
        if self.differences:
            return False
        return True if first < end and self._steps.issuperset(range(first, end)) else None

    def _compare_execution(self, results: Results, end: int) -> None:
        ends = {start + steps: start for start, steps in self._recorded.executions}
        if end not in ends:
            return
        start = ends[end]
        was = self._recorded.executions[start, end - start]
        found = dict(results.fingerprint)
        # A replay may begin in the middle of an execution, whose losses and elements it then has in
        # part only.
        whole = self._first is not None and self._first <= start
        # These are of this dispatch; the recorded ones are of all dispatches of the execution.
        for group in ("loss", "elements"):
            found.pop(group, None)
        if found and whole:
            found |= self._of_whole(start, end)
        if found:
            self.compared += [f"fingerprint of {g}" for g in found if was.get(g)]
            for group in differences_of(was, found):
                one = Difference(end - 1, group, was[group], found[group])
                self.differences.append(one)
        self._losses, self._elements, self._first = [], [], None

    def _of_whole(self, start: int, end: int) -> dict[str, int]:
        """The fingerprints of what belongs to all steps of an execution."""
        count = end - start
        found = {"loss": loss_fingerprint(np.concatenate(self._losses)[-count:], start)}
        if self._elements:
            elements = np.concatenate(self._elements)[-count:]
            found["elements"] = elements_fingerprint(elements, start)
        return found


# -- which checkpoint ---------------------------------------------------------------------------


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

    def rerun(self, engine: Engine, observe: Observe, dataset: object, recorded: Recorded) -> Rerun:
        """The steps from here on, with fingerprints if there are some to compare with."""
        where, marks = self.directory.directory, bool(recorded.executions)
        return Rerun(engine, observe, dataset, *self.fit(), where, marks)

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


def known_of(start: Start, step: int, recorded: Recorded, engine: Engine) -> Recorded:
    """What is recorded, with what later checkpoints of a trainer know of a step."""
    directory, parts = (
        start.directory,
        (engine.accumulation.microbatches, engine.placement.replicas),
    )
    _check_elements(start.fit()[1]["fit"]["elements_per_step"], parts, directory)
    if step in recorded.losses:
        return recorded

    def read(kept: Kept) -> tuple[Mapping[str, np.ndarray], int]:
        arrays, note = Start(kept, directory, *orbax_files.read(kept.path)).fit()
        return arrays, int(note["fit"]["progress"]["first_step"])

    return with_later_history(recorded, directory, step, read, parts)


def _check_elements(there: int, parts: tuple[int, int], directory: CheckpointDirectory) -> None:
    """Refuse steps that took another number of elements than those of this trainer or model."""
    here = parts[0] * parts[1]
    if there != here:
        raise CheckpointError(
            f"A step in {str(directory.directory)!r} took {counted(there, 'element')} (accumulation x "
            f"replicas), and here it takes {here}. Use the accumulation and replicas of the training."
        )


def with_later_history(
    recorded: Recorded,
    directory: CheckpointDirectory,
    step: int,
    read: Callable[[Kept], tuple[Mapping[str, np.ndarray], int]],
    parts: tuple[int, int],
) -> Recorded:
    """What is recorded, with the history of a step in a later checkpoint: each has that of its fit.

    Args:
        recorded: what is known already; it is added to.
        directory: the checkpoints.
        step: the step.
        read: returns the arrays of a checkpoint, and the first step of its fit.
        parts: the numbers of microbatches and replicas.
    """
    # Newest first: each has the history of its whole fit, and the latest has the most of it.
    for kept in reversed([kept for kept in directory.found() if kept.step > step]):
        try:
            arrays, first = read(kept)
        except orbax_files.DamagedCheckpoint:
            continue  # an earlier one may know the step too
        if first <= step:
            losses = arrays.get(f"{HISTORY}each/loss")
            if losses is not None and len(losses):
                _check_elements(losses[0].size, parts, directory)
            return recorded.add_history(history_of(arrays, first, *parts))
    return recorded
