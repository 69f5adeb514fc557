"""The first tensor in which two runs differ: both are replayed, step by step, with all tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from tailrace.runs.diff.difference import rank_of
from tailrace.taps.bit_digests import bit_digest, joined
from tailrace.taps.tap import Tap
from tailrace.trainer.callbacks.callback import AnyTrainer
from tailrace.trainer.executions import Results
from tailrace.trainer.lookback.comparison import Comparison
from tailrace.trainer.lookback.recorded import Recorded, known_of
from tailrace.trainer.lookback.start import nearest


@dataclasses.dataclass(frozen=True)
class FirstTensor:
    """The first tensor that differs; its name is None where all are equal in the steps looked at.

    Attributes:
        step: the step, or the last one looked at.
        name: the tensor.
        others: how many more differ in that step.
        unproved: for each replay that differs from its run, which one, and the first difference.
    """

    step: int
    name: str | None
    others: int = 0
    unproved: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = f"; {self.others} more differ in that step" if self.others else ""
        said = f"the first tensor that differs: {self.name!r} in step {self.step}{more}"
        if self.name is None:
            said = f"replayed up to step {self.step}: no tensor that both have differs"
        lines = [said, *self.unproved]
        if self.unproved:
            lines.append(
                "so what was replayed is not what ran: give the functions that made these runs, with "
                "their data"
            )
        return "\n".join(lines)


class Side:
    """One of the two runs, replayed.

    Args:
        which: "first" or "second".
        from_step: the first step whose tensors are looked at.
        where: the directory of its checkpoints.
        made: its trainer and dataset.
        recorded: what the run says of its steps.
    """

    def __init__(
        self,
        which: str,
        from_step: int,
        where: str,
        made: tuple[AnyTrainer, object],
        recorded: Recorded,
    ) -> None:
        trainer, dataset = made
        self._which, self._start = which, nearest(where, from_step)
        self._recorded = known_of(self._start, from_step, recorded, trainer.engine)
        # Digests, not tensors: all of them, of every step that is looked at.
        taps, marks = [Tap("*", reduce=bit_digest)], self._recorded.has_fingerprints
        self.rerun = self._start.rerun(trainer.engine, taps, dataset, marks)
        self._comparison = Comparison(self._recorded)

    def advance(self, until: int) -> None:
        """Run to a step without looking."""
        for end in (*self._recorded.ends(self.rerun.step, until), until):
            self._comparison.take_all(self.rerun.advance(end))

    def look(self) -> dict[str, bytes]:
        """Run one step; the digests of its tensors, by name."""
        results = self.rerun.look()
        self._comparison.take(results, self.rerun.tapped)
        return _digests(results)

    def settle(self) -> None:
        """Run on to where the last step can be compared: an update shows in the state after it."""
        step = self.rerun.step - 1
        around = self._recorded.around(step)
        if around is not None:
            self.advance(sum(around))
        elif self._start.continues(step + 1):
            self.advance(step + 2)

    @property
    def unproved(self) -> str | None:
        """How the replay differs from the run; None if it does not."""
        found = self._comparison.differences
        return f"the replay of the {self._which} run is NOT PROVED: {found[0]}" if found else None


def first_tensor(
    from_step: int,
    until: int,
    sides: Iterable[tuple[str, tuple[AnyTrainer, object], Recorded]],
) -> FirstTensor:
    """Replay steps in two runs until a tensor differs.

    Args:
        from_step: states are equal before it.
        until: the last step to look at.
        sides: for each run, its directory of checkpoints, its trainer and dataset, and what it
            recorded.
    """
    named = zip(("first", "second"), sides, strict=True)
    both = [Side(which, from_step, *side) for which, side in named]
    with contextlib.ExitStack() as stack:
        for side in both:
            stack.enter_context(side.rerun.closing())
            side.advance(from_step)
        found = _look(from_step, until, both)
        for side in both:
            side.settle()
    return dataclasses.replace(found, unproved=tuple(filter(None, (s.unproved for s in both))))


def _look(from_step: int, until: int, both: Sequence[Side]) -> FirstTensor:
    # Both advance together: the first step that differs ends the search, and later ones are not
    # looked at.
    for step in range(from_step, until + 1):
        one, other = (side.look() for side in both)
        differ = [name for name in one if name in other and one[name] != other[name]]
        if differ:
            # Python's sort is stable: within a kind tensors stay in the order of the program.
            return FirstTensor(step, sorted(differ, key=rank_of)[0], len(differ) - 1)
    return FirstTensor(until, None)


def _digests(results: Results) -> dict[str, bytes]:
    return {
        name: np.asarray(joined(record.values)).tobytes()
        for (name, _), record in results.records.items()
    }
