"""A past step of a PyTorch model: its calls run again, from a file that `save` wrote."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tailrace.base.messages import logger
from tailrace.errors import CheckpointError, DataExhausted, OptionError, RunError
from tailrace.program.step.training_step import TrainState
from tailrace.records.history import History
from tailrace.taps.tap import Observe
from tailrace.torch.calls.call_blocks import CallBlocks
from tailrace.torch.calls.inputs import CallForm
from tailrace.torch.calls.options import ModelOptions
from tailrace.torch.models.saving import (
    UnreadableModel,
    flat,
    nested,
    read_note,
    read_state,
)
from tailrace.torch.programs.train import TrainingProgram
from tailrace.torch.resuming.keeping import KIND, model_arrays
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.directory import CheckpointDirectory
from tailrace.trainer.executions import Results
from tailrace.trainer.lookback.handed import HandedReplay
from tailrace.trainer.lookback.outcome import Replay
from tailrace.trainer.lookback.recorded import recorded_by
from tailrace.trainer.lookback.start import check_step


class CallLog:
    """What a model with fingerprints keeps of all its calls; `save` writes it too.

    Attributes:
        history: losses and fingerprints.
        hypers: learning rates and the like, by the step from which they apply.
    """

    def __init__(self, history: History, hypers: Mapping[int, np.ndarray] | None = None) -> None:
        self.history, self.hypers = history, dict(hypers or {})

    def add(self, results: Results, hypers: np.ndarray) -> None:
        """Add a call."""
        first = results.first_step
        self.history.add({"loss": results.scalars["loss"]})
        if results.fingerprint:  # a call that a guard stopped has none
            self.history.add_fingerprint(first, results.steps, results.fingerprint)
        latest = self.hypers[max(self.hypers)] if self.hypers else None
        # Only changes are kept: a schedule that is constant for a million steps takes one row.
        if latest is None or latest.tobytes() != hypers.tobytes():
            self.hypers[first] = np.array(hypers)

    def arrays(self) -> dict[str, Any]:
        """All of it, for a file."""
        steps = np.array(sorted(self.hypers), np.int64)
        values = {str(step): self.hypers[step] for step in sorted(self.hypers)}
        first = np.array(self.history.first_step, np.int64)
        return {
            "history": self.history.to_arrays(),
            "hypers": values,
            "steps": steps,
            "first": first,
        }

    @classmethod
    def of(cls, tree: Mapping[str, Any], options: ModelOptions) -> CallLog:
        """From a file."""
        arrays = flat(tree["history"])
        history = History.from_arrays(
            arrays, int(tree["first"]), options.microbatches, options.replicas
        )
        return cls(history, {int(step): tree["hypers"][str(step)] for step in tree["steps"]})


class PastCalls:
    """The calls of a training model, run again from a saved file on.

    Args:
        options: the options of the model.
        checkpoint: a file that `save` wrote, or a directory of them.
        step: the step to look at.
        log: what the model knows of its calls.
        kind: the class of its optimizer.
    """

    def __init__(
        self,
        options: ModelOptions,
        checkpoint: str | os.PathLike[str],
        step: int,
        log: CallLog | None,
        kind: str,
    ) -> None:
        check_step(step)
        self._options, self._step, self._made = options, step, 0
        files = _files(checkpoint)
        before = [file for file in files if file[0] <= step]
        if not before:
            there = f"starts with step {files[0][0]}" if files else "contains no such file"
            raise CheckpointError(
                f"A replay of step {step} starts from a file that model.save wrote at or before it, "
                f"and {str(checkpoint)!r} {there}. Save the model more often."
            )
        (self.started_at, file), (self._trees, self._note) = _newest_readable(before)
        if self.started_at % options.device_iterations:
            raise CheckpointError(
                f"A call of this model makes {options.device_iterations} steps, and {str(file)!r} was "
                f"saved after {self.started_at}. Make the model with the device_iterations that it was "
                f"trained with."
            )
        if self._note.get("optimizer", kind) != kind:
            raise CheckpointError(
                f"A replay makes the updates of the training again. {str(file)!r} was saved with "
                f"{self._note['optimizer']}, and this model has {kind}. Make the model with the "
                f"optimizer that it was trained with."
            )
        # A later file knows more calls than this model, which may have been loaded from an earlier one.
        if log is None or step not in log.history.steps:
            later = [file for file in files if file[0] > step]
            trees = _newest_readable(later)[1][0] if later else {}
            log = CallLog.of(trees["past"], options) if "past" in trees else log
        self._log = log

    def skipped(self, calls: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        """The arguments of the calls from the file on."""
        count = self.started_at // self._options.device_iterations
        if not isinstance(calls, Iterable):
            raise OptionError(
                f"calls is an iterable of the arguments of each call, such as a loader or a list. "
                f"Received: {type(calls).__name__}."
            )
        for number, call in enumerate(calls):
            self._made = number + 1
            if number >= count:
                yield tuple(call) if isinstance(call, tuple | list) else (call,)

    def replay(
        self, program: TrainingProgram, form: CallForm, calls: Iterable[Any], observe: Observe
    ) -> Replay:
        """Run the calls up to the one that contains the step."""
        recorded, log = recorded_by(program.journal), self._log
        if log is not None:
            recorded.add_history(log.history)
        replayed = HandedReplay(self._step, recorded, self._note)
        # An engine of its own: replaying must not move the model that trains.
        engine = program.twin(observe, self._state(), bool(recorded.executions))
        engine.seed, engine.step = int(self._note["seed"]), self.started_at
        feed = program.feed
        for call in calls:
            # Learning rates change between calls: those after the file are in the log only.
            if log is not None and engine.step in log.hypers:
                engine.replace({program.hypers: jnp.asarray(log.hypers[engine.step])})
            arrays = form.blocks(form.tensors_of(call, {}))
            placement = engine.placement
            blocks = CallBlocks(arrays, (), placement.shared_out, placement.replicas)
            count = self._options.device_iterations * self._options.microbatches
            replayed.take(engine, feed, blocks.take(count), exact=True)
            if replayed.done:
                break
        if replayed.found is None:
            raise self.ended()
        return replayed.found

    def ended(self) -> DataExhausted:
        """The error for calls that end before the step that is wanted."""
        steps = self._made * self._options.device_iterations
        return DataExhausted(
            f"A replay makes the calls of the training again, and these end before step "
            f"{self._step}: they make {steps} steps. Give the arguments of all calls, from the first "
            f"one that the model made."
        )

    def _state(self) -> TrainState:
        trees = self._trees
        return TrainState(trees.get("param", {}), trees["optimizer"], trees.get("buffer", {}))


def _newest_readable(
    files: Sequence[tuple[int, pathlib.Path]],
) -> tuple[tuple[int, pathlib.Path], tuple[dict[str, Any], dict[str, Any]]]:
    """The latest file that is whole, and its contents; damaged ones are passed over with a warning."""
    first: RunError | CheckpointError | None = None
    for file in reversed(files):
        try:
            return file, _read(file[1])
        except UnreadableModel:
            raise  # it may be whole, and is what was asked for
        except (RunError, orbax_files.DamagedCheckpoint) as error:
            first = first or error
            logger.warning("%s An earlier file is used, if there is one.", error)
    assert first is not None, "no files"
    raise first


def _read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trees and the note of a file that `save` wrote, or of a checkpoint."""
    if not path.is_dir():
        return read_state(path, {"step": int, "seed": int})
    arrays, note = orbax_files.read(path)
    if KIND not in note:
        raise CheckpointError(
            f"The checkpoint {str(path)!r} was not saved by a PyTorch model. Give the directory of "
            f"this model's checkpoints."
        )
    return nested(model_arrays(arrays)), note


def _files(checkpoint: str | os.PathLike[str]) -> list[tuple[int, pathlib.Path]]:
    """The saved models in a directory, or the one in a file, by step."""
    if not isinstance(checkpoint, str | os.PathLike):
        raise OptionError(
            f"A replay starts from a file that model.save(path) wrote: checkpoint= is its path, or "
            f"that of a directory of such files. Received: checkpoint={checkpoint!r}."
        )
    path = pathlib.Path(checkpoint)
    if path.is_dir() and (kept := CheckpointDirectory(path).found(0)):
        return [(one.step, one.path) for one in kept]
    found = []
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        try:
            found.append((int(read_note(file, {"step": int})["step"]), file))
        except RunError as error:
            unknown = isinstance(error, UnreadableModel) and file.suffix == ".npz"
            if file == path or unknown:
                raise
            if file.suffix == ".npz":  # other files may be there, too
                logger.warning("%s It is passed over.", error)
    return sorted(found)
