"""Steps that are run again, against what was recorded of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tailrace.devices.surroundings import SURROUNDINGS, changed_since
from tailrace.records.fingerprints import elements_fingerprint, loss_fingerprint
from tailrace.records.history import SKIPPED, leading, one_of, step_means
from tailrace.trainer.executions import Results
from tailrace.trainer.lookback.outcome import FORM, Difference, Replay
from tailrace.trainer.lookback.recorded import (
    WEIGHTS,
    Recorded,
    differences_of,
    same_bits,
    with_weights,
)
from tailrace.trainer.observation.logged_values import is_logged


class Comparison:
    """What was recorded of steps that are run again, against what they are now.

    A replay may cut an execution into several dispatches: losses and elements are put together, and
    the state and gradients are those of the last of them.

    Args:
        recorded: what is known of the steps.
        all_known: whether a scalar that only one of both has is a difference.

    Attributes:
        differences: what differs.
        in_doubt: scalars that differ in a step that ran with taps. XLA may round a value of `aux`
            otherwise there (a `logsumexp` of a tapped activation on a CPU, by one bit), while loss and
            state are bit-equal: only the step without taps can say.
        compared: what was compared.
        nothing_there: groups of tensors that this training does not have, such as a model state.
    """

    def __init__(self, recorded: Recorded, all_known: bool = True) -> None:
        self._recorded, self._all_known = recorded, all_known
        self.differences: list[Difference] = []
        self.in_doubt: list[Difference] = []
        self.compared: list[str] = []
        self.nothing_there: set[str] = set()
        self._steps: set[int] = set()
        self._losses: list[np.ndarray] = []
        self._elements: list[np.ndarray] = []
        self._first: int | None = None

    def take_form(self, step: int, was: str | None, found: str) -> None:
        """Take in the dtypes and shapes of elements; bits alone say neither."""
        if not was:
            return  # an earlier version did not keep them
        self.compared.append(FORM)
        if was != found:
            self.differences.insert(0, Difference(step, FORM, was, found))  # the cause of others

    def take_all(self, several: Iterable[Results]) -> None:
        """Take in dispatches."""
        for results in several:
            self.take(results)

    def take(self, results: Results, tapped: bool = False) -> None:
        """Take in one dispatch; `tapped` if taps observed it."""
        losses, first = one_of(results.scalars), results.first_step
        for row, found in enumerate(losses):
            was = self._recorded.losses.get(first + row)
            if was is None:
                continue
            self._steps.add(first + row)
            others = _others(results, row)
            # A run directory has no arrays.
            known = self._recorded.scalars(first + row)
            others |= {n: array[row] for n, array in results.arrays.items() if n in known}
            self._compare_step(first + row, was, found, others, tapped)
        self._losses.append(losses)
        if results.elements is not None:
            self._elements.append(results.elements)
        self._first = first if self._first is None else self._first
        self._compare_execution(results, first + results.steps)

    def _compare_step(
        self,
        step: int,
        loss: np.ndarray,
        again: np.ndarray,
        others: Mapping[str, np.ndarray],
        tapped: bool,
    ) -> None:
        """Compare the loss and all other scalars of a step."""
        lead = self._recorded.leading
        was, found = {lead: loss, **self._recorded.scalars(step)}, {lead: again, **others}
        for name in dict.fromkeys((*was, *found)):
            if name not in was or name not in found:
                self._miss(step, name, was, found)
            elif _equal(was[name], found[name]):
                self.compared.append(name)
            elif tapped and name != lead:
                self.in_doubt.append(_of_scalar(step, name, was, found))
            else:
                self.compared.append(name)
                self.differences.append(_of_scalar(step, name, was, found))

    def _miss(
        self, step: int, name: str, was: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]
    ) -> None:
        """Note a scalar that only one of both has."""
        if self._all_known and step in self._recorded.rows and not _may_lack(name, was):
            one = Difference(step, name, _mean(name, was), _mean(name, found))
            self.differences.append(one)

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
            # The digest of no tensors is 0, which also says that none was computed.
            self.nothing_there |= {g for g in found if not (found[g] or was.get(g))}
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


def _others(results: Results, row: int) -> dict[str, np.ndarray]:
    """All scalars of a step but the loss: [microbatches, replicas] by name."""
    lead = leading(results.scalars)
    found = {name: values[row] for name, values in results.scalars.items() if name != lead}
    return with_weights(found, None if results.weights is None else results.weights[row])


def _equal(was: np.ndarray, found: np.ndarray) -> bool:
    # Bits: NaN is equal to NaN here, and 0.0 is not -0.0. A run directory may keep a narrow dtype in
    # a wider one.
    return same_bits(was, np.asarray(found).astype(np.asarray(was).dtype))


def _may_lack(name: str, was: Mapping[str, np.ndarray]) -> bool:
    """Whether a scalar that a replay or a record lacks says nothing of the step."""
    # Values of `log=` are not computed by a step, nor is the flag of a guard: without one, nothing is
    # skipped. NaN alone is what a run directory has where a scalar of other steps has no value.
    values = np.asarray(was.get(name, 0.0))
    filled = values.dtype.kind == "f" and bool(np.isnan(values).all())
    return is_logged(name) or name == SKIPPED or filled


def _mean(name: str, values: Mapping[str, np.ndarray]) -> float | None:
    """The value of a step, as a history has it; None if there is none."""
    if name not in values:
        return None
    weights, parts = values.get(WEIGHTS), np.asarray(values[name])
    if parts.ndim != 2:
        return float(np.mean(parts))
    own = name == WEIGHTS or weights is None
    return float(step_means(parts[None], None if own else np.asarray(weights)[None])[0])


def _of_scalar(
    step: int, name: str, was: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]
) -> Difference:
    """How a scalar differs: in its mean, or else in the first microbatch and replica.

    Args:
        step: the step.
        name: the scalar.
        was: the recorded scalars: [microbatches, replicas] by name.
        found: those of the replay.
    """
    one, other = np.asarray(was[name]), np.asarray(found[name])
    mean = _mean(name, was), _mean(name, found)
    if not same_bits(*mean) or one.shape != other.shape or one.ndim != 2:
        return Difference(step, name, *mean)
    # Values that differ in their last bits may have the same mean, and equal numbers would explain
    # nothing.
    differ = [place for place in np.ndindex(one.shape) if not _equal(one[place], other[place])]
    microbatch, replica = differ[0]
    part = f"microbatch {microbatch}, replica {replica}"
    return Difference(step, name, float(one[differ[0]]), float(other[differ[0]]), part)


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
    return Replay(
        step,
        loss,
        seen.records,
        found,
        compared,
        int(note["step"]),
        changed,
        nothing_there=comparison.nothing_there,
    )
