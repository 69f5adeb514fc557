"""What a trainer can say of its past: the methods of `tr.Trainer` that look back."""

from __future__ import annotations

import os

from tailrace.base.trees import Tree
from tailrace.data.no_data import or_no_data
from tailrace.errors import OptionError
from tailrace.taps.tap import Observe
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.engine import Engine
from tailrace.trainer.lookback.bundled import replay_bundle
from tailrace.trainer.lookback.explain_step import StepExplanation, explain_step
from tailrace.trainer.lookback.outcome import Replay
from tailrace.trainer.lookback.recorded import recorded_by
from tailrace.trainer.lookback.replay import replay
from tailrace.trainer.lookback.rewind import rewind
from tailrace.trainer.observation.journal import Journal
from tailrace.trainer.own_steps import check_has_loss


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
        observe: Observe = (),
        checkpoint: Checkpoint | str | os.PathLike[str],
    ) -> Replay:
        """Run a past step again, observe it with any taps, and prove that it equals the original.

        The replay starts from the nearest checkpoint, moves the dataset to its position, and runs the
        steps before this one without taps, validation or callbacks. Losses, the scalars of `aux` and,
        with `fingerprint=True`, the state at the ends of executions are compared with what was
        recorded. The trainer is unchanged afterwards. While a replay runs, the device holds two states.

        Args:
            step: the index of the step.
            dataset: the dataset that was trained on; None after `fit(None)`.
            observe: taps, as for the trainer.
            checkpoint: the directory that was passed to `fit(checkpoint=...)`.

        Returns:
            A `Replay`: the records of the step by name, with `proved` (None if nothing was recorded)
            and `differences`.

        Raises:
            CheckpointError: there is no usable checkpoint at or before the step, or the step was not
                trained.
            DataExhausted: the dataset ends before the step.
            OptionError: `step` or `checkpoint` has an invalid value.
            ProgramError: a fit is running.

        Example:
            >>> import tempfile, numpy as np, optax, tailrace as tr
            >>> data = tr.batches(np.arange(64, dtype=np.float32), 8)
            >>> loss_fn = lambda w, x: ((x - w) ** 2).mean()
            >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.1), np.float32(0))
            >>> kept = tempfile.mkdtemp()
            >>> history = trainer.fit(data, steps=6, checkpoint=kept, progress=False)
            >>> replay = trainer.replay(4, data, observe=["grad/*"], checkpoint=kept)
            >>> replay.proved, replay.loss == float(history.loss[4])
            (True, True)
            >>> replay["grad/params"].steps
            array([4])
        """
        self._check_alone()
        recorded = recorded_by(self._journal)
        with self.engine.placement.outside():
            return replay(
                self.engine, step, or_no_data(dataset), observe, checkpoint, recorded, self._made
            )

    def explain_step(
        self,
        step: int,
        dataset: object,
        *,
        checkpoint: Checkpoint | str | os.PathLike[str],
    ) -> StepExplanation:
        """Run a past step again, example by example, to find the rows and the layer behind its loss.

        The loss function is called with one row at a time, so it should be a mean over rows. This
        costs nothing during training.

        Args:
            step: the index of the step.
            dataset: the dataset that was trained on; with `tr.batches`, rows have their indices.
            checkpoint: the directory that was passed to `fit(checkpoint=...)`.

        Returns:
            A `StepExplanation`: loss, gradient norm and alignment with the step's gradient for each
            row, the most unusual first; and which tensor grew first.

        Raises:
            CheckpointError: there is no usable checkpoint at or before the step, or the step was not
                trained.
            DataError: the dataset ends before the step, or its elements have no rows.
            OptionError: `step` or `checkpoint` has an invalid value.
            ProgramError: a fit is running.

        Example:
            >>> import tempfile, numpy as np, optax, tailrace as tr
            >>> data = tr.batches(np.arange(64, dtype=np.float32), 8)
            >>> loss_fn = lambda w, x: ((x - w) ** 2).mean()
            >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.1), np.float32(0))
            >>> kept = tempfile.mkdtemp()
            >>> history = trainer.fit(data, steps=6, checkpoint=kept, progress=False)
            >>> found = trainer.explain_step(5, data, checkpoint=kept)
            >>> len(found.rows), int(found.rows["row"][0])  # 8 rows; row 47 has the largest value
            (8, 47)
        """
        self._check_alone()
        check_has_loss(self.engine)
        recorded = recorded_by(self._journal)
        with self.engine.placement.outside():
            return explain_step(
                self.engine, step, or_no_data(dataset), checkpoint, recorded, self._made
            )

    def rewind(
        self,
        step: int,
        dataset: object,
        *,
        checkpoint: Checkpoint | str | os.PathLike[str],
        reason: str = "",
    ) -> bool | None:
        """Return to the state before a past step; the next fit continues from there.

        Starts from the nearest checkpoint and runs the steps before this one again. A run directory
        records the intervention, and the next fit replaces the rows after that step. That fit may use
        other data: `tr.batches(...).without(rows)`, or any other dataset.

        Args:
            step: the trainer's step afterwards.
            dataset: the dataset that was trained on so far; None after `fit(None)`.
            checkpoint: the directory that was passed to `fit(checkpoint=...)`.
            reason: stored in the run directory.

        Returns:
            Whether the steps that ran again are proved to equal the original ones, True if none had to;
            None if one of them was not recorded.

        Raises:
            CheckpointError: there is no usable checkpoint at or before the step, or the step was not
                trained.
            DataExhausted: the dataset ends before the step.
            OptionError: `step` or `checkpoint` has an invalid value.
            ProgramError: a fit is running.

        Example:
            >>> import tempfile, numpy as np, optax, tailrace as tr
            >>> data = tr.batches(np.arange(64, dtype=np.float32), 8)
            >>> loss_fn = lambda w, x: ((x - w) ** 2).mean()
            >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.1), np.float32(0))
            >>> kept = tempfile.mkdtemp()
            >>> history = trainer.fit(data, steps=6, checkpoint=kept, progress=False)
            >>> proved = trainer.rewind(3, data, checkpoint=kept, reason="row 30 is wrong")
            >>> trainer.step, len(trainer.fit(data.without([30]), steps=2, progress=False).loss)
            (3, 2)
        """
        self._check_alone()
        if not isinstance(reason, str):
            raise OptionError(f"reason is a text. Received: reason={reason!r}.")
        before = self.engine.step
        recorded = recorded_by(self._journal)
        check = self._journal.check_belongs
        with self.engine.placement.outside():
            proved = rewind(
                self.engine, step, or_no_data(dataset), checkpoint, recorded, self._made, check
            )
        said = {"kind": "rewind", "step": step, "from": before, "reason": reason}
        self._journal.rewind(step, {**said, "proved": proved})
        return proved

    def replay_bundle(
        self, bundle: str | os.PathLike[str], example: Tree, *, observe: Observe = ()
    ) -> Replay:
        """Run a bad step from the bundle that `tr.stop_on_nonfinite(bundle=dir)` wrote.

        Args:
            bundle: the directory of the bundle.
            example: an element of the dataset, for its structure; its values do not matter.
            observe: taps.

        Returns:
            A `Replay`: the records of the step by name. `proved` is None, because a bundle has no
            results to compare with.

        Raises:
            CheckpointError: there is no bundle, it is damaged, or it does not fit this trainer.
            ProgramError: a fit is running.

        Example:
            >>> import pathlib, tempfile, numpy as np, optax, tailrace as tr
            >>> bundle = pathlib.Path(tempfile.mkdtemp(), "bundle")
            >>> def trainer_of(observe=()):
            ...     return tr.Trainer(
            ...         lambda w, x: (w * x).mean(), optax.sgd(0.1), np.float32(0), observe=observe
            ...     )
            >>> data = [np.float32([1, 2]), np.float32([3, np.inf])]
            >>> try:
            ...     trainer_of([tr.stop_on_nonfinite(bundle=bundle)]).fit(data, progress=False)
            ... except tr.errors.NonFiniteError as error:
            ...     print("step", error.step)
            step 1
            >>> replay = trainer_of().replay_bundle(bundle, data[0], observe=["grad/*"])
            >>> int(replay["grad/params"].values["inf"].item())
            1
        """
        self._check_alone()
        with self.engine.placement.outside():
            return replay_bundle(self.engine, bundle, example, observe)
