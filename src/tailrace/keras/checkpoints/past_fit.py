"""A past step of a Keras model: its fit runs again from a checkpoint, up to that step.

Only Keras knows which batches a fit reads in which order, so Keras' own loop reads them again; what
runs is a separate program, whose results are compared and not kept. Afterwards the model is as before.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import keras

from tailrace.data.positions.random_sources import generators_in, random_state, set_random_state
from tailrace.errors import CheckpointError, DataExhausted, OptionError
from tailrace.keras.checkpoints.keeping import KIND, Keeping
from tailrace.keras.checkpoints.kept_fit import fit_kept
from tailrace.keras.data.batch_source import Block
from tailrace.keras.handles import AnyAdopted, attached
from tailrace.keras.programs.pacing import Pacing
from tailrace.keras.programs.train import Training
from tailrace.keras.programs.variables import Layout
from tailrace.taps.tap import Observe
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.checkpoints.directory import CheckpointDirectory, Kept
from tailrace.trainer.lookback.handed import HandedReplay
from tailrace.trainer.lookback.outcome import Replay
from tailrace.trainer.lookback.recorded import Recorded, recorded_by, with_later_history
from tailrace.trainer.lookback.rerun import looking_back
from tailrace.trainer.lookback.start import nearest


class PastFit(Keeping):
    """The checkpoint that a replay begins from; nothing is written.

    Args:
        kept: the checkpoint.
        step: the step to look at.
        recorded: what is known of the training.
    """

    def __init__(self, kept: Kept, step: int, recorded: Recorded) -> None:
        super().__init__(Checkpoint(kept.path.parent.parent), kept.fit)
        self._kept, self._read_note = kept, _read(kept)
        self.replayed = HandedReplay(step, recorded, self._read_note[1])

    @property
    def note(self) -> Mapping[str, Any]:
        """What the checkpoint says of the fit."""
        return self._read_note[1][KIND]

    def names(self) -> list[str]:
        """The names that the variables had in the step, for fingerprints are of names too."""
        # Keras numbers names as layers are made: a model that continued the fit may have others than
        # the one that saved this checkpoint. The next one was saved by the model that made the step.
        later = self._writer.directory.found(self._kept.fit)
        for kept in (one for one in later if one.step > self.replayed.step):
            with suppress(orbax_files.DamagedCheckpoint):
                return orbax_files.read_note(kept.path)[0][KIND]["names"]
        return self.note["names"]

    def read(self) -> tuple[Kept, Mapping[str, Any], Mapping[str, Any]] | None:
        """The checkpoint."""
        return (self._kept, *self._read_note)

    def choices(self, fingerprint: bool) -> tuple[Any, bool]:
        """The choices that were made then; they are only read."""
        return self._writer.directory.directory, False

    @property
    def due(self) -> bool:
        """Nothing is saved."""
        return False

    @property
    def due_after_epoch(self) -> bool:
        """Nothing is saved."""
        return False

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved."""


class PastTraining(Training):
    """The training program of a model that runs past steps."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        self._past: PastFit = attached(model).past
        self._step = self._past.note["first_step"]
        self.layout.rename(self._past.names())

    def dispatch(self, block: Block) -> tuple[Any, Any]:
        """Run the steps of a block, and stop the fit once the step is reached."""
        engine, replayed = self.engine, self._past.replayed
        assert engine is not None
        if engine.pipeline is not None and not engine.has_program:
            engine.use(block.form.feed)  # only once it is traced, its devices are known
        if engine.pipeline is not None:
            self._sharding = engine.placement.shared_out
            block.on(self._sharding, self.replicas)
        self._dirty = True
        # A block of one step ran in a program without a loop (`Training._run`), which rounds
        # differently.
        alone = block.staged.room == self.per_step // self.replicas
        replayed.take(engine, block.form.feed, block.staged, exact=alone)
        # Keras' loop ends after this execution, as for a callback that stops it.
        if replayed.done:
            self.model.stop_training = True
        return None, {}


class LookingBack:
    """Past steps of a model, run again."""

    def _fit_again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Pacing, dict[str, Any]]:
        """How a fit with these arguments is paced, and the arguments as Keras gets them."""
        raise NotImplementedError

    @staticmethod
    def _arguments(fit: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a fit by name, with its defaults; others are refused."""
        try:
            bound = inspect.signature(fit).bind(*args, **kwargs)
        except TypeError as error:
            raise OptionError(
                f"model.replay takes step, observe=, checkpoint= and the arguments of the fit that "
                f"trained the step. Received: {error}."
            ) from None
        bound.apply_defaults()
        return bound.arguments

    def replay(
        self,
        step: int,
        *args: Any,
        observe: Observe = (),
        checkpoint: Checkpoint | str | os.PathLike[str],
        **kwargs: Any,
    ) -> Replay:
        """Run a past step again, observe it with any taps, and prove that it equals the original.

        The fit runs again from the nearest checkpoint before the step, on the same batches, without
        validation. Losses and, with `compile(fingerprint=True)`, the state after each execution are
        compared with what was recorded. The model is unchanged afterwards.

        Args:
            step: the index of the optimizer step, counted from 0 over all fits of this model.
            *args: as in the fit that trained it: `x`, `y`, ...
            observe: taps.
            checkpoint: the directory that was passed to `fit(checkpoint=...)`.
            **kwargs: as in that fit. Of its callbacks, pass those that change the training, such as
                keras.callbacks.LearningRateScheduler: they are called again.

        Returns:
            The records of the step by name, with `proved` (None if nothing was recorded) and
            `differences`; see `tr.Trainer.replay`.

        Raises:
            CheckpointError: there is no usable checkpoint at or before the step, or the step was not
                trained.
        """
        pacing, call = self._fit_again(args, kwargs)
        return replay_fit(self, step, observe, checkpoint, pacing, call)


