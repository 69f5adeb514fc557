"""The checkpoints of one `fit` of a Keras model: what is saved, and resuming from it.

Long, and one thing: what is saved is what is restored.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import jax
import keras
import numpy as np

from tailrace.base.messages import note_once
from tailrace.data.positions.random_sources import (
    not_drawn_from,
    random_state,
    set_random_state,
)
from tailrace.devices.processes import distributed
from tailrace.errors import CheckpointError
from tailrace.feeds.background import Worker
from tailrace.feeds.skipping import skip
from tailrace.feeds.waiting import Lasting, Patience
from tailrace.keras.checkpoints.callback_states import with_arrays, without_arrays
from tailrace.keras.checkpoints.epoch_calls import EpochCalls
from tailrace.keras.data.batch_counts import read_once
from tailrace.keras.handles import settings_of
from tailrace.keras.programs.executions import Resumed
from tailrace.keras.programs.steps import Stepping
from tailrace.keras.programs.train import Training
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.callback_matching import states_of
from tailrace.trainer.checkpoints.checkpoint import Checkpoint, monitor_of
from tailrace.trainer.checkpoints.device_copies import copied
from tailrace.trainer.checkpoints.directory import Kept
from tailrace.trainer.checkpoints.saving import run_end_of
from tailrace.trainer.checkpoints.snapshot import (
    BUILD,
    CALLBACK,
    STATE,
    Snapshot,
    check_forms,
    history_arrays,
    history_of,
)
from tailrace.trainer.checkpoints.writer import CheckpointWriter
from tailrace.trainer.fitting.interrupts import Interrupts
from tailrace.trainer.showing.option_texts import note_changed

LOOKED_AT = 4
"""An upper bound of the batches of an iterator that Keras reads ahead; it reads two."""

KIND = "keras"
"""The entry of the note that identifies checkpoints of Keras models."""

TrainingProgram = Training | Stepping
"""A program that trains, by the engine's step or by Keras'."""


@dataclasses.dataclass(frozen=True)
class FitForm:
    """What must be the same when a fit is resumed.

    Attributes:
        epochs: the requested epochs; a larger number continues the fit.
        batches: the batches of an epoch; None if they are known only by reading.
        per_step: the batches that one step of the optimizer takes.
        execution: the batches of an execution.
        continues: whether an epoch continues reading where the previous one ended.
        size: the batches of the whole dataset, if known.
        draws: whether reading a batch may draw random numbers.
        dataset: the dataset, if its order differs in each iteration, or it can be read only once; else
            None.
        shuffle: how arrays are shuffled; None for other data, which `fit(shuffle=)` does not concern.
        generators: the generators that the data itself has.
        drawn: whether generators alone decide the order of each iteration: none has to be made again.
    """

    epochs: int
    batches: int | None
    per_step: int
    execution: int
    continues: bool
    size: int | None
    draws: bool
    dataset: Any
    shuffle: bool | str | None
    generators: list[Any]
    drawn: bool


class Keeping:
    """The checkpoints of one fit.

    Args:
        checkpoint: the directory and the period.
        number: the index of the fit among those of the model with checkpoints.
        at_epochs: whether they are taken only at the ends of epochs.
        removed: whether they are removed once the fit has ended.
        backup: the Keras callback that asked for them, whose counters continue; None without one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        number: int,
        at_epochs: bool = False,
        removed: bool = False,
        backup: keras.callbacks.BackupAndRestore | None = None,
    ) -> None:
        self.interrupts, self.backup = Interrupts(), backup
        self._writer = CheckpointWriter(checkpoint, number)
        self._monitor = monitor_of(checkpoint)
        self._at_epochs, self._removed = at_epochs, removed
        self._note: dict[str, Any] | None = None
        self._run_end: Mapping[str, Any] | None = None
        self._built: Any = None
        self._arrays: Mapping[str, np.ndarray] = {}
        self._trained_by: TrainingProgram | None = None
        self._first_step = 0
        self._form: FitForm | None = None
        self._options: dict[str, str] = {}
        self._epoch_calls: EpochCalls | None = None
        self._looked = 0
        self.looked: Callable[[], int] = int
        """Returns how often Keras has begun to read the data before the first epoch."""
        self._pass_by: Callable[[int], None] = lambda count: None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hold the lock of the directory."""
        if distributed.process_count() > 1:
            raise CheckpointError(
                f"Checkpoints of Keras models are for training in one process; this one has "
                f"{distributed.process_count()}. tr.Trainer keeps them in several."
            )
        orbax_files.import_orbax()
        directory = self._writer.directory
        with directory.writing():
            try:
                yield
                if self._removed:
                    shutil.rmtree(directory.directory / f"fit-{self._writer.fit}")
            finally:
                self._writer.close()
        # The directory too, unless other fits have checkpoints in it; after the lock, whose file it
        # holds.
        if self._removed and not directory.found():
            with suppress(OSError):
                shutil.rmtree(directory.directory)

    def choices(self, fingerprint: bool) -> tuple[Any, bool]:
        """Where XLA's choices of kernels are kept, and whether this fit adds to them."""
        return (self._writer.directory.directory if fingerprint else None), True

    # -- taking up ------------------------------------------------------------------------------

    def take_up(self, form: FitForm, initial_epoch: int, options: Mapping[str, str]) -> int:
        """Read the directory's checkpoint of this fit; returns the epoch to continue with.

        Args:
            form: what must be the same.
            initial_epoch: the epoch that the fit was asked to begin with.
            options: what may be another one, and is then said.
        """
        self._form, self._options = form, dict(options)
        there = self.read()
        if there is None:
            return initial_epoch
        directory = self._writer.directory.directory
        kept, self._arrays, note = there
        if KIND not in note:
            raise CheckpointError(
                f"The checkpoint {str(kept.path)!r} was not saved by fit of a Keras model. Give "
                f"this fit another directory."
            )
        self._note = found = dict(note[KIND])
        self._run_end, self._built = run_end_of(note, directory), note.get(BUILD)
        self._check(found, form)
        if self._monitor is not None:
            self._monitor.take_up(found.get("watched"), found["best"], "best= of tr.Checkpoint")
        # Earlier versions did not save options.
        more = ", but variables, such as a learning rate, are those of the checkpoint"
        note_changed(found.get("options", {}), options, str(directory), self.finished, more)
        if self.finished:
            if form.epochs < found["epochs"]:
                note_once(
                    f"fit(epochs={form.epochs}): the checkpoint directory holds a fit that went "
                    f"further ({found['epoch']} epochs, {found['done']} batches). Its end is returned.",
                    key=f"smaller fit {kept.path}",
                )
            return form.epochs
        return int(found["epoch"])

    def read(self) -> tuple[Kept, Mapping[str, Any], Mapping[str, Any]] | None:
        """The checkpoint that the fit continues from, its arrays and its note."""
        return self._writer.directory.read_newest(self._writer.fit)

    @property
    def finished(self) -> bool:
        """Whether the directory contains the end of this fit."""
        found, form = self._note, self._form
        if found is None or form is None:
            return False
        if found["ended"]:
            return form.epochs <= found["epochs"]
        # After its last epoch a fit has still to end: callbacks may restore the best weights then.
        # With batches of the next one it does not: it would end in the middle of an epoch.
        return (found["epoch"], found["done"]) > (form.epochs, 0)

    def _check(self, found: Mapping[str, Any], form: FitForm) -> None:
        # What decides where epochs and steps end. Lengths that lead to the same places may differ.
        here = {
            "batches of an epoch": (form.batches, found["batches"]),
            "batches of a step (microbatches x replicas)": (form.per_step, found["per_step"]),
        }
        # Of earlier versions these are not known.
        if "shuffle" in found:
            here["shuffle"] = (form.shuffle, found["shuffle"])
        # Other data may make its generators late: there may be more of them in a second fit.
        if "generators" in found and form.drawn:
            here["generators of the DataLoader"] = (len(form.generators), found["generators"])
        # Other lengths are fine if an execution can end where the checkpoint is: Keras counts in
        # whole ones.
        if found["execution"] != form.execution and found["done"] % form.execution:
            here["batches of an execution (steps_per_execution x replicas)"] = (
                form.execution,
                found["execution"],
            )
        self._writer.directory.check_same(here)

    def replay(self, x: object, patience: Patience) -> Any:
        """Restore the position of a dataset: iterated as often as before, or read as far as before.

        The calls of a PyDataset are made again once Keras has begun: `begin`.

        Args:
            x: the data, as it was given.
            patience: the limits of waits for it.

        Returns:
            The data to give to Keras. Keras reads the first batches even if it has no epoch to run: of
            an iterator that a finished fit has read, it gets batches that were used before.
        """
        assert self._form is not None
        found, dataset = self._note, self._form.dataset
        if isinstance(x, keras.utils.PyDataset):
            self._epoch_calls = EpochCalls(x, () if found is None else found.get("epoch_calls", ()))
            return self._epoch_calls
        # Generators are set to where they were. Of earlier versions they are not known.
        if found is None or dataset is None or (self._form.drawn and "generators" in found):
            return x
        if read_once(dataset):
            if not self.finished or not found["taken"]:
                return x
            used: deque[Any] = deque(maxlen=LOOKED_AT)
            batches = (lambda: used.extend(itertools.islice(dataset, 1)), "batches")
            _repeat(found["taken"], *batches, dataset, patience)
            return (batch for batch in used)
        # Keras begins the pass in which the fit continues, and skips to its place there.
        under_way = bool(found["taken"]) and not self.finished
        read = (lambda: next(iter(dataset), None), "passes over the data")
        self._pass_by = lambda count: _repeat(count, *read, dataset, patience)
        self._pass_by(found["begun"] - under_way)
        return x

    # -- while the fit runs ---------------------------------------------------------------------

    @property
    def took_up(self) -> bool:
        """Whether the directory contains a checkpoint of this fit."""
        return self._note is not None

    def states(self, callbacks: Sequence[object]) -> list[dict[str, Any]]:
        """The saved states of the callbacks; empty ones if the fit starts."""
        # Of a finished fit Keras' loop gets no callbacks: the script's get their states afterwards.
        if self._note is None or (self.finished and not callbacks):
            return [{} for _ in callbacks]
        states = [with_arrays(state, self._arrays) for state in self._note["callbacks"]]
        return states_of(callbacks, states, self._note.get("callback_classes"))

    @property
    def _program(self) -> TrainingProgram:
        assert self._trained_by is not None
        return self._trained_by

    def begin(self, program: TrainingProgram, model: keras.Model) -> None:
        """Restore the state, once Keras has built the model."""
        self._trained_by = program
        self._first_step = program.steps
        # The counts are per fit, and the program is kept from fit to fit.
        program.begun = program.taken = 0
        found = self._note
        if self._epoch_calls is not None:
            self._epoch_calls.begin()
        self._looked = self.looked()
        if found is not None:
            # A model is built from a first batch, which a model that is built already does not need.
            self._pass_by(max(0, found.get("looked", self._looked) - self._looked))
            self._looked = found.get("looked", self._looked)
        if found is None:
            self._writer.started_at(program.steps)
            return
        first = found["first_step"]
        if self.backup is None:
            what = "the model's step when the fit begins"
            self._writer.directory.check_same({what: (program.steps, first)})
        # With a backup it may be another: the fit was interrupted by an error, and is made again by the
        # same process.
        self._first_step = first
        self.put_values(program)
        count = program.per_step // program.replicas
        history = history_of(self._arrays, found["first_step"], count, program.replicas)
        settings = settings_of(model)
        settings.build = settings.build.as_recorded(self._built)
        program.take_up(found["step"], history, self._run_end, settings.build)
        self._set_random(found["random"])
        # In place: callbacks and Keras hold this History object already.
        shown: Any = model.history
        shown.epoch = list(found["history"]["epoch"])
        shown.history = {name: list(v) for name, v in found["history"]["logs"].items()}
        self._writer.started_at(found["step"])

    def put_values(self, program: TrainingProgram, of_replicas: bool = False) -> None:
        """Restore the values of the variables.

        Variables are identified by their order: Keras numbers the names of layers as they are created.

        Args:
            program: the program with the variables.
            of_replicas: whether to restore the metrics of each replica; an epoch begins without them.
        """
        assert self._note is not None
        then: list[str] = self._note["names"]
        layout = program.layout
        # Numbered, because the order identifies variables; `check_forms` shows both in its message.
        names = [
            f"{n}: {name}" for n, name in enumerate([*layout.names, *then[len(layout.names) :]])
        ]
        here = {
            name: jax.ShapeDtypeStruct(tuple(v.shape), v.dtype)
            for name, v in zip(names, layout.variables, strict=False)
        }
        found = {
            name: self._arrays[f"{STATE}{number}"] for number, name in enumerate(names[: len(then)])
        }
        replicas = program.replicas
        own = {name: (form.shape, (replicas, *form.shape)) for name, form in here.items()}
        check_forms(here, found, {}, own if replicas > 1 else {})
        program.put(list(found.values()), of_replicas)

    def resumed(self) -> Resumed | None:
        """The batches that the loop of the first epoch skips; None if it starts from the beginning."""
        found, form = self._note, self._form
        if found is None or form is None:
            return None
        logs, taken = dict(found["logs"]), found["taken"]
        if not taken:
            return Resumed(found["done"], 0, found["begun"], logs, None)
        then = found["random_then"]
        saved = found["random"] if found["done"] else self.random()
        # The data that is under way shuffled with these numbers when it was begun, and is begun again
        # now.
        self._set_random(then)

        def after() -> None:
            # A generator that reading draws from has drawn what it drew in the first run, and is right
            # as it is. Of others, callbacks and the ends of epochs may have drawn since.
            undrawn = not_drawn_from(then, self.random(), saved)
            self._set_random(undrawn if form.draws else saved)

        return Resumed(found["done"], taken, found["begun"], logs, after)

    def random(self) -> dict[str, Any]:
        """The states of the generators that the data may draw from."""
        assert self._form is not None
        return random_state(self._form.generators)

    def _set_random(self, state: Mapping[str, Any]) -> None:
        assert self._form is not None
        set_random_state(state, self._form.generators)

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint inside an epoch."""
        return not self._at_epochs and self._writer.due(self._program.steps)

    @property
    def due_after_epoch(self) -> bool:
        """Whether it is time for a checkpoint at the end of an epoch."""
        return self._at_epochs or self._writer.due(self._program.steps)

    def improves(self, logs: Mapping[str, Any]) -> bool:
        """Whether the monitored value has improved."""
        monitor = self._monitor
        return monitor is not None and monitor.is_due(logs) and monitor.improves(logs)

    def save(
        self,
        model: keras.Model,
        position: Mapping[str, Any],
        callbacks: list[Any],
        classes: list[str],
        *,
        ended: bool = False,
        best: bool = False,
        wait: bool = False,
    ) -> None:
        """Save the current state.

        Args:
            model: the model.
            position: the position of the fit: `epoch`, the batches `done` in it, its `logs`,
                `random_then`.
            callbacks: the states of its callbacks.
            classes: the names of their classes.
            ended: whether the fit has ended.
            best: whether the monitored value is the best so far.
            wait: whether to wait until it is written, and raise an error if that fails.
        """
        program = self._program
        # The history in the checkpoint must have all steps that its state has.
        program.settle()
        self._writer.save(
            program.steps,
            lambda: self._snapshot(model, position, callbacks, classes, ended),
            ended=ended,
            best=best and not ended,
        )
        if wait:
            self._writer.wait(last=True)

    def _snapshot(
        self,
        model: keras.Model,
        position: Mapping[str, Any],
        callbacks: list[Any],
        classes: list[str],
        ended: bool,
    ) -> Snapshot:
        program, form = self._program, self._form
        assert form is not None
        # By number: Keras counts names up in a process, so `dense_1` here may be `dense` there.
        values = {f"{STATE}{number}": value for number, value in enumerate(program.values())}
        arrays: dict[str, Any] = dict(copied(values))
        arrays |= history_arrays(program.history)
        stored: dict[str, np.ndarray] = {}
        states = [
            without_arrays(state, stored, f"{CALLBACK}{number}")
            for number, state in enumerate(callbacks)
        ]
        # A dataset that is read from its start in the next epoch has no position to save.
        over = not form.continues or program.exhausted or program.taken == form.size
        fresh = not position["done"] and over
        history: Any = model.history
        found = {
            **position,
            "taken": 0 if fresh else program.taken,
            "begun": program.begun,
            "random": self.random(),
            "generators": len(form.generators),
            "looked": self._looked,
            "epoch_calls": [] if self._epoch_calls is None else list(self._epoch_calls.calls),
            "epochs": form.epochs,
            "batches": form.batches,
            "shuffle": form.shuffle,
            "per_step": form.per_step,
            "options": self._options,
            "names": program.layout.names,
            "execution": form.execution,
            "step": program.steps,
            "first_step": self._first_step,
            "ended": ended,
            "best": None if self._monitor is None else self._monitor.best,
            "watched": None if self._monitor is None else self._monitor.recorded(),
            "history": {"epoch": list(history.epoch), "logs": _numbers(history.history)},
            "callbacks": states,
            "callback_classes": classes,
        }
        note = {"step": program.steps, KIND: found, BUILD: program.built}
        return Snapshot({**arrays, **stored}, note, program.mark())


def _repeat(
    count: int, read: Callable[[], object], what: str, dataset: object, patience: Patience
) -> None:
    """Read a dataset `count` times, as before; in a thread, because it may block."""
    name, worker = type(dataset).__name__, Worker("tailrace-infeed-keras")

    def take(_: int) -> None:
        future = worker.submit(read)
        patience.wait_for(future, Lasting(f"the data ({name}), to skip {what} used before"))
        future.result()

    try:
        skip(count, take, what)
    finally:
        worker.stop(0.0)  # a read that blocks is abandoned


def _numbers(history: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {
        name: [value if isinstance(value, int | float) else _plain(value) for value in values]
        for name, values in history.items()
    }


def _plain(value: object) -> Any:
    try:
        return np.asarray(value).tolist()
    except (TypeError, ValueError):
        return None
