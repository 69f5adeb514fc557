"""Validation during a fit: when, on what, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tailrace.errors import OptionError


class Validation:
    """Evaluates now and then while a fit runs.

    Args:
        data: what to evaluate on, whole; None for no validation.
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
        """The period in steps; None where epochs count, or there is nothing to do."""
        self.at_epochs = data is not None and every == "epoch"
        self.latest: dict[str, float] = {}
        """The values of the latest one, as `val_<name>`."""

    def until_next(self, done: int) -> int | None:
        """How many steps may run after `done` of them before the next validation; None: any."""
        return None if self.steps is None else self.steps - done % self.steps

    def run(self) -> dict[str, float]:
        """Evaluate now; returns the scalars by their own names."""
        values = self._evaluate(self._data)
        scalars = {name: float(v) for name, v in values.items() if np.ndim(v) == 0}
        self.latest = {f"val_{name}": value for name, value in scalars.items()}
        return scalars
