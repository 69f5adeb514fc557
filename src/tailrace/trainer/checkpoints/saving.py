"""The checkpoints of a fit: what is saved when, and resuming a fit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tailrace.base.messages import counted, note_once
from tailrace.base.spans.span import span
from tailrace.devices.processes import distributed
from tailrace.errors import CheckpointError
from tailrace.feeds.infeed import InfeedQueue
from tailrace.program.compiling.kernel_choices import choices_in
from tailrace.records.history import History
from tailrace.trainer.callbacks.callback import Callback
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.callback_matching import classes_of, states_of
from tailrace.trainer.checkpoints.checkpoint import Checkpoint, as_checkpoint, monitor_of
from tailrace.trainer.checkpoints.passes import Passes
from tailrace.trainer.checkpoints.snapshot import (
    BUILD,
    CALLBACK,
    Snapshot,
    history_arrays,
    history_of,
    put_state,
    saved_by,
    state_arrays,
    trainer_note,
)
from tailrace.trainer.checkpoints.together import (
    each_does,
    first_does,
    gathered,
    own_position,
)
from tailrace.trainer.checkpoints.writer import CheckpointWriter
from tailrace.trainer.engine import Engine
from tailrace.trainer.fitting.fit_progress import Duration, Progress
from tailrace.trainer.fitting.pace import Pace
from tailrace.trainer.observation.journal import Journal
from tailrace.trainer.showing.option_texts import note_changed, option_texts


def saving_of(
    checkpoint: Checkpoint | str | os.PathLike[str] | None,
    number: int,
    engine: Engine,
    duration: Duration,
) -> Saving | None:
    """The checkpoints of a fit, from the value of `fit(checkpoint=)`."""
    return (
        None if checkpoint is None else Saving(as_checkpoint(checkpoint), number, engine, duration)
    )


@dataclasses.dataclass
class TakenUp:
    """A fit from a checkpoint, ready to resume.

    Attributes:
        progress: its progress.
        step: the trainer's step.
        history: the history of all its steps.
        position: its position in the dataset.
        pace: the chosen length of executions.
        callbacks: the states of its callbacks.
        classes: the classes of its callbacks; None if they are not known.
        finished: whether there is nothing left to do.
        run_end: the end of its run directory.
        element: the form of an element of its dataset; None if it is not known.
    """

    progress: Progress
    step: int
    history: History
    position: Mapping[str, Any]
    pace: Mapping[str, Any]
    callbacks: list[dict[str, Any]]
    classes: list[str] | None
    finished: bool
    run_end: Any
    element: str | None

    def put_states(self, callbacks: Sequence[Callback]) -> None:
        """Restore the states of callbacks."""
        states = states_of(callbacks, self.callbacks, self.classes)
        for callback, state in zip(callbacks, states, strict=True):
            if state:
                callback.set_state(state)


@dataclasses.dataclass(frozen=True)
class FitParts:
    """The parts of a running fit that its checkpoints contain.

    Attributes:
        feed: the feed that it reads from.
        callbacks: those that have a state keep it.
        journal: its history and records.
        progress: its progress.
        pace: the length of its executions.
    """

    feed: InfeedQueue
    callbacks: Sequence[Callback]
    journal: Journal
    progress: Progress
    pace: Pace


class Saving:
    """The checkpoints of one fit.

    Args:
        checkpoint: the directory and the period.
        number: the index of the fit among those of the trainer with checkpoints.
        engine: the engine whose state is saved.
        duration: the requested duration.

    Attributes:
        monitor: the value whose best state is kept; None for none.
    """

    def __init__(
        self, checkpoint: Checkpoint, number: int, engine: Engine, duration: Duration
    ) -> None:
        self._engine, self._duration = engine, duration
        self._writer = CheckpointWriter(checkpoint, number)
        self.monitor = monitor_of(checkpoint)
        self._fit: FitParts | None = None
        self._element = ""

    @property
    def directory(self) -> str:
        """The directory."""
        return str(self._writer.directory.directory)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hold the lock of the directory."""
        # Before the directory is made and locked: without Orbax it would stay empty.
        orbax_files.import_orbax()
        with ExitStack() as stack:
            # One process holds the lock for all: a lock per process would refuse the others.
            first_does(lambda: stack.enter_context(self._writer.directory.writing()))
            if self._engine.digests is not None:  # a replay needs the same kernels
                stack.enter_context(choices_in(self.directory, write=distributed.writes()))
            try:
                yield
            finally:
                self._writer.close()

    # -- resuming -------------------------------------------------------------------------------

    def take_up(self) -> TakenUp | None:
        """Restore the engine's state from the directory; None if it has no checkpoint of this fit."""
        read: list[Any] = []

        def newest() -> str | None:
            read[:] = self._writer.directory.read_newest(self._writer.fit) or ()
            return str(read[0].path) if read else None

        # `newest` leaves in the list what it has read: the process that looked need not read it
        # again.
        found = first_does(newest)
        if found is None:
            return None
        # One process decides which one is whole, and has read it; the others read the same.
        arrays, note = each_does(lambda: read[1:] if read else orbax_files.read(Path(found)))
        if "fit" not in note:
            raise CheckpointError(
                f"The checkpoint {found!r} was saved by {saved_by(note)}. Give this fit "
                f"another directory."
            )
        engine, fit = self._engine, note["fit"]
        progress = Progress(**fit["progress"])
        # A process counts its own elements, and there may be more processes now, or fewer.
        progress.elements = progress.elements * len(fit["positions"]) // distributed.process_count()
        before = Duration(**fit["duration"])
        # More is asked for than then: the end of that fit is the middle of this one.
        further = _less(before, self._duration)
        # Before the state is touched: a checkpoint that is refused leaves the trainer as it was.
        self._check(note, progress)
        if fit["ended"] and further:
            self._check_end(int(note["step"]), progress, before)
        put_state(engine, arrays, note)
        engine.build_as_recorded(note.get(BUILD))
        count, replicas = engine.accumulation.microbatches, engine.placement.replicas
        history = history_of(arrays, progress.first_step, count, replicas)
        finished = bool(fit["ended"] and not further) or progress.passed(self._duration)
        progress.stopped = progress.stopped and not fit["ended"]  # to be continued, if not finished
        # Without a word, a fit that trains nothing would look like a fault.
        if finished and (not fit["ended"] or _less(self._duration, before)):
            note_once(
                f"fit({self._duration}): the checkpoint directory holds a fit that went further "
                f"({progress.steps} steps, {progress.epochs} epochs). Its end is returned.",
                key=f"smaller fit {found}",
            )
        self._note_changed_options(fit, finished)
        if self.monitor is not None:
            self.monitor.take_up(fit.get("watched"), fit["best"], "best= of tr.Checkpoint")
        return TakenUp(
            progress,
            engine.step,
            history,
            own_position(fit["positions"]),
            fit["pace"],
            _callback_states(fit["callbacks"], arrays),
            fit.get("callback_classes"),
            finished,
            run_end_of(note, self.directory),
            fit.get("element"),
        )

    def check_last(self, journal: Journal) -> None:
        """Refuse a fit without checkpoints after this one, if a run has rows of fits that follow.

        It writes its rows again, after those of this fit: what follows would be cut off, and the fits
        that wrote it do not run again.
        """

        def check() -> None:
            later = [one for one in self._writer.directory.found() if one.fit > self._writer.fit]
            if later and journal.run_dir is not None:
                raise CheckpointError(
                    f"This fit has no checkpoint=, and is followed by one that {self.directory!r} "
                    f"holds (fit-{later[0].fit}). To train it again, the rows of both would be cut off "
                    f"the run directory {journal.run_dir!r}. Give every fit of a script with run_dir= "
                    f"the checkpoint directory, and begin again in new directories; or resume without "
                    f"run_dir=."
                )

        first_does(check)

    def _check_end(self, step: int, progress: Progress, before: Duration) -> None:
        """Refuse to continue a fit from its end if that is the state of an earlier step."""
        trained = progress.first_step + progress.steps
        if step != trained:
            raise CheckpointError(
                f"A longer fit continues from the end of the shorter one, and that in "
                f"{self.directory!r} trained {counted(trained, 'step')} and ended with the best state, "
                f"of step {step}: the steps after it would be trained twice. Received: "
                f"fit({self._duration}) instead of fit({before}). Ask for fit({before}), and train on "
                f"with a further fit, which begins with step {step}; or give another directory."
            )

    def note_later(self, journal: Journal) -> None:
        """Say what a run directory loses where a fit is resumed that others have followed.

        It has failed, and the script went on. Its rows come again, and those of fits that are finished
        do not.
        """
        later = [one for one in self._writer.directory.found() if one.fit > self._writer.fit]
        if later and journal.run_dir is not None:
            note_once(
                f"This fit is resumed, and fits that followed it have rows in the run directory "
                f"{journal.run_dir!r}, which are cut off: those that the checkpoints in "
                f"{self.directory!r} cover do not come again. To keep the old directory, stop, and "
                f"give run_dir a new one.",
                key=f"later {journal.run_dir}",
            )

    def _check(self, note: Mapping[str, Any], progress: Progress) -> None:
        """Refuse a checkpoint of another training."""
        engine, fit = self._engine, note["fit"]
        # What decides the bits of the steps to come. Not the optimizer, which is changed on purpose
        # at times, nor taps, which change nothing.
        here = {
            "seed": (engine.seed, note["seed"]),
            "the trainer's step when the fit begins": (engine.step, progress.first_step),
            "elements of a step (accumulation x replicas)": (
                engine.accumulation.microbatches * engine.placement.replicas,
                fit["elements_per_step"],
            ),
            "accumulation": (describe_accumulation(engine), fit["accumulation"]),
            "what fit counts": (_counts(self._duration), _counts(Duration(**fit["duration"]))),
        }
        self._writer.directory.check_same(here)

    def _note_changed_options(self, fit: Mapping[str, Any], finished: bool) -> None:
        """Say which options are others: meant, or the directory of another training."""
        # Earlier versions saved the optimizer alone.
        said = {"optimizer": fit["optimizer"]} if fit.get("optimizer") else {}
        then, now = fit.get("options", said), option_texts(self._engine)
        scaling = self._engine.step_function.loss_scale
        moving = scaling is not None and not scaling.is_fixed
        goes_on = moving and then.get("loss_scale") not in (None, now["loss_scale"])
        more = f", from its scale of {self._engine.loss_scale:g}" if goes_on else ""
        note_changed(then, now, self.directory, finished, more)

    def restore_position(self, fit: FitParts, taken: TakenUp, dataset: object) -> None:
        """Restore the position in the dataset and the states of callbacks."""
        Passes(dataset, taken.progress, taken.position).bring(fit.feed)
        # Not in `Passes`: a replay from a list of the same elements proves that they are.
        fit.feed.check_kind(taken.position)
        # After the recipe of `tr.batches` was compared, which says more: a batch size.
        if taken.element is not None:  # earlier versions did not save it
            form = {"an element of the dataset": (self._element, taken.element)}
            self._writer.directory.check_same(form)
        taken.put_states(fit.callbacks)

    # -- saving ---------------------------------------------------------------------------------

    def begin(self, fit: FitParts, fresh: bool) -> None:
        """Start; the state before the first step is saved too."""
        self._fit = fit
        # Now, when an element was read for it: later, a save would wait for the first of the next pass.
        self._element = fit.feed.spec().text
        # The period counts from here: a fit that was just resumed has a checkpoint.
        self._writer.started_at(self._reached)
        if fresh:
            # A run that has rows has a checkpoint, however early the process is killed: with none, it
            # could not be continued.
            self.save(wait=True)

    @property
    def _reached(self) -> int:
        """The step that the fit has reached, which orders its checkpoints.

        The trainer's step can be an earlier one, if a callback has restored the best state at the end.
        """
        assert self._fit is not None
        return self._fit.progress.first_step + self._fit.progress.steps

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self._writer.due(self._reached)

    def save(self, *, ended: bool = False, best: bool = False, wait: bool = False) -> None:
        """Save the current state; no execution may be in flight."""
        assert self._fit is not None
        with span("checkpoint", step=self._engine.step):
            self._writer.save(
                self._reached,
                lambda: self.snapshot(ended),
                ended=ended,
                best=best and not ended,
            )
            if wait:
                # All processes wait for the one that writes: none may end while the checkpoint is
                # unfinished.
                first_does(lambda: self._writer.wait(last=True))

    def look(self, logs: Mapping[str, float]) -> None:
        """Save if the monitored value has improved."""
        monitor = self.monitor
        if monitor is not None and monitor.is_due(logs) and monitor.improves(logs):
            self.save(best=True)

    def snapshot(self, ended: bool) -> Snapshot:
        """All that a checkpoint holds, as it is now."""
        engine, fit = self._engine, self._fit
        assert fit is not None
        arrays, keys = state_arrays(engine)
        arrays |= history_arrays(fit.journal.history)
        states = []
        for number, callback in enumerate(fit.callbacks):
            plain = {}
            for name, value in getattr(callback, "get_state", dict)().items():
                if isinstance(value, np.ndarray | jax.Array):
                    # By position, not by class: a script may have two callbacks of one class.
                    arrays[f"{CALLBACK}{number}/{name}"] = np.asarray(value)
                else:
                    plain[name] = as_json(value, f"{type(callback).__name__}.get_state()[{name!r}]")
            states.append(plain)
        note = {
            # Epochs of the fits before; those of this one are in its progress.
            **trainer_note(engine, keys, fit.progress.first_epoch),
            "fit": {
                "progress": dataclasses.asdict(fit.progress),
                "duration": dataclasses.asdict(self._duration),
                "ended": ended,
                "elements_per_step": engine.accumulation.microbatches * engine.placement.replicas,
                "accumulation": describe_accumulation(engine),
                "element": self._element,
                "options": option_texts(engine),
                # Each process reads its own part of the data.
                "positions": gathered(fit.feed.get_state()),
                "pace": fit.pace.chosen_state(),
                # For a replay: a loop with other room is another program, and may round differently.
                "capacity": engine.runner.capacity,
                "callbacks": states,
                "callback_classes": classes_of(fit.callbacks),
                "best": None if self.monitor is None else self.monitor.best,
                "watched": None if self.monitor is None else self.monitor.recorded(),
            },
        }
        # A mark, not a flush: the writer thread waits for the run directory, training does not.
        return Snapshot(arrays, note, fit.journal.mark())


