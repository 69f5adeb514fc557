"""What a trainer can say of its past: the methods of `tr.Trainer` that look back."""

from __future__ import annotations

import os
from typing import Any

from tailrace.data.trees import Tree
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.engine import Engine
from tailrace.trainer.lookback.bundled import replay_bundle
from tailrace.trainer.lookback.explain_step import StepExplanation, explain_step
from tailrace.trainer.lookback.recorded import recorded_by
from tailrace.trainer.lookback.replay import Replay, replay
from tailrace.trainer.lookback.rewind import rewind
from tailrace.trainer.observation.journal import Journal


class LookingBack:
    """Past steps of a trainer, run again."""

    engine: Engine
    _journal: Journal

    def _check_alone(self) -> None:
        raise NotImplementedError

    @property
    def _made(self) -> int | None:
        """How many fits with checkpoints this trainer has made; None if none."""
        raise NotImplementedError

    def replay(
        self,
        step: int,
        dataset: object,
        *,
        observe: Any = (),
        checkpoint: Checkpoint | str | os.PathLike[str],
    ) -> Replay:
        """Run a past step again, look at it with any taps, and say whether it is what happened.

        The nearest checkpoint before the step is taken, the dataset brought to its position, and the
        steps up to this one run without taps; validation and callbacks are not. Losses and, with
        `fingerprint=True`, the state at the ends of executions are compared with what was recorded.
        The trainer is unchanged afterwards. While a replay runs, the device holds two states.

        Args:
            step: the number of the step.
            dataset: the dataset that was trained on.
            observe: taps, as for the trainer.
            checkpoint: the directory that `fit(checkpoint=...)` was given.

        Returns:
            A `Replay`: the records of the step by name, with `proved` (None if nothing was recorded)
            and `differences`.
        """
        self._check_alone()
        recorded = recorded_by(self._journal)
        return replay(self.engine, step, dataset, observe, checkpoint, recorded, self._made)

    def explain_step(
        self,
        step: int,
        dataset: object,
        *,
        checkpoint: Checkpoint | str | os.PathLike[str],
    ) -> StepExplanation:
        """Run a past step again, example by example: finds the rows and the layer behind its loss.

        The loss function is called with one row at a time, so it should be a mean over rows. Nothing
        of this costs anything while training.

        Args:
            step: the number of the step.
            dataset: the dataset that was trained on; of `tr.batches`, rows have their numbers.
            checkpoint: the directory that `fit(checkpoint=...)` was given.

        Returns:
            A `StepExplanation`: loss, gradient norm and alignment with the step's gradient for each
            row, the most unusual first; and which tensor grew first.
        """
        self._check_alone()
        recorded = recorded_by(self._journal)
        return explain_step(self.engine, step, dataset, checkpoint, recorded, self._made)

    def rewind(
        self,
        step: int,
        dataset: object,
        *,
        checkpoint: Checkpoint | str | os.PathLike[str],
        reason: str = "",
    ) -> bool | None:
        """Go back to the state before a past step; the next fit goes on from there.

        The nearest checkpoint is taken and the steps up to this one run again. A run directory keeps
        that it happened, and the next fit cuts off what came after. Other data for that fit:
        `tr.batches(...).without(rows)`, or any other dataset.

        Args:
            step: the trainer's step afterwards.
            dataset: the dataset that was trained on so far.
            checkpoint: the directory that `fit(checkpoint=...)` was given.
            reason: kept in the run directory.

        Returns:
            Whether the steps that ran again are proved to be those that happened; None if nothing was
            recorded of them.
        """
        self._check_alone()
        before = self.engine.step
        recorded = recorded_by(self._journal)
        proved = rewind(self.engine, step, dataset, checkpoint, recorded, self._made)
        said = {"kind": "rewind", "step": step, "from": before, "reason": reason}
        self._journal.rewind(step, {**said, "proved": proved})
        return proved

    def replay_bundle(
        self, bundle: str | os.PathLike[str], example: Tree, *, observe: Any = ()
    ) -> Replay:
        """Run the step of a bundle, which `tr.stop_on_nonfinite(bundle=dir)` wrote, here.

        Args:
            bundle: the directory.
            example: an element of the dataset, for its structure; its values do not matter.
            observe: taps.

        Returns:
            A `Replay`: the records of the step by name. `proved` is None: a bundle has no results to
            compare with.
        """
        self._check_alone()
        return replay_bundle(self.engine, bundle, example, observe)
