"""Validation during a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tailrace.errors import OptionError


class Validation:
    """Evaluates periodically during a fit.

    Args:
        data: the validation data, all of which is used; None for no validation.
        every: "epoch", or a number of steps.
        evaluate: returns values by name.
    """

    def __init__(
        self, data: Any, every: str | int, evaluate: Callable[[Any], dict[str, Any]]
    ) -> None:
        number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if every != "epoch" and not number:
            raise OptionError(
                f"validation_every is 'epoch' or a number of steps of at least 1. Received: {every!r}."
            )
        self._data, self._evaluate = data, evaluate
        self.steps = every if isinstance(every, int) and data is not None else None
        """The period in steps; None if it is an epoch, or there is no validation."""
        self.at_epochs = data is not None and every == "epoch"
        self.latest: dict[str, float] = {}
        """The values of the latest validation, as `val_<name>`."""

    def until_next(self, done: int) -> int | None:
        """The number of steps until the next validation, after `done` of them; None for no limit."""
        return None if self.steps is None else self.steps - done % self.steps

    def run(self) -> dict[str, float]:
        """Evaluate; returns the scalars by name, without prefix."""
        values = self._evaluate(self._data)
        scalars = {name: float(v) for name, v in values.items() if np.ndim(v) == 0}
        self.latest = {f"val_{name}": value for name, value in scalars.items()}
        return scalars
