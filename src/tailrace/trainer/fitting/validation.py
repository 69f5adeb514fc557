"""Validation during a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tailrace.base.checks import check_count
from tailrace.base.messages import note_once
from tailrace.data.adapters import as_dataset
from tailrace.errors import DataError, DataExhausted, DataTimeout, OptionError
from tailrace.trainer.fitting.fit_progress import Duration


class Validation:
    """Evaluates periodically during a fit.

    Args:
        data: the validation data, all of which is used; None for no validation.
        every: "epoch", or a number of steps.
        evaluate: returns values by name.
    """

    def __init__(
        self, data: object, every: str | int, evaluate: Callable[[object], dict[str, Any]]
    ) -> None:
        by_epochs = isinstance(every, str) and every == "epoch"
        self.steps = (
            None
            if by_epochs
            else check_count(
                "validation_every",
                every,
                at_least=1,
                error=OptionError,
                more=" (steps), or 'epoch'",
            )
        )
        """The period in steps; None if it is an epoch, or there is no validation."""
        if data is None and not by_epochs:
            raise OptionError(
                f"validation_every says when to validate, and needs fit(validation_data=...). "
                f"Received: validation_every={every!r} without validation_data. Give both, or leave "
                f"validation_every out."
            )
        # Now: the first validation may be hours away.
        if data is not None:
            _check_data(data)
        self._data, self._evaluate = data, evaluate
        self.at_epochs = data is not None and by_epochs
        self.latest: dict[str, float] = {}
        """The values of the latest validation, as `val_<name>`."""

    @property
    def has_data(self) -> bool:
        """Whether there is anything to validate on."""
        return self._data is not None

    def check_readable(self, duration: Duration, total: int | None) -> None:
        """Refuse data that can be read only once, if the fit validates more often.

        Args:
            duration: the requested duration.
            total: the number of steps of the fit; None if it is known only by reading the dataset.
        """
        if not self.has_data or (source := as_dataset(self._data)).restartable:
            return
        # A fit by steps is one epoch.
        times = (duration.epochs or 1) if self.steps is None else (total or 0) // self.steps
        if times > 1:
            raise DataError(
                f"fit({duration}) reads validation_data {times} times, but {source.name} can be read "
                f"only once. Give a list, tr.batches(...), or a function that makes an iterator."
            )

    def until_next(self, done: int) -> int | None:
        """The number of steps until the next validation, after `done` of them; None for no limit."""
        return None if self.steps is None else self.steps - done % self.steps

    def run(self) -> dict[str, float]:
        """Evaluate; returns the scalars by name, without prefix."""
        try:
            values = self._evaluate(self._data)
        except DataExhausted as error:
            raise DataExhausted(f"Each validation reads all of validation_data. {error}") from None
        except DataTimeout as error:
            raise DataTimeout(f"The data that is late is validation_data. {error}") from None
        scalars = {name: float(v) for name, v in values.items() if np.ndim(v) == 0}
        if arrays := [name for name in values if name not in scalars]:
            note_once(
                f"A validation records scalars: {', '.join(map(repr, arrays))} of eval_fn are arrays, "
                f"and not in the history. Reduce them to scalars in eval_fn, or call "
                f"trainer.evaluate, which returns them."
            )
        self.latest = {f"val_{name}": value for name, value in scalars.items()}
        return scalars


def _check_data(data: object) -> None:
    """Refuse data that could not be validated on, before the steps that come first."""
    try:
        source = as_dataset(data)
    except DataError as error:
        raise DataError(f"validation_data is a dataset. {error}") from None
    if source.endless:
        raise DataError(
            f"All elements of validation_data are read each time, but {source.name} repeats without "
            f"end. Give a dataset that does not repeat."
        )
