"""`tailrace bisect`: the first execution and step in which two runs differ, from their recordings."""

from __future__ import annotations

import dataclasses

import numpy as np

from tailrace.errors import RunError
from tailrace.records.fingerprints import GROUPS
from tailrace.runs.reader import Run

PROGRAM_ORDER = ("elements", "loss", "gradients", "parameters", "optimizer", "model_state")
"""The groups in the order in which a step computes them."""


_Ends = dict[int, tuple[int, dict[str, int]]]
"""Executions by their end: how many steps they have, and their fingerprints."""


@dataclasses.dataclass(frozen=True)
class Bisection:
    """Where two runs first differ; false if they do not.

    Attributes:
        equal_until: up to this step, states are known to be equal (their fingerprints are); 0 if
            nothing is known.
        ended: the end of the first execution whose fingerprints differ: the step after its last.
        groups: the groups of tensors that differ there, in the order of the program.
        step: the first step whose loss, or element, differs; None if none does.
        what: "loss" or "elements", for that step.
        compared: the number of executions and steps that both have.
        missing: why no states were compared; empty if some were.
    """

    equal_until: int
    ended: int | None
    groups: tuple[str, ...]
    step: int | None
    what: str
    compared: tuple[int, int]
    missing: str = ""

    def __bool__(self) -> bool:
        return self.ended is not None or self.step is not None

    def __str__(self) -> str:
        executions, steps = self.compared
        lines = []
        if not self and self.missing:
            lines.append(f"no difference in the losses of {steps} steps that both have")
        elif not self:
            lines.append(
                f"no difference in {executions} executions and {steps} steps that both have"
            )
        if self.ended is not None:
            # Not "equal before step 0": the first states of two runs are not recorded.
            known = f"states are equal before step {self.equal_until}"
            lines.append(
                f"the first execution that differs ends with step {self.ended - 1}: "
                f"{', '.join(self.groups)}; "
                f"{known if self.equal_until else 'no earlier states were compared'}"
            )
        if self.step is not None:
            lines.append(f"the first step with other {self.what} is {self.step}")
        if self.missing:
            lines.append(f"states were not compared: {self.missing}")
        return "\n".join(lines)


def bisect(first: Run, second: Run) -> Bisection:
    """Compare two runs: fingerprints of executions that end at the same step, then steps."""
    ours, theirs = _by_end(first), _by_end(second)
    common = sorted(set(ours) & set(theirs))
    step, what, steps = _first_step(first, second)
    if not common and not steps:
        raise RunError("The two runs have no step in common, so nothing can be compared.")
    equal, ended, groups = 0, None, ()
    for end in common:
        (length, mine), (other_length, other) = ours[end], theirs[end]
        # Values over all steps of an execution are comparable only if both have the same steps.
        names = PROGRAM_ORDER if length == other_length else PROGRAM_ORDER[2:]
        groups = tuple(g for g in names if mine[g] and other[g] and mine[g] != other[g])
        if groups:
            ended = end
            break
        equal = end
    counts = len(common), steps
    return Bisection(equal, ended, groups, step, what, counts, _missing(ours, theirs, common))


def _missing(ours: _Ends, theirs: _Ends, common: list[int]) -> str:
    """Why no states were compared; empty if some were."""
    if common:
        return ""
    if ours and theirs:
        return "no execution of one run ends with the same step as one of the other"
    which = "neither run has" if not ours and not theirs else "only one of the runs has"
    return f"{which} fingerprints (tr.Trainer(..., fingerprint=True))"


def _by_end(run: Run) -> _Ends:
    columns = run.executions
    found: _Ends = {}
    for row in range(len(columns["steps"]) if "chain" in columns else 0):
        first, steps = int(columns["first_step"][row]), int(columns["steps"][row])
        # 0 is "not recorded", and compared with nothing.
        groups = {g: int(columns[g][row]) if g in columns else 0 for g in GROUPS}
        if any(groups.values()):
            # By the end: a fingerprint is of the state after the execution. Of a step that was
            # computed twice, the last one counts.
            found[first + steps] = (steps, groups)
    return found


def _first_step(first: Run, second: Run) -> tuple[int | None, str, int]:
    """The first step whose elements, or else whose losses, differ."""
    step, what, count = None, "", 0
    for name in ("elements", "loss"):
        one, other = _by_step(first, name), _by_step(second, name)
        common = sorted(set(one) & set(other))
        count = max(count, len(common))
        # As bytes: the first bit that differs is wanted, and a NaN equals itself.
        differ = [s for s in common if one[s] != other[s]]
        # Elements first: in the same step, other elements explain another loss.
        if differ and (step is None or differ[0] < step):
            step, what = differ[0], name
    return step, what, count


def _by_step(run: Run, name: str) -> dict[int, bytes]:
    values = run.elements if name == "elements" else run.history.each(run.history.leading)
    if values is None:
        return {}
    steps = map(int, run.history.steps)
    return {s: np.ascontiguousarray(v).tobytes() for s, v in zip(steps, values, strict=True)}
