"""The trainer that a Keras model gets: `compile`, `fit`, `evaluate` and `predict` on the engine."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from tailrace.errors import OptionError, ProgramError
from tailrace.keras.data.batch_counts import (
    batches_in,
    check_accumulation,
    check_enough,
    per_replica,
)
from tailrace.keras.data.resident_arrays import are_arrays, arrays_in, as_rows, keeps
from tailrace.keras.optimizers.wrappers import overrides
from tailrace.keras.pipelines.assignment import Assigning
from tailrace.keras.pipelines.stage_scope import in_scope
from tailrace.keras.programs.logs import Number
from tailrace.keras.programs.pacing import Pacing
from tailrace.keras.programs.steps import Evaluating, Predicting, Stepping
from tailrace.keras.programs.train import Training
from tailrace.keras.settings.options import Settings
from tailrace.keras.settings.setters import Setters

_DATA = ("x", "y", "sample_weight")
_SINGLE = (
    "train_on_batch, test_on_batch and predict_on_batch take one batch, and a step of this model takes "
    "{} (replicas x microbatches). Give that many batches to fit, evaluate or predict instead."
)


class Watch(keras.callbacks.Callback):
    """Tells the program when an epoch begins."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self._pacing = program

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count the batches of this epoch."""
        self._pacing.begin_epoch()


class TailraceModel(Setters, Assigning):
    """What stands in front of a Keras model's class; see `tk.adopt`."""

    @property
    def tailrace(self) -> Settings:  # type: ignore[override]
        """What the model is set to."""
        if "_tailrace_settings" not in self.__dict__:  # made by its class, as a clone is
            object.__setattr__(self, "_tailrace_settings", Settings(self))
        return self.__dict__["_tailrace_settings"]

    @property
    def _tailrace_programs(self) -> dict[str, Any]:
        return self.__dict__.setdefault("_tailrace_made", {})

    # -- compile --------------------------------------------------------------------------------

    def compile(self, *args: Any, observe: Any = (), run_dir: Any = None, **kwargs: Any) -> None:
        """Keras' `compile`, and what Tailrace adds to it.

        Args:
            *args: as in Keras.
            observe: taps (`tr.Tap`), or selections whose statistics are wanted; what they saw is in
                `model.records` after a fit.
            run_dir: a new directory that keeps history and records while training goes on.
            **kwargs: as in Keras.
        """
        _check_compiled(kwargs.get("run_eagerly"), kwargs.get("jit_compile", "auto"))
        super().compile(*args, **kwargs)  # type: ignore[misc]
        settings = self.tailrace
        settings.observe, settings.run_dir = observe, run_dir
        self.steps_per_execution = _count(self.steps_per_execution)
        self.forget_programs()

    def forget_programs(self) -> None:
        """Build the device programs anew when they are needed next."""
        self.train_function = self.test_function = self.predict_function = None
        object.__setattr__(self, "_tailrace_made", {})

    # -- what is seen ---------------------------------------------------------------------------

    @property
    def records(self) -> Any:
        """What the taps of `compile(observe=...)` saw in the latest fit."""
        return self._trained("records").records

    def tensors(self) -> Any:
        """Every tensor of a training step by name, as `observe=` selects them; after a fit."""
        return self._trained("tensors()").tensors()

    def _trained(self, what: str) -> Any:
        program = self._tailrace_programs.get("train")
        if program is None or getattr(program, "trainer", None) is None:
            raise ProgramError(
                f"model.{what} is there after a fit: the model has not been trained since it was "
                f"compiled. Call fit first."
            )
        return program.trainer

    # -- fit, evaluate, predict -----------------------------------------------------------------

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' `fit`: many batches to an execution, on the device."""
        bound = inspect.signature(super().fit).bind(*args, **kwargs)  # type: ignore[misc]
        bound.apply_defaults()
        call = bound.arguments
        pacing = self._pacing_of_fit(call)
        if self._keeps_arrays(call):
            call.update({name: as_rows(call[name]) for name in _DATA})
            pacing.resident = arrays_in([call[name] for name in _DATA])
        callbacks = call["callbacks"]
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.callbacks.append(Watch(pacing))
        else:
            listed = keras.tree.flatten(callbacks) if callbacks else []
            call["callbacks"] = [Watch(pacing), *listed]
            if call["verbose"] != 0 and not any(
                isinstance(one, keras.callbacks.ProgbarLogger) for one in listed
            ):
                pacing.bar = keras.callbacks.ProgbarLogger()
                pacing.bar.async_safe = True  # or Keras would wait for the logs of each execution
                call["callbacks"].append(pacing.bar)
            if self.tailrace.options.asynchronous_callbacks:
                pacing.every_step = listed
            stepwise = overrides(self, "train_step", keras.Model)  # its logs are all there is
            listening = [one for one in call["callbacks"] if _listens(one)]
            pacing.heard = stepwise or bool(listening)
            pacing.alone = stepwise or not all(
                getattr(one, "async_safe", False) for one in listening
            )
        with self._running("train", pacing), _remainders(pacing.drops):
            return super().fit(**call)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' `evaluate`: many batches to an execution, on the device."""
        validating = kwargs.get("_use_cached_eval_dataset", False)
        bound = inspect.signature(super().evaluate).bind(*args, **kwargs)  # type: ignore[misc]
        pacing = self._pacing_of_test(bound.arguments, validating)
        several = self.tailrace.replicas > 1
        with self._running("test", pacing, same_execution=validating), _remainders(several):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' `predict`: many batches to an execution, on the device."""
        bound = inspect.signature(super().predict).bind(*args, **kwargs)  # type: ignore[misc]
        pacing = self._pacing_of_test(bound.arguments, False)
        with self._running("predict", pacing), _remainders(self.tailrace.replicas > 1):
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    # -- what Keras' trainer asks for -----------------------------------------------------------

    def make_train_function(self, force: bool = False) -> Any:
        """The function that trains for one execution."""
        overridden = overrides(self, "train_step", keras.Model)
        self.train_function = self._program("train", Stepping if overridden else Training, force)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """The function that evaluates for one execution."""
        self.test_function = self._program("test", Evaluating, force)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """The function that predicts for one execution."""
        self.predict_function = self._program("predict", Predicting, force)
        return self.predict_function

    def jax_state_sync(self) -> None:
        """Give the variables their values back."""
        program = self.__dict__.get("_tailrace_active")
        if program is not None:
            program.fill()
        super().jax_state_sync()  # type: ignore[misc]

    def compute_loss_and_updates(
        self,
        trainable_variables: Any,
        non_trainable_variables: Any,
        metrics_variables: Any,
        x: Any,
        y: Any,
        sample_weight: Any,
        training: bool = False,
        optimizer_variables: Any = None,
    ) -> Any:
        """Keras' forward pass; inside a training program, its loss is also kept with its gradient."""
        settings = self.tailrace
        state = (trainable_variables, non_trainable_variables, metrics_variables)
        if settings.seen is None:
            return super().compute_loss_and_updates(  # type: ignore[misc]
                *state, x, y, sample_weight, training, optimizer_variables
            )
        layout = settings.layout
        # Keras scales the loss too, by values that do not matter: that result is not used.
        unused = [] if layout.scale is None else layout.optimizer.all[: layout.scale + 1]
        zeros = [jnp.zeros(tuple(v.shape), v.dtype) for v in unused]
        _, (loss, y_pred, others, metrics) = super().compute_loss_and_updates(  # type: ignore[misc]
            *state, x, y, sample_weight, True, zeros
        )
        settings.seen.loss = loss
        loss, y_pred = jax.lax.stop_gradient((loss, y_pred))
        return loss, (loss, y_pred, others, metrics)

    def get_metrics_result(self) -> dict[str, Any]:
        """The metrics now; with replicas, as `set_replication_options` says."""
        found = super().get_metrics_result()  # type: ignore[misc]
        settings = self.tailrace
        program = self.__dict__.get("_tailrace_active")
        latest = getattr(program, "latest", None)
        if settings.replicas == 1 or settings.merges_metrics or not latest:
            return found
        return {
            name: jax.numpy.asarray(Number(latest[name])) if name in latest else value
            for name, value in found.items()
        }

    # -- inside ---------------------------------------------------------------------------------

    def _program(self, mode: str, kind: type, force: bool) -> Any:
        programs = self._tailrace_programs
        program: Any = programs.get(mode)
        if force or type(program) is not kind or not program.layout.same(self):
            program = programs[mode] = kind(self)

        def function(state: Any, iterator: Iterator[Any]) -> Any:
            object.__setattr__(self, "_tailrace_active", program)
            running = self.__dict__.get("_tailrace_running", {}).get(mode)
            program.pacing = running or Pacing(program.per_step, replicas=program.replicas)
            try:
                if running is None and program.per_step > 1:
                    raise ProgramError(_SINGLE.format(program.per_step))
                return program.run(state, iterator)
            except Exception as error:
                if not isinstance(error, StopIteration):
                    program.restore(state)  # Keras has emptied its variables
                raise
            finally:
                if running is None:  # a single batch, outside fit
                    program.fill()
                    program.end()

        return function

    @contextlib.contextmanager
    def _running(self, mode: str, pacing: Pacing, same_execution: bool = False) -> Iterator[None]:
        """While Keras' trainer runs: it counts executions in batches over all replicas."""
        _check_compiled(self.run_eagerly)  # type: ignore[attr-defined]
        running = self.__dict__.setdefault("_tailrace_running", {})
        before, running[mode] = running.get(mode), pacing
        configured = self.steps_per_execution
        if not same_execution:
            self.steps_per_execution = pacing.execution
        try:
            with in_scope():
                yield
        finally:
            self.steps_per_execution = configured
            if before is None:
                del running[mode]
            else:
                running[mode] = before
            program = self._tailrace_programs.get(mode)
            if program is not None:
                program.end()

    def _pacing_of_fit(self, call: dict[str, Any]) -> Pacing:
        settings = self.tailrace
        settings.check_pipeline()
        replicas, count = settings.replicas, settings.microbatches
        steps, split = call["steps_per_epoch"], call["validation_split"]
        share = 1.0 - split if split and call["validation_data"] is None else 1.0
        size = batches_in(call["x"], call["batch_size"], share)
        each, execution = per_replica(steps, size, self.steps_per_execution, replicas)
        check_accumulation(execution, count, settings.is_pipelined)
        epochs = max(0, call["epochs"] - call["initial_epoch"])
        needed = None if steps is None else steps * epochs
        if steps is not None:
            check_enough(steps * epochs, size, restarts=steps == size)
        return Pacing(
            execution=execution * replicas,
            unit=count * replicas,
            replicas=replicas,
            batches=each * replicas,
            most=needed,
            ahead=settings.options.prefetch > 0,
            drops=(steps or size or 0) % replicas != 0,
        )

    def _keeps_arrays(self, call: dict[str, Any]) -> bool:
        """Whether what `fit` is given is kept on the device whole."""
        settings = self.tailrace
        asked, data = settings.options.resident, [call[name] for name in _DATA]
        one_device = settings.replicas == 1 and not settings.is_pipelined
        possible = one_device and are_arrays(data) and not call["validation_split"]
        if asked and not possible:
            raise OptionError(
                f"resident=True keeps the arrays given to fit on the one device that trains: numpy "
                f"arrays, whose floats are of the type that Keras computes in "
                f"({keras.config.floatx()}), not split by validation_split. Received: "
                f"{'other data' if one_device else 'a model with replicas or stages'}. Leave it out."
            )
        if asked is not None or not possible:
            return bool(asked)
        return keeps(data, call["epochs"] - call["initial_epoch"])

    def _pacing_of_test(self, call: dict[str, Any], validating: bool) -> Pacing:
        settings = self.tailrace
        replicas = settings.replicas
        if validating:  # as many batches to an execution as in training, and what is left
            outer = self.__dict__["_tailrace_running"]["train"]
            steps = call.get("steps")
            most = None if steps is None else steps - steps % replicas
            return Pacing(outer.execution, replicas, replicas, batches=most, most=most, ahead=True)
        steps = call.get("steps")
        size = batches_in(call.get("x"), call.get("batch_size"))
        each, execution = per_replica(steps, size, self.steps_per_execution, replicas)
        return Pacing(
            execution=execution * replicas,
            unit=replicas,
            replicas=replicas,
            batches=each * replicas,
            most=steps,
            ahead=settings.options.prefetch > 0,
        )


@contextlib.contextmanager
def _remainders(dropped: bool) -> Iterator[None]:
    """Keras takes batches that replicas cannot share, and that are left out, for a lack of data."""
    with warnings.catch_warnings():
        if dropped:
            warnings.filterwarnings("ignore", "Your input ran out of data")
        yield


def _check_compiled(run_eagerly: Any, jit_compile: Any = "auto") -> None:
    """Refuse to run what was asked to be run step by step."""
    if run_eagerly:
        raise ProgramError(
            "Keras models cannot run eagerly when using tk.Strategy: an execution is one program "
            "on the device. Received: run_eagerly=True. Leave it out, or use a model outside "
            "the scope."
        )
    if jit_compile is False:
        raise ProgramError(
            "An execution is one compiled program. Received: jit_compile=False. Leave it out, or "
            "use a model outside the scope."
        )


def _listens(callback: Any) -> bool:
    """Whether a callback does something before or after a batch."""
    names = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    return any(overrides(callback, name, keras.callbacks.Callback) for name in names)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(
            f"steps_per_execution counts batches and is at least 1. "
            f"Received: steps_per_execution={value!r}."
        )
    return value
