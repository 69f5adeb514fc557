"""The first tensor in which two runs differ: both are replayed, step by step, with all tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tailrace.runs.diff.difference import rank_of
from tailrace.taps.bit_digests import bit_digest, joined
from tailrace.taps.tap import Tap
from tailrace.trainer.callbacks.callback import AnyTrainer
from tailrace.trainer.executions import Results
from tailrace.trainer.lookback.rerun import Rerun
from tailrace.trainer.lookback.start import nearest


@dataclasses.dataclass(frozen=True)
class FirstTensor:
    """The first tensor that differs; None where all are equal in the steps looked at."""

    step: int
    name: str | None
    others: int = 0

    def __str__(self) -> str:
        if self.name is None:
            return f"replayed up to step {self.step}: no tensor that both have differs"
        more = f"; {self.others} more differ in that step" if self.others else ""
        return f"the first tensor that differs: {self.name!r} in step {self.step}{more}"


def first_tensor(
    from_step: int, until: int, sides: Sequence[tuple[str, tuple[AnyTrainer, object]]]
) -> FirstTensor:
    """Replay steps in two runs until a tensor differs.

    Args:
        from_step: states are equal before it.
        until: the last step to look at.
        sides: for each run, its directory of checkpoints, and its trainer and dataset.
    """
    reruns = [_rerun(from_step, where, *made) for where, made in sides]
    with reruns[0].closing(), reruns[1].closing():
        for rerun in reruns:
            for _ in rerun.advance(from_step):
                pass
        # Both advance together: the first step that differs ends the search, and later ones are
        # never run.
        for step in range(from_step, until + 1):
            seen = [_digests(rerun.look()) for rerun in reruns]
            differ = [
                name for name in seen[0] if name in seen[1] and seen[0][name] != seen[1][name]
            ]
            if differ:
                # Python's sort is stable: within a kind tensors stay in the order of the program.
                return FirstTensor(step, sorted(differ, key=rank_of)[0], len(differ) - 1)
    return FirstTensor(until, None)


def _rerun(step: int, where: str, trainer: AnyTrainer, dataset: object) -> Rerun:
    start = nearest(where, step)
    # Digests, not tensors: all of them, of every step that is looked at.
    taps = [Tap("*", reduce=bit_digest)]
    return Rerun(trainer.engine, taps, dataset, *start.fit(), start.directory.directory)


def _digests(results: Results) -> dict[str, bytes]:
    return {
        name: np.asarray(joined(record.values)).tobytes()
        for (name, _), record in results.records.items()
    }