def run_end_of(note: Mapping[str, Any], directory: object) -> dict[str, Any] | None:
    """Where a run directory was at a checkpoint, and whose it is; None without one."""
    end = note.get("run")
    return None if end is None else {**end, "checkpoint": str(directory)}


def describe_accumulation(engine: Engine) -> str:
    """The parts of the accumulation that change results, except the number of elements per step."""
    dtype: Any = engine.accumulation.dtype
    try:
        name = "float of the gradient" if dtype is None else str(np.dtype(dtype))
    except TypeError:
        name = "by a function"
    return f"{engine.accumulation.reduction}, {name}"


def as_json(value: object, where: str) -> Any:
    """A value that JSON returns as it was; refuses any other, because `set_state` would get another.

    >>> as_json({"best": np.float32(0.5), "seen": (1, 2)}, "state")
    {'best': 0.5, 'seen': [1, 2]}
    """
    # Scalars of NumPy are what callbacks mostly have (the mean of some losses), and JSON knows
    # none.
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return [as_json(one, f"{where}[{n}]") for n, one in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: as_json(one, f"{where}[{key!r}]") for key, one in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise CheckpointError(
        f"The state of a callback has numbers, strings, lists, dicts with string keys, and, at the top "
        f"level, arrays. Received: {where}, a {type(value).__name__}: {value!r:.80}."
    )


def _counts(duration: Duration) -> str:
    return "steps" if duration.steps is not None else "epochs"


def _less(now: Duration, before: Duration) -> bool:
    return (now.steps or 0) < (before.steps or 0) or (now.epochs or 0) < (before.epochs or 0)


def _callback_states(
    plain: list[dict[str, Any]], arrays: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
    states = []
    for number, state in enumerate(plain):
        start = f"{CALLBACK}{number}/"
        own = {n.removeprefix(start): a for n, a in arrays.items() if n.startswith(start)}
        states.append({**state, **own})
    return states
