"""Adopted Keras models: `compile`, `fit`, `evaluate` and `predict` on the engine."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from tailrace.base.checks import check_count
from tailrace.base.messages import note_once
from tailrace.base.spans.span import span
from tailrace.base.trees import Tree
from tailrace.errors import OptionError, ProgramError
from tailrace.feeds.waiting import Heartbeat, Patience
from tailrace.keras.checkpoints.fit_forms import backups_of, callbacks_in
from tailrace.keras.checkpoints.keeping import Keeping
from tailrace.keras.checkpoints.kept_fit import fit_kept
from tailrace.keras.checkpoints.past_fit import LookingBack, PastFit, PastTraining
from tailrace.keras.data.batch_counts import (
    remainders,
)
from tailrace.keras.data.copied_batches import copy_batches
from tailrace.keras.data.first_batch import FirstBatch, ReadsHere
from tailrace.keras.keras_internals import PLAIN
from tailrace.keras.optimizers.application import overrides
from tailrace.keras.pipelines.assignment import Assigning
from tailrace.keras.pipelines.stage_scope import in_scope
from tailrace.keras.programs.call_pacing import (
    listen,
    listen_to_steps,
    pacing_of_fit,
    pacing_of_test,
    resident_rows,
)
from tailrace.keras.programs.callback_hooks import callback_spans
from tailrace.keras.programs.executions import Executions
from tailrace.keras.programs.keras_loop import refuse_in_keras_loop, why_keras_runs
from tailrace.keras.programs.logs import Number
from tailrace.keras.programs.pacing import Pacing
from tailrace.keras.programs.steps import Evaluating, Predicting, Stepping
from tailrace.keras.programs.train import Training
from tailrace.keras.settings.distribution import check_not_distributed
from tailrace.keras.settings.options import Settings
from tailrace.keras.settings.setters import Setters
from tailrace.taps.tap import Observe
from tailrace.trainer.checkpoints.checkpoint import Checkpoint, as_checkpoint, monitor_of
from tailrace.trainer.checks import check_fingerprint

ASSET = "tailrace.json"
"""The file with the model's settings, among the assets of a saved model."""

_LOSS = "compute_loss_and_updates"
_CALLED = {"train": "fit", "test": "evaluate", "predict": "predict"}
_SINGLE = (
    "train_on_batch, test_on_batch and predict_on_batch take one batch, and a step of this model takes "
    "{} (replicas x microbatches). Give that many batches to fit, evaluate or predict instead."
)