def replay_fit(
    adopted: AnyAdopted,
    step: int,
    observe: Observe,
    checkpoint: Checkpoint | str | os.PathLike[str],
    pacing: Pacing,
    call: dict[str, Any],
) -> Replay:
    """Run a past step again; see `LookingBack.replay`.

    Args:
        adopted: the model, as Tailrace sees it.
        step: the number of the step.
        observe: taps.
        checkpoint: what `fit(checkpoint=...)` was given.
        pacing: the pacing of the fit.
        call: the arguments of Keras' `fit`.
    """
    start = nearest(checkpoint, step)
    kept, directory = start.kept, start.directory
    recorded = _recorded(adopted, directory, step)
    past = PastFit(kept, step, recorded)
    own = generators_in(call["x"])
    with _apart(adopted, past, observe, bool(recorded.executions), own):
        fit_kept(adopted, past, pacing, call)
    found = past.replayed.found
    if found is None:
        raise DataExhausted(
            f"A replay runs the fit of a model again, and this one ends before step {step}: the "
            f"checkpoint is of step {kept.step}, epochs={call['epochs']}. Give the arguments of the "
            f"fit that trained this step."
        )
    return found


def _read(kept: Kept) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    arrays, note = orbax_files.read(kept.path)
    if KIND not in note:
        raise CheckpointError(
            f"The checkpoint {str(kept.path)!r} was not saved by fit of a Keras model. Give the "
            f"directory of fit(checkpoint=...)."
        )
    return arrays, note


def _recorded(adopted: AnyAdopted, directory: CheckpointDirectory, step: int) -> Recorded:
    """What the model knows of its past, or what later checkpoints know: each has a history."""
    program = adopted.programs.get("train")
    recorded = recorded_by(program.journal) if isinstance(program, Training) else Recorded()
    if step in recorded.losses:
        return recorded

    def read(kept: Kept) -> tuple[Mapping[str, Any], int]:
        arrays, note = _read(kept)
        return arrays, int(note[KIND]["first_step"])

    parts = adopted.settings.microbatches, adopted.settings.replicas
    return with_later_history(recorded, directory, step, read, parts)


@contextmanager
def _apart(
    adopted: AnyAdopted,
    past: PastFit,
    observe: Observe,
    fingerprint: bool,
    generators: list[Any],
) -> Iterator[None]:
    """While the past runs: afterwards model, programs and random numbers are as before."""
    model, settings = adopted.model, adopted.settings
    # Arrays are immutable, so keeping references is enough: nothing is copied.
    variables = Layout(model).variables
    values = [variable.value for variable in variables]
    random = random_state(generators)
    programs, active = adopted.programs, adopted.active
    seen = {name: getattr(model, name, None) for name in ("history", "stop_training")}
    function, taps, run_dir = model.train_function, settings.observe, settings.run_dir
    own, marks = [taps] if isinstance(taps, str) else [*taps], settings.fingerprint
    build = settings.build
    settings.fingerprint = marks or fingerprint
    settings.observe, settings.run_dir = looking_back(own, observe), None
    # Keras makes a function where there is none: it is then that of `PastTraining`.
    adopted.past, adopted.programs, model.train_function = past, dict(programs), None
    adopted.programs.pop("train", None)
    try:
        yield
    finally:
        adopted.past, adopted.programs, adopted.active = None, programs, active
        settings.observe, settings.run_dir, model.train_function = taps, run_dir, function
        settings.fingerprint, settings.build = marks, build
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        for name, value in seen.items():
            setattr(model, name, value)
        set_random_state(random, generators)
