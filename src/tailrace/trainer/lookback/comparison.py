"""Steps that are run again, against what was recorded of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tailrace.devices.surroundings import SURROUNDINGS, changed_since
from tailrace.records.fingerprints import elements_fingerprint, loss_fingerprint
from tailrace.trainer.executions import Results
from tailrace.trainer.lookback.outcome import Difference, Replay
from tailrace.trainer.lookback.recorded import Recorded, differences_of, same_bits


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
                self.differences.append(_of_loss(number, np.asarray(was), np.asarray(found)))
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


def _of_loss(step: int, was: np.ndarray, found: np.ndarray) -> Difference:
    """How a loss differs: in its mean, or else in the first microbatch and replica.

    Args:
        step: the step.
        was: the recorded losses: [microbatches, replicas].
        found: those of the replay.
    """
    mean = float(np.mean(was)), float(np.mean(found))
    if not same_bits(*mean) or was.shape != found.shape or was.ndim != 2:
        return Difference(step, "loss", *mean)
    # Losses that differ in their last bits may have the same mean, and equal numbers would explain
    # nothing.
    differ = [place for place in np.ndindex(was.shape) if not same_bits(was[place], found[place])]
    microbatch, replica = differ[0]
    part = f"microbatch {microbatch}, replica {replica}"
    return Difference(step, "loss", float(was[differ[0]]), float(found[differ[0]]), part)


def replay_of(seen: Results, comparison: Comparison, note: Mapping[str, Any]) -> Replay:
    """What a replay found: the step that was looked at, and what all steps were compared with.

    Args:
        seen: the results of the step.
        comparison: the comparison with what was recorded.
        note: the note of the checkpoint.
    """
    loss, step = float(seen.losses[0]), seen.first_step
    found, compared = comparison.differences, comparison.compared
    if comparison.proved(step, step + 1) is None:
        compared = []  # only steps on the way to it were recorded
    changed = changed_since(note.get(SURROUNDINGS))
    return Replay(step, loss, seen.records, found, compared, int(note["step"]), changed)
