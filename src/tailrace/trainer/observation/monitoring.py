"""Watching a logged value: which one, and what counts as better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tailrace.data.counts import check_number
from tailrace.errors import OptionError

LARGER_IS_BETTER = ("acc", "auc", "f1", "precision", "recall", "score", "iou", "bleu", "rouge")
"""Parts of names of values of which more is better."""

VALIDATION = "val_"
"""The beginning of the names of values of validations."""


class Monitor:
    """The best of a logged value so far.

    Args:
        name: the name of the value.
        mode: "min", "max" or "auto", which decides by the name.
        min_delta: the smallest change that counts as an improvement.

    >>> accuracy = Monitor("val_accuracy")
    >>> accuracy.improves({"val_accuracy": 0.5}), accuracy.improves({"val_accuracy": 0.4})
    (True, False)
    """

    def __init__(self, name: str, mode: str = "auto", min_delta: float = 0.0) -> None:
        if not isinstance(name, str) or not name:
            raise OptionError(f"monitor is the name of a logged value. Received: {name!r}.")
        if not isinstance(mode, str) or mode not in ("auto", "min", "max"):
            raise OptionError(f"mode is 'auto', 'min' or 'max'. Received: {mode!r}.")
        # A metric's own name, without its scope: "accuracy_head/loss" is a loss.
        last = name.rsplit("/", 1)[-1].lower()
        larger = mode == "max" or (
            mode == "auto" and any(part in last for part in LARGER_IS_BETTER)
        )
        self.name, self._sign = name, -1 if larger else 1
        self._delta = abs(check_number("min_delta", min_delta, at_least=None, error=OptionError))
        self.best: float | None = None

    @property
    def is_of_validation(self) -> bool:
        """Whether the value is one of validations."""
        return self.name.startswith(VALIDATION)

    def check_validates(self, given: str, option: str, has_validation: bool) -> None:
        """Refuse a value of validations in a fit that does not validate.

        Args:
            given: where the value was given, for the message: "tr.Checkpoint".
            option: the name of the argument there.
            has_validation: whether the fit validates.
        """
        if self.is_of_validation and not has_validation:
            raise OptionError(
                f"There will be no value {self.name!r} to watch: values of validations begin with "
                f"'val_' and need fit(validation_data=...). Received: {given}({option}={self.name!r}) "
                f"without validation_data. Give fit(validation_data=...), or a value of training: "
                f"{option}='loss'."
            )

    def check_logged(self, names: Iterable[str]) -> None:
        """Refuse a value of training that is not among those of the first execution."""
        # Values of validations come later, under names that `eval_fn` decides.
        if not self.is_of_validation:
            self.value(dict.fromkeys(names, 0.0))

    def is_due(self, logs: Mapping[str, float]) -> bool:
        """Whether logs have values of its kind, of validations or of training; one may be missing."""
        return any(name.startswith(VALIDATION) == self.is_of_validation for name in logs)

    def value(self, logs: Mapping[str, float]) -> float:
        """The value in logs; says which there are if it is not among them."""
        if self.name not in logs:
            raise OptionError(
                f"There is no value {self.name!r} to watch. Logged are: "
                f"{', '.join(map(repr, logs)) or 'none'}. Values of validations begin with 'val_' "
                f"and need fit(validation_data=...); eval_fn, if given, decides their names."
            )
        return float(logs[self.name])

    def improves(self, logs: Mapping[str, float]) -> bool:
        """Whether the value in logs is the best so far; then it is kept. NaN never is."""
        value = self.value(logs)
        # As the first value, NaN would stay the best: nothing compares as better.
        if math.isnan(value):
            return False
        better = self.best is None or self._sign * (self.best - value) > self._delta
        if better:
            self.best = value
        return better
