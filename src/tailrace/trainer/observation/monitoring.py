"""Watching a logged value: which one, and what counts as better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tailrace.base.checks import check_number
from tailrace.base.messages import note_once
from tailrace.errors import OptionError

MODES = {"loss": "min", "accuracy": "max"}
"""What is better of the two values whose names decide it."""

VALIDATION = "val_"
"""The beginning of the names of values of validations."""


class Monitor:
    """The best of a logged value so far.

    Args:
        name: the name of the value.
        mode: "min", "max" or "auto", which decides by the name: "loss" and "accuracy", after `val_` or
            a scope. Any other name needs a mode.
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
        self.name, self._own_mode = name, _mode_of(name) if mode == "auto" else mode
        self.mode = self._own_mode
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
        sign = 1 if self.mode == "max" else -1
        better = self.best is None or sign * (value - self.best) > self._delta
        if better:
            self.best = value
        return better

    def begin(self) -> None:
        """Start over, for a fit that starts."""
        self.mode, self.best = self._own_mode, None

    def recorded(self) -> dict[str, Any]:
        """What a checkpoint keeps: the value's name, what is better, and the best so far."""
        return {"name": self.name, "mode": self.mode, "best": self.best}

    def take_up(self, then: Mapping[str, Any] | None, best: float | None, where: str) -> bool:
        """Continue from a checkpoint: another direction stays as it was, another value begins anew.

        Returns whether it continues.

        Args:
            then: what `recorded` returned; None of a checkpoint that was saved before there was one.
            best: the best so far of that checkpoint.
            where: the option, for messages: "best=".
        """
        if then is None:
            # Which direction it took is not known, except where the name decides.
            goes_on = best is None or MODES.get(_last(self.name)) == self.mode
            self.best = best if goes_on else None
            if not goes_on:
                note_once(
                    f"{where} of {self.name!r}: the checkpoint does not say what is better, so that "
                    f"its best value, {best}, is left out; the best is looked for from here on."
                )
            return goes_on
        if then["name"] != self.name:
            self.best = None
            note_once(
                f"{where} watches {self.name!r} now, and {then['name']!r} in the checkpoint that is "
                f"resumed: the best is looked for from here on."
            )
            return False
        if then["mode"] != self.mode:
            note_once(
                f"{where} of {self.name!r}: the checkpoint that is resumed was saved with "
                f"mode={then['mode']!r}, which stays. Received: mode={self.mode!r}. For another "
                f"direction give another directory."
            )
        self.mode, self.best = then["mode"], then["best"]
        return True


def _last(name: str) -> str:
    """A value's own name, without its scope: "accuracy_head/loss" is a loss.

    >>> _last("val_head/loss"), _last("val_accuracy")
    ('loss', 'accuracy')
    """
    return name.rsplit("/", 1)[-1].removeprefix(VALIDATION)


def _mode_of(name: str) -> str:
    """What is better of a value, by its name alone."""
    mode = MODES.get(_last(name))
    if mode is None:
        raise OptionError(
            f"Whether more or less is better is known of 'loss' and 'accuracy' (after 'val_' or a "
            f"scope); of any other value it must be said. Received: {name!r} without mode=. Give "
            f"mode='min' or mode='max'."
        )
    return mode
