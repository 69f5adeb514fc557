"""What is known of past steps: their losses and other scalars, and the fingerprints of executions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from tailrace.base.messages import counted
from tailrace.errors import CheckpointError
from tailrace.records.fingerprints import GROUPS
from tailrace.records.history import LOSS, History
from tailrace.runs.info import RUN_FILE
from tailrace.runs.reader import Run, open_run
from tailrace.runs.writer import RunWriter
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.directory import CheckpointDirectory, Kept
from tailrace.trainer.checkpoints.snapshot import HISTORY, history_of
from tailrace.trainer.engine import Engine
from tailrace.trainer.lookback.start import Start
from tailrace.trainer.observation.journal import Journal

WEIGHTS = "weights"
"""The name of the weights of microbatches, where they are compared."""


@dataclasses.dataclass
class Recorded:
    """Losses and other scalars by step, and fingerprints by execution.

    Attributes:
        losses: those of all microbatches and replicas of a step, in order, by step.
        leading: the name of the loss, or of the metric in its place.
        executions: fingerprints by (first step, steps).
        rows: where the other scalars of a step are: columns by name, and the row in them.
    """

    losses: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    executions: dict[tuple[int, int], Mapping[str, int]] = dataclasses.field(default_factory=dict)
    rows: dict[int, tuple[Mapping[str, np.ndarray], int]] = dataclasses.field(default_factory=dict)
    leading: str = LOSS

    def add_history(self, history: History) -> Recorded:
        """Take in a history, as a fit or a checkpoint has it."""
        if len(history):
            self.leading = lead = history.leading
            names = [*history.step_names, *history.array_names]
            columns = {name: history.each(name) for name in names if name != lead}
            columns = with_weights(columns, history.weights)
            self._add_steps(history.steps, history.each(lead), columns)
        self._add(history.fingerprints)
        return self

    def add_run(self, run: Run) -> Recorded:
        """Take in a run directory."""
        self.add_history(run.history)
        self._add(run.executions)
        return self

    # A trainer that went back took another way from there: what was recorded of later steps is of the
    # way that it left.

    def _add_steps(
        self, steps: np.ndarray, losses: np.ndarray, columns: Mapping[str, np.ndarray]
    ) -> None:
        backs = np.flatnonzero(np.diff(steps) <= 0) + 1
        for first, end in zip((0, *backs), (*backs, len(steps)), strict=True):
            self.losses = {s: v for s, v in self.losses.items() if s < steps[first]}
            self.rows = {s: v for s, v in self.rows.items() if s < steps[first]}
            self.losses.update(zip(map(int, steps[first:end]), losses[first:end], strict=True))
            self.rows.update((int(steps[row]), (columns, row)) for row in range(first, end))

    def scalars(self, step: int) -> dict[str, np.ndarray]:
        """The other scalars of a step: [microbatches, replicas] by name."""
        columns, row = self.rows.get(step, ({}, 0))
        return {name: column[row] for name, column in columns.items()}

    def _add(self, columns: Mapping[str, np.ndarray]) -> None:
        groups = [group for group in GROUPS if group in columns]
        end = 0
        for row, first in enumerate(map(int, columns["first_step"] if groups else ())):
            found = {group: int(columns[group][row]) for group in groups}
            # Rows are in the order of training. A row that begins before the last one ended says
            # that training went back.
            if not row or first < end:
                self.executions = {k: v for k, v in self.executions.items() if sum(k) <= first}
            end = first + int(columns["steps"][row])
            if any(found.values()):
                self.executions[first, end - first] = found

    @property
    def has_fingerprints(self) -> bool:
        """Whether there are fingerprints to compare with."""
        return bool(self.executions)

    def ends(self, first: int, last: int) -> list[int]:
        """Where executions ended between two steps, in order."""
        found = {start + steps for start, steps in self.executions}
        return sorted(end for end in found if first < end <= last)

    def around(self, step: int) -> tuple[int, int] | None:
        """The execution with fingerprints that a step belongs to."""
        for first, steps in self.executions:
            if first <= step < first + steps:
                return first, steps
        return None


def recorded_by(journal: Journal) -> Recorded:
    """What a trainer knows itself: its history, and its run directory."""
    found = Recorded()
    if isinstance(journal.sink, RunWriter) and (journal.sink.directory / RUN_FILE).exists():
        journal.flush()
        found.add_run(open_run(journal.sink.directory))
    return found.add_history(journal.history)


def same_bits(one: object, other: object) -> bool:
    """Whether two arrays have the same values, bit for bit; they may be of different shapes."""
    return np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


def with_weights(
    scalars: Mapping[str, np.ndarray], weights: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Scalars by name, with the weights of their means: other weights make another loss."""
    # The user's own value of that name comes first: it is recorded under it.
    return dict(scalars) if weights is None else {WEIGHTS: weights, **scalars}


def differences_of(
    recorded: Mapping[str, int], found: Mapping[str, int], groups: Iterable[str] = GROUPS
) -> list[str]:
    """The groups whose recorded and found fingerprints differ, in the order of the program."""
    return [
        group
        for group in groups
        if recorded.get(group) and group in found and recorded[group] != found[group]
    ]


# -- what later checkpoints know -----------------------------------------------------------------


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
            each = [a for name, a in arrays.items() if name.startswith(f"{HISTORY}each/")]
            if each and len(each[0]):
                _check_elements(each[0][0].size, parts, directory)
            return recorded.add_history(history_of(arrays, first, *parts))
    return recorded
