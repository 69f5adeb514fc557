"""The interface of callbacks, and how they are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.spans.span import span

if TYPE_CHECKING:
    from tailrace.records.history import History
    from tailrace.trainer.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Execution:
    """One dispatch that has ended.

    Attributes:
        first_step: the number of its first step.
        steps: how many steps it ran.
        values: the loss and the scalar metrics, one value a step.
    """

    first_step: int
    steps: int
    values: dict[str, np.ndarray]


class Callback:
    """Override what you need; each method does nothing by default.

    In each method, `trainer.params` and `trainer.step` are those at the end of the execution that the
    values come from. `trainer.stop()` in a callback ends the fit there.

    Example:
        >>> import tailrace as tr
        >>> class Printer(tr.Callback):
        ...     def on_epoch_end(self, trainer, epoch, logs):
        ...         print(f"epoch {epoch}: loss {logs['loss']:.3f} after {trainer.step} steps")
    """

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Before the first execution."""

    def on_execution_end(self, trainer: Trainer, execution: Execution) -> None:
        """Once for each execution."""

    def on_step_end(self, trainer: Trainer, step: int, values: dict[str, float]) -> None:
        """Once for each step, in order, before `on_execution_end`."""

    def on_validation_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        """After each validation; `logs` has its values as `val_<name>`."""

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: dict[str, float]) -> None:
        """After each epoch (a fit by steps is one), numbered over all fits of the trainer.

        `logs` has the means of loss and metrics over the steps of the epoch, and the values of the
        latest validation as `val_<name>`.
        """

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """After the last execution, also when an exception ended the fit."""

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: numbers, strings, lists, and arrays by name."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_state` returned; called when a fit is taken up again."""


def listens(callback: Callback) -> bool:
    """Whether a callback wants to be called for executions or steps."""
    return _overrides(callback, "on_step_end") or _overrides(callback, "on_execution_end")


def tell(callbacks: Sequence[Callback], trainer: Trainer, execution: Execution) -> None:
    """Tell all callbacks about an execution, step by step where they ask for that."""
    for callback in callbacks:
        with calling(callback):
            if _overrides(callback, "on_step_end"):
                for number in range(execution.steps):
                    values = {name: float(v[number]) for name, v in execution.values.items()}
                    callback.on_step_end(trainer, execution.first_step + number, values)
            callback.on_execution_end(trainer, execution)


def calling(callback: Callback) -> Any:
    """While a callback runs: a span in open traces."""
    return span("callback", callback=type(callback).__name__)


def _overrides(callback: Callback, name: str) -> bool:
    return getattr(type(callback), name, None) is not getattr(Callback, name)
