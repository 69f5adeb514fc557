"""The interface of callbacks, and their calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tailrace.records.history import History
from tailrace.spans.span import span

AnyTrainer = Any
"""The `tr.Trainer` that calls. Its file is above this one, so its class has no name here; a protocol in
its place would make type checkers refuse callbacks whose methods say `trainer: tr.Trainer`.
"""


@dataclasses.dataclass(frozen=True)
class Execution:
    """One dispatch that has ended.

    Attributes:
        first_step: the index of its first step.
        steps: the number of its steps.
        values: the loss and the scalar metrics, one value per step.
    """

    first_step: int
    steps: int
    values: dict[str, np.ndarray]


class Callback:
    """Override what you need; each method does nothing by default.

    In each method, `trainer.params` and `trainer.step` are those at the end of the execution that the
    values come from. `trainer.stop()` in a callback ends the fit there. An exception that a method
    raises ends the fit too, and `fit` raises it.

    Example:
        >>> import tailrace as tr
        >>> class Printer(tr.Callback):
        ...     def on_epoch_end(self, trainer, epoch, logs):
        ...         print(f"epoch {epoch}: loss {logs['loss']:.3f} after {trainer.step} steps")
    """

    def on_fit_begin(self, trainer: AnyTrainer) -> None:
        """Before the first execution."""

    def on_execution_end(self, trainer: AnyTrainer, execution: Execution) -> None:
        """Once for each execution."""

    def on_step_end(self, trainer: AnyTrainer, step: int, values: dict[str, float]) -> None:
        """Once for each step, in order, before `on_execution_end`."""

    def on_validation_end(self, trainer: AnyTrainer, logs: dict[str, float]) -> None:
        """After each validation; `logs` has its values as `val_<name>`."""

    def on_epoch_end(self, trainer: AnyTrainer, epoch: int, logs: dict[str, float]) -> None:
        """After each epoch (a fit by steps is one), numbered over all fits of the trainer.

        `logs` has the means of loss and metrics over the steps of the epoch, and the values of the
        latest validation as `val_<name>`.
        """

    def on_fit_end(self, trainer: AnyTrainer, history: History) -> None:
        """After the last execution, also when an exception ended the fit."""

    def get_state(self) -> dict[str, Any]:
        """The state to keep in a checkpoint: numbers, strings, lists, and arrays by name."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `get_state`; called when a fit is resumed, or has finished before."""


def listens(callback: Callback) -> bool:
    """Whether a callback overrides a method for executions or steps."""
    return _overrides(callback, "on_step_end") or _overrides(callback, "on_execution_end")


def notify(callbacks: Sequence[Callback], trainer: AnyTrainer, execution: Execution) -> None:
    """Call all callbacks for an execution, and for each step if they override that method."""
    for callback in callbacks:
        with calling(callback):
            # A million steps would be a million calls of an empty method.
            if _overrides(callback, "on_step_end"):
                for number in range(execution.steps):
                    values = {name: float(v[number]) for name, v in execution.values.items()}
                    callback.on_step_end(trainer, execution.first_step + number, values)
            callback.on_execution_end(trainer, execution)


def calling(callback: Callback) -> Any:
    """A span in open traces around a callback."""
    return span("callback", callback=type(callback).__name__)


def _overrides(callback: Callback, name: str) -> bool:
    # On the class: comparing bound methods of an instance would always find a difference.
    return getattr(type(callback), name, None) is not getattr(Callback, name)
