"""Callbacks: what runs on the host while training goes on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tailrace.records.history import History
    from tailrace.training.trainer import Trainer


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

    In `on_step_end` and `on_execution_end`, `trainer.params` and `trainer.step` are those at the end
    of the execution that the values come from. `trainer.stop()` in a callback ends the fit after it.
    """

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Before the first execution."""

    def on_execution_end(self, trainer: Trainer, execution: Execution) -> None:
        """Once for each execution."""

    def on_step_end(self, trainer: Trainer, step: int, values: dict[str, float]) -> None:
        """Once for each step, in order, before `on_execution_end`."""

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """After the last execution, also when an exception ended the fit."""


def listens(callback: Callback) -> bool:
    """Whether a callback wants to be called while training goes on."""
    kind = type(callback)
    names = ("on_step_end", "on_execution_end")
    return any(getattr(kind, name, None) is not getattr(Callback, name) for name in names)


def tell(callbacks: list[Callback], trainer: Trainer, execution: Execution) -> None:
    """Tell all callbacks about an execution, step by step where they ask for that."""
    for callback in callbacks:
        if type(callback).on_step_end is not Callback.on_step_end:
            for number in range(execution.steps):
                values = {name: float(v[number]) for name, v in execution.values.items()}
                callback.on_step_end(trainer, execution.first_step + number, values)
        callback.on_execution_end(trainer, execution)