class Adopted(Setters, Assigning, LookingBack):
    """What Tailrace adds to one Keras model; `tk.of(model)`.

    For adopted models, Keras' methods are redirected to the methods here of the same names: overrides
    in a model's class come first, and reach them through `super()`.

    Attributes:
        model: the model.
        settings: its settings.
    """

    def __init__(self, model: keras.Model, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.programs: dict[str, Any] = {}
        self._running: dict[str, Pacing] = {}
        self._single = False  # whether one batch alone comes next (`train_on_batch`)
        self.active: Any = None
        """The program that ran last."""
        self.past: PastFit | None = None
        """The past that runs again, while it does."""
        self.kept_fits = 0
        """The number of fits with checkpoints so far."""
        self.first_batch = FirstBatch()
        """Reads the batch that Keras builds the model from."""

    # -- compile --------------------------------------------------------------------------------

    def compile(
        self,
        *args: Any,
        observe: Observe = (),
        run_dir: str | os.PathLike[str] | None = None,
        fingerprint: bool = False,
        **kwargs: Any,
    ) -> None:
        """Keras' `compile`, and what Tailrace adds to it.

        Args:
            *args: as in Keras.
            observe: taps (`tr.Tap`), or selections to compute statistics of; their records are in
                `model.records` after a fit.
            run_dir: a new directory that keeps history and records during training.
            fingerprint: keep 8 bytes for each group of tensors after each execution, in checkpoints and
                in the run directory: `tk.of(model).replay` proves by them what a past step was.
            **kwargs: as in Keras.

        Raises:
            OptionError: `steps_per_execution` is not a positive integer.
            ProgramError: the options of this model need a device program, and `compile`
                rules one out.
        """
        model, settings = self.model, self.settings
        # The optimizer first: ours are wrapped or refused before Keras makes its own of what was
        # given.
        if args:
            args = (settings.own_optimizer(args[0]), *args[1:])
        elif "optimizer" in kwargs:
            kwargs["optimizer"] = settings.own_optimizer(kwargs["optimizer"])
        PLAIN["compile"](model, *args, **kwargs)
        settings.check_compiled(model.run_eagerly, model.jit_compile)
        settings.observe, settings.run_dir = observe, run_dir
        settings.fingerprint = check_fingerprint(fingerprint)
        model.steps_per_execution = _count(model.steps_per_execution)
        self.forget_programs()

    def forget_programs(self) -> None:
        """Drop the device programs; they are built again when needed."""
        model = self.model
        # Keras makes a function again where there is none.
        model.train_function = model.test_function = model.predict_function = None
        self.programs = {}

    # -- observation ----------------------------------------------------------------------------

    @property
    def records(self) -> Any:
        """The records of the taps of `compile(observe=...)` in the latest fit."""
        return self._trained("records").journal.records

    def tensors(self) -> Any:
        """Every tensor of a training step by name, as `observe=` selects them; after a fit."""
        return self._trained("tensors()").engine.tensors()

    def _trained(self, what: str) -> Any:
        program = self.programs.get("train")
        if program is None or getattr(program, "engine", None) is None:
            raise ProgramError(
                f"model.{what} exists after a fit: the model has not been trained since it was "
                f"compiled. Call fit first."
            )
        return program

    # -- fit, evaluate, predict -----------------------------------------------------------------

    def fit(
        self,
        *args: Any,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Keras' `fit` on the device, with many batches per execution.

        Args:
            *args: as in Keras.
            checkpoint: a directory, or a `tr.Checkpoint`, for the state of the fit. If it contains this
                fit already, the fit resumes from there, bit for bit as if it had never stopped.
            timeout_s: the longest wait for a batch, also of the validation, in seconds; a longer one is
                a `tr.errors.DataTimeout` that names it. A thread then reads the data. None: no limit;
                a note is logged after 30 seconds.
            **kwargs: as in Keras.

        Raises:
            OptionError: an option does not suit the data or the model; the text says which.
            DataError: batches do not divide over replicas or microbatches, or are later than
                `timeout_s`.
            CheckpointError: the checkpoint is that of another fit.
        """
        model, plain = self.model, PLAIN["fit"]
        patience = Patience(timeout_s)  # refused here, before anything is read
        if not model.compiled or self._keras_runs("train"):  # Keras reports what is missing
            if model.compiled:
                refuse_in_keras_loop(
                    str(why_keras_runs(model, "train", _Function)), checkpoint, timeout_s
                )
            return plain(model, *args, **kwargs)
        # Keras' own signature, whatever version: arguments are read and changed by name.
        bound = inspect.signature(plain).bind(model, *args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        # Before callbacks are looked at: it takes BackupAndRestore out of them.
        keeping = self._keeping_of(checkpoint, call)
        pacing = self._pacing_of(call)
        pacing.patience = patience
        with callback_spans(call["callbacks"]):
            if keeping is None:
                call["x"] = self.first_batch.of_generator(call["x"], timeout_s)
                listen(self.model, self.settings, pacing, call)
                with self.while_running("train", pacing), remainders(pacing.drops):
                    return plain(**call)
            with keeping.open():
                number, self.kept_fits = self.kept_fits, self.kept_fits + 1
                try:
                    return fit_kept(self, keeping, pacing, call)
                except BaseException:
                    # As in Keras, the next fit with this callback continues where this one was: in a
                    # notebook, it is the same cell run again.
                    if keeping.backup is not None:
                        self.kept_fits = number
                    raise

    def _fit_again(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Pacing, dict[str, Any]]:
        call = self._arguments(PLAIN["fit"], self.model, *args, **kwargs)
        if not self.model.compiled or self._keras_runs("train") or not trains_by_engine(self.model):
            raise OptionError(
                "A replay runs the training program of a model again. Received: a model that is not "
                "compiled, or is trained by Keras' loop or a `train_step` of its own. Compile it."
            )
        # Validation is left out; its split of the data is not.
        call["verbose"], call["validation_freq"] = 0, call["epochs"] + 1
        return self._pacing_of(call), call

    def _pacing_of(self, call: dict[str, Any]) -> Pacing:
        """How a fit takes its batches, and its data as it may be read."""
        pacing = pacing_of_fit(self.model, self.settings, call)
        pacing.resident = resident_rows(self.settings, call)
        copy_batches(call, "x", "validation_data")
        return pacing

    def _keeping_of(
        self, checkpoint: Checkpoint | str | os.PathLike[str] | None, call: dict[str, Any]
    ) -> Keeping | None:
        """The checkpoints of a fit: as given, or as its BackupAndRestore requests."""
        if checkpoint is None:
            per_step = self.settings.microbatches * self.settings.replicas
            return backups_of(call, self.kept_fits, per_step)
        checkpoint = as_checkpoint(checkpoint)
        validates = call["validation_data"] is not None or bool(call["validation_split"])
        if (monitor := monitor_of(checkpoint)) is not None:
            monitor.check_validates("tr.Checkpoint", "best", validates)
        kept = Keeping(checkpoint, self.kept_fits)
        if any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks_in(call)):
            raise OptionError(
                "checkpoint= and keras.callbacks.BackupAndRestore both resume a fit. Received: both. "
                "Leave one of them out."
            )
        return kept

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' `evaluate` on the device, with many batches per execution."""
        found = self._evaluate(args, kwargs)
        program = self.programs.get("train") if "train" in self._running else None
        validating = kwargs.get("_use_cached_eval_dataset", False)
        if validating and isinstance(program, Training) and isinstance(found, Mapping):
            program.add_validation(found)
        return found

    def _evaluate(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        model, plain = self.model, PLAIN["evaluate"]
        if not model.compiled or self._keras_runs("test"):
            return plain(model, *args, **kwargs)
        validating = kwargs.get("_use_cached_eval_dataset", False)
        bound = inspect.signature(plain).bind(model, *args, **kwargs)
        pacing = pacing_of_test(
            model, self.settings, bound.arguments, validating, self._running.get("train")
        )
        listen_to_steps(self.settings, "test", pacing, bound.arguments)
        copy_batches(bound.arguments, "x")
        running = self.while_running("test", pacing, same_execution=validating)
        # In a validation, the callbacks are those of the fit.
        spans = callback_spans(None if validating else bound.arguments.get("callbacks"))
        named = span("validation") if validating else contextlib.nullcontext()
        with spans, running, named, remainders(self.settings.replicas > 1):
            return plain(*bound.args, **bound.kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' `predict` on the device, with many batches per execution."""
        model, plain = self.model, PLAIN["predict"]
        if self._keras_runs("predict"):
            return plain(model, *args, **kwargs)
        bound = inspect.signature(plain).bind(model, *args, **kwargs)
        pacing = pacing_of_test(model, self.settings, bound.arguments)
        listen_to_steps(self.settings, "predict", pacing, bound.arguments)
        copy_batches(bound.arguments, "x")
        spans = callback_spans(bound.arguments.get("callbacks"))
        with spans, self.while_running("predict", pacing), remainders(self.settings.replicas > 1):
            return plain(*bound.args, **bound.kwargs)

    # -- called by Keras' trainer ---------------------------------------------------------------

    def make_train_function(self, force: bool = False) -> Any:
        """The function that trains for one execution."""
        kind = Training if trains_by_engine(self.model) else Stepping
        return self._make("train", kind if self.past is None else PastTraining, force)

    def make_test_function(self, force: bool = False) -> Any:
        """The function that evaluates for one execution."""
        return self._make("test", Evaluating, force)

    def make_predict_function(self, force: bool = False) -> Any:
        """The function that predicts for one execution."""
        return self._make("predict", Predicting, force)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Build the model and its metrics, from the first batch of the data if they need one."""
        running = self._running.get("test") or self._running.get("train")
        if iterator is not None and running is not None:
            iterator = self.first_batch.of_epoch(iterator, running.patience.timeout_s)
        PLAIN["_symbolic_build"](self.model, iterator=iterator, data_batch=data_batch)
        self._single = data_batch is not None

    def jax_state_sync(self) -> None:
        """Write the values back to the variables."""
        # Keras calls this before it reads its variables: values stay on the device until then.
        if self.active is not None:
            self.active.fill()
        PLAIN["jax_state_sync"](self.model)

    def compute_loss_and_updates(
        self,
        trainable_variables: Tree,
        non_trainable_variables: Tree,
        metrics_variables: Tree,
        x: object,
        y: Tree,
        sample_weight: Tree,
        training: bool = False,
        optimizer_variables: Tree = None,
    ) -> Any:
        """Keras' forward pass; inside a training program, its loss is kept with its gradient."""
        settings, plain = self.settings, PLAIN["compute_loss_and_updates"]
        state = (trainable_variables, non_trainable_variables, metrics_variables)
        if settings.seen is None:
            return plain(self.model, *state, x, y, sample_weight, training, optimizer_variables)
        layout = settings.layout
        assert layout is not None
        # Keras also scales the loss, by values that do not matter: that result is unused.
        unused = [] if layout.scale is None else layout.optimizer.all[: layout.scale + 1]
        zeros = [jnp.zeros(tuple(v.shape), v.dtype) for v in unused]
        _, (loss, y_pred, others, metrics) = plain(
            self.model, *state, x, y, sample_weight, True, zeros
        )
        settings.seen.loss = loss
        # Metrics are updated from these, and nothing is differentiated through metrics.
        loss, y_pred = jax.lax.stop_gradient((loss, y_pred))
        return loss, (loss, y_pred, others, metrics)

    def get_metrics_result(self) -> dict[str, Any]:
        """The current metrics; with replicas, combined as set by `set_replication_options`."""
        found = PLAIN["get_metrics_result"](self.model)
        settings = self.settings
        latest = getattr(self.active, "latest", None)
        # Keras computes metrics from variables, which are merged over replicas. Any other
        # combination needs the values of each replica.
        if settings.replicas == 1 or settings.merges_metrics or not latest:
            return found
        return {
            name: jax.numpy.asarray(Number(latest[name])) if name in latest else value
            for name, value in found.items()
        }

    # -- saved with the model -------------------------------------------------------------------

    def save_assets(self, directory: str) -> None:
        """Save the settings in the model's file, where plain Keras ignores them."""
        pathlib.Path(directory, ASSET).write_text(json.dumps(self.settings.saved()))

    # -- inside ---------------------------------------------------------------------------------

    def _keras_runs(self, mode: str) -> bool:
        """Whether Keras' loop runs a model, because it needs something no device program can do."""
        reason = why_keras_runs(self.model, mode, _Function)
        if reason is None:
            check_not_distributed(self.model)
            return False
        self.settings.check_keras_loop(reason)
        note_once(
            f"Keras' own loop runs {_CALLED[mode]} of the model {self.model.name!r}, a step at a time: "
            f"it has {reason}.",
            key=f"keras loop {mode} {reason}",
        )
        return True

    def _make(self, mode: str, kind: type, force: bool) -> Any:
        model, name = self.model, f"{mode}_function"
        if self._keras_runs(mode):
            # Keras keeps a function that is there: one of ours, left from before, is to be
            # replaced.
            ours = isinstance(getattr(model, name), _Function)
            return PLAIN[f"make_{name}"](model, force or ours)
        program: Any = self.programs.get(mode)
        # A layer that was added, frozen or rebuilt changes the variables without a call of
        # `compile`.
        if force or type(program) is not kind or not program.layout.same(model):
            program = self.programs[mode] = kind(model)
        setattr(model, name, _Function(self, mode, program))
        return getattr(model, name)

    def run(self, mode: str, program: Executions, state: Tree, iterator: Iterator[Any]) -> Any:
        """Run one execution of a program; called by Keras' trainer."""
        single, self._single = self._single, False
        running = None if single else self._running.get(mode)
        around = self._around(mode, program) if running is None else contextlib.nullcontext()
        with around:
            self.active = program
            # Outside of fit (`train_on_batch`) an execution is one batch.
            alone = Pacing(program.per_step, replicas=program.replicas, of_fit=False)
            program.pacing = running or alone
            try:
                if running is None and program.per_step > 1:
                    raise ProgramError(_SINGLE.format(program.per_step))
                return program.run(state, iterator)
            except BaseException:
                # Keras has emptied its variables. The end of the data is found this way too, perhaps
                # after a callback has read the model: it would not have its values back.
                program.restore(state)
                raise
            finally:
                if running is None:  # a single batch, outside fit
                    program.fill()
                    program.end()

    def _around(self, mode: str, program: Executions | None) -> Any:
        """A context for a call in a callback of the same call of the same model; empty elsewhere."""
        if mode not in self._running or program is None:
            return contextlib.nullcontext()
        return program.set_aside(_CALLED[mode])

    @contextlib.contextmanager
    def while_running(
        self, mode: str, pacing: Pacing, same_execution: bool = False
    ) -> Iterator[None]:
        """A context around Keras' trainer, which counts batches over all replicas."""
        running = self._running
        # Evaluation inside a fit, or a callback that calls `fit` of the same model, may nest.
        before, program = running.get(mode), self.programs.get(mode)
        with self._around(mode, program):
            running[mode] = pacing
            try:
                with self._counting(pacing, same_execution):
                    yield
            finally:
                if before is None:
                    del running[mode]
                else:
                    running[mode] = before
                if (program := self.programs.get(mode)) is not None:
                    program.end()

    @contextlib.contextmanager
    def _counting(self, pacing: Pacing, same_execution: bool) -> Iterator[None]:
        model, running = self.model, self._running
        # Keras' loop counts the batches of all replicas; what the user has set comes back
        # afterwards.
        configured = model.steps_per_execution
        if not same_execution:
            model.steps_per_execution = pacing.execution
        try:
            # A call inside another one has its notes.
            reads = ReadsHere(self.first_batch, lambda: self.programs.values())
            noting = Heartbeat(reads) if len(running) == 1 else contextlib.nullcontext()
            with in_scope(), noting:
                yield
        finally:
            model.steps_per_execution = configured


class _Function:
    """The function that Keras' trainer calls for one execution."""

    def __init__(self, adopted: Adopted, mode: str, program: Executions) -> None:
        self._adopted, self._mode, self._program = adopted, mode, program

    def __call__(self, state: Tree, iterator: Iterator[Any]) -> Any:
        """Run an execution; returns logs or outputs, and the next state."""
        return self._adopted.run(self._mode, self._program, state, iterator)


def trains_by_engine(model: keras.Model) -> bool:
    """Whether the engine computes the step: loss and gradient, then the optimizer.

    Otherwise the step is Keras' `train_step`, or the user's, in a loop on the device.
    """
    own = any(overrides(model, one, keras.Model) for one in ("train_step", _LOSS))
    return not own and bool(model.trainable_variables)


def _count(value: object) -> int:
    return check_count(
        "steps_per_execution", value, at_least=1, error=OptionError, more=" (batches)"
    )
