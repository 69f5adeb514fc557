"""The interface of callbacks, and their calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tailrace.base.spans.span import span
from tailrace.errors import ProgramError
from tailrace.records.history import History

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
    values come from; `on_step_end` can read the state only in the last step of an execution.
    `trainer.stop()` in a callback ends the fit there. An exception that a method raises ends the fit
    too: the other callbacks are called as they would have been, and `fit` raises it.

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
        """Once for each step, in order, before `on_execution_end`.

        The steps of an execution are over when it is called for the first of them, so the trainer has
        the state after the last one: to read it before that is an error. Use `on_execution_end`, or
        `steps_per_execution=1`.
        """

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


@dataclasses.dataclass
class Reported:
    """The execution that callbacks are being called for.

    Attributes:
        first_step: its first step.
        steps: the number of its steps.
        step: the step that `on_step_end` is called for; None outside of it.
    """

    first_step: int
    steps: int
    step: int | None = None

    def check_reads(self) -> None:
        """Refuse to read or set the state in a step that it does not belong to."""
        last = self.first_step + self.steps - 1
        if self.step is not None and self.step < last:
            raise ProgramError(
                f"In on_step_end the state can be read in the last step of an execution: all steps of "
                f"one are over when it is called. Received: step {self.step}, of an execution that "
                f"ended with step {last}. Read it in on_execution_end, or give "
                f"tr.Trainer(steps_per_execution=1)."
            )


def notify(
    callbacks: Sequence[Callback], trainer: AnyTrainer, execution: Execution, reported: Reported
) -> None:
    """Call all callbacks for an execution, and for each step if they override that method."""

    def tell(callback: Callback) -> None:
        # A million steps would be a million calls of an empty method.
        try:
            for number in range(execution.steps if _overrides(callback, "on_step_end") else 0):
                values = {name: float(v[number]) for name, v in execution.values.items()}
                reported.step = execution.first_step + number
                callback.on_step_end(trainer, reported.step, values)
        finally:
            reported.step = None
        callback.on_execution_end(trainer, execution)

    tell_all(callbacks, tell)


def tell_all(callbacks: Sequence[Callback], tell: Callable[[Callback], None]) -> None:
    """Call each callback, also after one that raises; then raise the first exception.

    Otherwise a log would lack what the callback before it has raised at.
    """
    first: BaseException | None = None
    for callback in callbacks:
        name = type(callback).__name__
        try:
            with span("callback", callback=name):
                tell(callback)
        except BaseException as error:
            if first is None:
                first = error
            else:
                first.add_note(f"Then {name} raised {type(error).__name__}: {error}")
    if first is not None:
        raise first


def _overrides(callback: Callback, name: str) -> bool:
    # On the class: comparing bound methods of an instance would always find a difference.
    return getattr(type(callback), name, None) is not getattr(Callback, name)
