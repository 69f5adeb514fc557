"""How one call of `fit`, `evaluate` or `predict` takes its batches, and which callbacks listen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from tailrace.errors import OptionError
from tailrace.feeds.waiting import Patience
from tailrace.keras.data.batch_counts import batches_in, check_accumulation, counted
from tailrace.keras.data.resident_arrays import Rows, keeps, rows_of
from tailrace.keras.optimizers.application import overrides
from tailrace.keras.programs.pacing import Pacing
from tailrace.keras.settings.options import Settings


class Watch(keras.callbacks.Callback):
    """Tells the program when an epoch begins."""

    def __init__(self, pacing: Pacing) -> None:
        super().__init__()
        self._pacing = pacing

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count the batches of this epoch."""
        self._pacing.begin_epoch()


def listen(model: keras.Model, settings: Settings, pacing: Pacing, call: dict[str, Any]) -> None:
    """Find the callbacks that listen to batches, and add one of ours that listens to epochs."""
    callbacks = call["callbacks"]
    # A list that the caller made has a progress bar and a history already.
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks.append(Watch(pacing))
        return
    listed = keras.tree.flatten(callbacks) if callbacks else []
    # First: the counts of the epoch must be there before any of the user's callbacks asks for them.
    call["callbacks"] = [Watch(pacing), *listed]
    if call["verbose"] != 0 and not any(
        isinstance(one, keras.callbacks.ProgbarLogger) for one in listed
    ):
        pacing.bar = keras.callbacks.ProgbarLogger()
        pacing.bar.async_safe = True  # or Keras would wait for the logs of each execution
        call["callbacks"].append(pacing.bar)
    if settings.options.asynchronous_callbacks:
        pacing.every_step = listed
    stepwise = overrides(model, "train_step", keras.Model)  # its logs are all there is
    listening = [one for one in call["callbacks"] if _listens(one)]
    pacing.listeners = stepwise or bool(listening) or logs_of_its_own(model)
    # Keras runs the hooks of `async_safe` callbacks in a thread, so they cannot rely on what the
    # model is between two executions.
    pacing.alone = stepwise or not all(getattr(one, "async_safe", False) for one in listening)


def listen_to_steps(settings: Settings, phase: str, pacing: Pacing, call: dict[str, Any]) -> None:
    """Find the callbacks that listen to every step of an evaluation or prediction."""
    callbacks = call.get("callbacks")
    if not callbacks or not settings.options.asynchronous_callbacks:
        return
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    own = (Watch, keras.callbacks.ProgbarLogger, keras.callbacks.History)
    pacing.phase = phase
    pacing.every_step = [c for c in keras.tree.flatten(callbacks) if not isinstance(c, own)]


def pacing_of_fit(model: keras.Model, settings: Settings, call: dict[str, Any]) -> Pacing:
    """How a call of `fit` takes batches."""
    settings.check_pipeline()
    replicas, count = settings.replicas, settings.microbatches
    steps, split = limited(call["steps_per_epoch"]), call["validation_split"]
    # Keras cuts validation data off the end before it makes batches.
    share = 1.0 - split if split and call["validation_data"] is None else 1.0
    size = batches_in(call["x"], call["batch_size"], steps, share)
    epochs = max(0, call["epochs"] - call["initial_epoch"])
    counts = settings.counts(steps, size, model.steps_per_execution, epochs)
    check_accumulation(counts, count, replicas, settings.is_pipelined)
    return Pacing(
        execution=counts.execution,
        unit=count * replicas,
        replicas=replicas,
        batches=counts.batches,
        ahead=settings.options.prefetch > 0,
        arrays=all(
            isinstance(one, np.ndarray | jax.Array) for one in keras.tree.flatten(call["x"])
        ),
        drops=(steps or size or 0) % replicas != 0,
    )


def resident_rows(settings: Settings, call: dict[str, Any]) -> Rows | None:
    """The arrays that `fit` is given, where they are kept on the device whole."""
    asked, one_device = (
        settings.options.resident,
        settings.replicas == 1 and not settings.is_pipelined,
    )
    # On several devices, each would need all rows.
    found = rows_of(call) if one_device and asked is not False else None
    if asked and found is None:
        raise OptionError(
            f"resident=True keeps the arrays given to fit on the one device that trains: numpy "
            f"arrays, whose floats are of the type that Keras computes in "
            f"({keras.config.floatx()}), not split by validation_split. Received: "
            f"{'other data' if one_device else 'a model with replicas or stages'}. Leave it out."
        )
    if found is None or asked or keeps(found.arrays, call["epochs"] - call["initial_epoch"]):
        return found
    return None


def pacing_of_test(
    model: keras.Model,
    settings: Settings,
    call: dict[str, Any],
    validating: bool = False,
    outer: Pacing | None = None,
) -> Pacing:
    """How a call of `evaluate` or `predict` takes batches; `outer` is that of the fit around it."""
    replicas, steps = settings.replicas, limited(call.get("steps"))
    if validating and outer is not None:  # as many batches to an execution as in training
        counts = counted(steps, None, outer.execution // replicas, replicas)
    elif validating:  # in an epoch of Keras' own loop
        counts = counted(steps, None, model.steps_per_execution, replicas)
    else:
        size = batches_in(call.get("x"), call.get("batch_size"), steps)
        counts = settings.counts(steps, size, model.steps_per_execution)
    return Pacing(
        execution=counts.execution,
        unit=replicas,
        replicas=replicas,
        batches=counts.batches,
        ahead=settings.options.prefetch > 0,
        # Only the limit: a signal lets a validation finish.
        patience=Patience(None if outer is None else outer.patience.timeout_s),
    )


def limited(steps: int | None) -> int | None:
    """The steps of an epoch, as `keras.config.set_max_steps_per_epoch` limits them in Keras' loop."""
    limit = keras.config.max_steps_per_epoch()
    return min(steps or limit, limit) if limit else steps


def logs_of_its_own(model: keras.Model) -> bool:
    """Whether the logs of a batch may have other names than the metrics: Keras then keeps the logs."""
    names = ("compute_metrics", "get_metrics_result")
    return any(overrides(model, name, keras.Model) for name in names)


def _listens(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback does something before or after a batch."""
    names = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    return any(overrides(callback, name, keras.callbacks.Callback) for name in names)
