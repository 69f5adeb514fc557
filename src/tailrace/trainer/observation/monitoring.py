"""Watching a logged value: which one, and what counts as better."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tailrace.errors import OptionError

LARGER_IS_BETTER = ("acc", "auc", "f1", "precision", "recall", "score", "iou", "bleu", "rouge")
"""Parts of names of values of which more is better."""

VALIDATION = "val_"
"""The beginning of the names of values of validations."""


def check_best(best: str | None, has_validation: bool) -> None:
    """Refuse `tr.Checkpoint(best=...)` of a value that the fit will not have."""
    if best is not None and best.startswith(VALIDATION) and not has_validation:
        raise OptionError(
            f"There will be no value {best!r} to watch: values of validations begin with 'val_' and "
            f"need fit(validation_data=...). Received: tr.Checkpoint(best={best!r}) without "
            f"validation_data. Give fit(validation_data=...), or a value of training: best='loss'."
        )


class Monitor:
    """The best of a logged value so far.

    Args:
        name: of the value.
        mode: "min", "max" or "auto", which goes by the name.
        min_delta: by how much a value must be better to count.

    >>> accuracy = Monitor("val_accuracy")
    >>> accuracy.improves({"val_accuracy": 0.5}), accuracy.improves({"val_accuracy": 0.4})
    (True, False)
    """

    def __init__(self, name: str, mode: str = "auto", min_delta: float = 0.0) -> None:
        if not isinstance(name, str) or not name:
            raise OptionError(f"monitor is the name of a logged value. Received: {name!r}.")
        if mode not in ("auto", "min", "max"):
            raise OptionError(f"mode is 'auto', 'min' or 'max'. Received: {mode!r}.")
        last = name.rsplit("/", 1)[-1].lower()
        larger = mode == "max" or (
            mode == "auto" and any(part in last for part in LARGER_IS_BETTER)
        )
        self.name, self._sign, self._delta = name, -1 if larger else 1, abs(min_delta)
        self.best: float | None = None

    @property
    def is_of_validation(self) -> bool:
        """Whether the value is one of validations."""
        return self.name.startswith(VALIDATION)

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
        if math.isnan(value):
            return False
        better = self.best is None or self._sign * (self.best - value) > self._delta
        if better:
            self.best = value
        return better
