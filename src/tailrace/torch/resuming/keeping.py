"""The checkpoints of a training model: what is saved when, and what is restored.

Long, and one thing: what is saved is what is restored.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tailrace.base.messages import note_once
from tailrace.base.spans.span import span
from tailrace.data.positions.loader_state import put_loader_state
from tailrace.errors import CheckpointError, OptionError
from tailrace.torch.calls.passes import Passes, Position, state_of
from tailrace.torch.errors import UsageError
from tailrace.torch.optim.schedule import Schedule, numbers_of, put_numbers
from tailrace.torch.programs.train import TrainingProgram
from tailrace.torch.resuming.held_writer import HeldWriter
from tailrace.torch.resuming.plain_states import decoded, encoded
from tailrace.torch.resuming.schedulers import is_scheduled, schedulers_of
from tailrace.torch.resuming.start import Start
from tailrace.trainer.checkpoints.checkpoint import Checkpoint, as_checkpoint
from tailrace.trainer.checkpoints.device_copies import copied
from tailrace.trainer.checkpoints.saving import run_end_of
from tailrace.trainer.checkpoints.snapshot import STATE, Snapshot

KIND = "torch"
"""The entry of the note that identifies checkpoints of PyTorch models."""

PAST, _OBJECT = "past/", "object/"
"""The prefixes of what the model knows of its calls, and of the objects of the loop."""


class Kept(Protocol):
    """A training model, from the view of its checkpoints."""

    optimizer: torch.optim.Optimizer
    _schedule: Schedule | None
    _program: TrainingProgram | None

    def _saved(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Its state by name, on the device; what it keeps on the host; and a note."""
        ...


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a checkpoint has of the host, at a moment when the loop could go on.

    Attributes:
        step: the model's step.
        program: the program that has the state.
        state: its arrays, by name.
        note: everything else of the model.
        host: the note of the host's objects.
        arrays: arrays on the host.
    """

    step: int
    program: TrainingProgram
    state: Mapping[str, Any]
    note: Mapping[str, Any]
    host: Mapping[str, Any]
    arrays: Mapping[str, Any]

    def snapshot(self) -> Snapshot:
        """All of it, copied on the device."""
        state = copied({STATE + name: value for name, value in self.state.items()})
        note = {**self.note, KIND: self.host}
        return Snapshot({**state, **self.arrays}, note, self.program.journal.mark())


class Keeping:
    """The checkpoints of one training model.

    Args:
        checkpoint: the directory and the period.
        model: the model; it is not kept alive.

    Attributes:
        passes: where the training is in its data.
        run_end: the end of the run directory that was resumed; None for none.
        resumed: whether a checkpoint was restored, and no program was made since.
    """

    def __init__(self, checkpoint: Checkpoint, model: Kept) -> None:
        if checkpoint.best is not None:
            raise OptionError(
                f"best= of tr.Checkpoint is for fits, which know the values of a validation. Received: "
                f"best={checkpoint.best!r} in a PyTorch model, whose loop is yours. Leave it out, and "
                f"keep the best state with model.save(path)."
            )
        self._held = HeldWriter(checkpoint)
        self._writer = self._held.writer
        self._model = weakref.ref(model)
        self.passes = Passes(self._asked)
        self.run_end: Mapping[str, Any] | None = None
        self.resumed = False
        self._objects: tuple[Any, ...] = ()
        self._found: list[Any] | None = None
        self._fresh, self._ours = True, False
        self._random: dict[str, Any] | None = None
        self._first = 0
        self._given: list[dict[str, str]] = []
        weakref.finalize(model, self._held.close).atexit = False  # it closes itself then

    @property
    def directory(self) -> str:
        """The directory."""
        return str(self._writer.directory.directory)

    # -- the directory --------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the directory is held."""
        return self._held.is_open

    def open(self) -> None:
        """Hold the lock of the directory; a model that does not resume begins an empty one."""
        # After destroy() the same model may train on.
        if self._held.open() and not self._ours and self._held.directory.found():
            self._held.close()
            raise CheckpointError(
                f"The checkpoint directory {self.directory!r} has checkpoints. To go on from the "
                f"newest, call model.resume() before the first call of the model; to train from the "
                f"start, give another directory."
            )
        self._ours = True

    # -- resuming -------------------------------------------------------------------------------

    def read(self, objects: Sequence[Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """The arrays and the note of the newest checkpoint; None if there is none.

        Args:
            objects: objects of the loop whose state is saved as well.
        """
        for one in objects:
            if not all(callable(getattr(one, n, None)) for n in ("state_dict", "load_state_dict")):
                raise OptionError(
                    f"model.resume(*objects) restores objects with state_dict() and load_state_dict(), "
                    f"such as schedulers. Received: a {type(one).__name__}."
                )
        self._objects = tuple(objects)
        self._held.open()
        self._note_given()
        self._fresh, self._ours = False, True
        found = self._writer.directory.read_newest(0)
        if found is None:
            self._fresh = True
            return None
        kept, arrays, note = found
        if KIND not in note:
            raise CheckpointError(
                f"The checkpoint {str(kept.path)!r} was not saved by a PyTorch model. Give this model "
                f"another directory."
            )
        return arrays, note

    def _note_given(self) -> None:
        """Record the numbers that the script gives to its optimizer."""
        model = self._model()
        assert model is not None
        self._given = [
            {name: str(value) for name, value in numbers.items()}
            for numbers in numbers_of(model.optimizer)
        ]

    def check_same(self, here: Mapping[str, tuple[object, object]]) -> None:
        """Refuse a checkpoint of another training."""
        self._writer.directory.check_same(here)

    def put_host(self, arrays: Mapping[str, Any], note: Mapping[str, Any]) -> Start:
        """Restore what the host has, once the model has its state."""
        model = self._model()
        assert model is not None
        host, step = note[KIND], int(note["step"])
        objects = self._states_objects(model)
        scheduled = [] if model._schedule is None else model._schedule.schedulers
        here = {
            "groups of the optimizer": (len(model.optimizer.param_groups), len(host["given"])),
            "scheduler=": (_classes(scheduled), host["scheduled"]),
            "schedulers and other objects": (_classes(objects), host["objects"]),
        }
        self.check_same(here)
        self._note_changed(host["given"])
        self._given = host["given"]
        put_numbers(model.optimizer, decoded(host["numbers"], arrays))
        for one, state in zip(objects, host["states"], strict=True):
            one.load_state_dict(decoded(state, arrays))
        if model._schedule is not None:
            model._schedule.load(decoded(host["schedule"], arrays))
        position = Position(**host["position"])
        # Before the first step nothing has been drawn: the loop draws all of it again.
        if step > int(host["first"]) or position.loader is not None:
            self.passes.resume(position)
        if position.loader is None and step > int(host["first"]):
            put_loader_state(None, position.now)
        self._first = int(host["first"])
        self.run_end, self.resumed = run_end_of(note, self.directory), True
        self._writer.started_at(step)
        epoch = None if position.loader is None and step > self._first else position.epoch
        return Start(step, True, position.done, epoch)

    # -- while the training runs ----------------------------------------------------------------

    def calling(self, step: int) -> None:
        """Before a call: what was noted when the loop asked for its batch is written."""
        noted = self.passes.calling()
        if self._fresh:
            self._fresh, self._first = False, step
            self._note_given()
            self._writer.started_at(step)
            # A run that has rows has a checkpoint, however early the process is killed.
            self._save(self._moment(self.passes.position()), wait=True)
        elif self._random is not None and not self.passes.follows:
            now, self._random = self._random, None
            self._save(self._moment(Position(0, 0, None, {}, now)))
        # Unless the model was called, or saved, between: with the same batch, say.
        elif noted is not None and self._is_now(noted, step) and self._writer.due(step):
            self._save(noted)

    def _is_now(self, noted: Moment, step: int) -> bool:
        model = self._model()
        return noted.step == step and model is not None and noted.program is model._program

    def called(self, step: int) -> None:
        """After a call."""
        self.passes.called()
        # Nobody will say when the loop asks for its next batch. Its random numbers are those of now:
        # it may draw for the data of the next call.
        if not self.passes.follows and self._writer.due(step):
            self._random = state_of(None)

    def _asked(self, position: Callable[[], Position]) -> Moment | None:
        """The loop asks for the next batch: all that belongs to the call before is done."""
        model = self._model()
        program = None if model is None else model._program
        if program is None or not self.is_open or self._fresh:
            return None
        due = self._writer.due(program.engine.step)
        return self._moment(position()) if due else None

    def _moment(self, position: Position) -> Moment:
        model = self._model()
        assert model is not None
        state, past, note = model._saved()
        assert model._program is not None
        arrays: dict[str, Any] = {PAST + name: value for name, value in past.items()}
        objects, schedule = self._states_objects(model), model._schedule
        states = [one.state_dict() for one in objects]
        scheduled = [] if schedule is None else schedule.states()
        host = {
            "first": self._first,
            "position": dataclasses.asdict(position),
            "numbers": encoded(list(numbers_of(model.optimizer)), arrays, f"{_OBJECT}optimizer"),
            "schedule": encoded(scheduled, arrays, f"{_OBJECT}schedule"),
            "given": self._given,
            "scheduled": _classes([] if schedule is None else schedule.schedulers),
            "objects": _classes(objects),
            "states": encoded(states, arrays, f"{_OBJECT}state"),
        }
        return Moment(int(note["step"]), model._program, state, note, host, arrays)

    def _note_changed(self, then: Sequence[Mapping[str, str]]) -> None:
        """Say which numbers of the optimizer the script gives now, and which it gave at first."""
        changed = [
            (name, old[name], new[name])
            for old, new in zip(then, self._given, strict=True)
            for name in new
            if old.get(name, new[name]) != new[name]
        ]
        if changed:
            there = ", ".join(f"{name}={old}" for name, old, _ in changed)
            here = ", ".join(f"{name}={new}" for name, _, new in changed)
            note_once(
                f"The checkpoint directory {self.directory!r} was trained with {there}, and this "
                f"optimizer has {here}. The training goes on with the numbers of the checkpoint; to "
                f"change them, set optimizer.param_groups after model.resume().",
                key=f"numbers {self.directory} {here}",
            )

    def _states_objects(self, model: Kept) -> list[Any]:
        """The objects of the loop that have a state: those given, then schedulers that are found."""
        given = () if model._schedule is None else model._schedule.schedulers
        # Once, and again if one was made since.
        made_since = not given and not self._found and is_scheduled(model.optimizer)
        if self._found is None or made_since:
            self._found = list(schedulers_of(model.optimizer, [*given, *self._objects]))
        return [*self._objects, *self._found]

    def _save(self, moment: Moment, *, wait: bool = False) -> None:
        with span("checkpoint", step=moment.step):
            self._writer.save(moment.step, moment.snapshot)
            if wait:
                self._writer.wait(last=True)

    def close(self) -> None:
        """Give the directory back.

        Nobody says where the user's loop ends, so no end is saved: a script that is started again
        trains the steps since its newest checkpoint again, with the same result.
        """
        self._held.close()


def model_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint has of the model, by name: its state, and its calls under `past/`."""
    kept = {name: array for name, array in arrays.items() if name.startswith((STATE, PAST))}
    return {name.removeprefix(STATE): array for name, array in kept.items()}


def _classes(objects: Sequence[Any]) -> list[str]:
    return [type(one).__name__ for one in objects]


def keeping_of(given: Checkpoint | str | Any | None, model: Kept) -> Keeping | None:
    """The checkpoints of a model, from the value of `checkpoint=`."""
    return None if given is None else Keeping(as_checkpoint(given), model)


def no_checkpoint() -> UsageError:
    """The error for a model without checkpoints."""
    return UsageError(
        "model.resume() restores the newest checkpoint, and this model keeps none. Give it a "
        "directory: tt.training_model(..., checkpoint=tr.Checkpoint(directory, every=1000))."
    )
