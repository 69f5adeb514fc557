"""Options as the original has them: a typed dict with setters, frozen once it is used."""

from __future__ import annotations

import copy
from typing import Any

from tailrace.base.messages import note_once
from tailrace.torch.errors import UsageError


class FrozenOptions(AttributeError):
    """Options that a model or a loader uses can no longer be changed."""


class OptionsDict:
    """Values by name: `o.name`, `o("name")`, `o.name = value`; setters return the object."""

    def __init__(self, **defaults: Any) -> None:
        # `self.x = y` sets an option, so what is no option is stored around it.
        object.__setattr__(self, "_values", dict(defaults))
        object.__setattr__(self, "_frozen", False)

    def __getattr__(self, name: str) -> Any:
        # Not `self._values`: while an object is copied it has none, and asking would lead here
        # again.
        values = self.__dict__.get("_values", {})
        if name.startswith("__") or name not in values:
            raise AttributeError(f"Invalid attribute {name}: options are {sorted(values)}")
        return values[name]

    def __setattr__(self, name: str, value: object) -> None:
        self.set(**{name: value})

    def __call__(self, name: str) -> Any:
        """The value of an option."""
        return getattr(self, name)

    def set(self, **values: Any) -> Any:
        """Set options by name; a value must be of the type of the one before.

        Args:
            **values: the options.

        Raises:
            FrozenOptions: a model or a loader uses the options.
            UsageError: there is no such option, or a value has the wrong type.
        """
        self._check_not_frozen()
        for name, value in values.items():
            if name not in self._values:
                raise UsageError(f"Invalid option {name}: options are {sorted(self._values)}")
            before = self._values[name]
            # The default gives the type; None is for a number that may be left out.
            if before is not None and value is not None and not _same_type(before, value):
                raise UsageError(
                    f"Unexpected type {type(value).__name__} for option {name}: expected "
                    f"{type(before).__name__}"
                )
            self._values[name] = value
        return self

    def freeze(self, frozen: bool = True) -> None:
        """Refuse changes from now on.

        Args:
            frozen: False allows them again.
        """
        object.__setattr__(self, "_frozen", frozen)
        # Groups are attributes, not values, so they are frozen here.
        for value in self.__dict__.values():
            if isinstance(value, OptionsDict):
                value.freeze(frozen)

    def _check_not_frozen(self) -> None:
        if self._frozen:
            raise FrozenOptions("Can't modify frozen Options")

    def clone(self) -> Any:
        """A copy that can be changed."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Not by `__init__`, which reads defaults from the environment.
        made = object.__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            object.__setattr__(made, name, copy.deepcopy(value, memo))
        made.freeze(False)  # a copy is made to be changed
        return made

    def __repr__(self) -> str:
        inner = [f"{name}={value!r}" for name, value in sorted(self._values.items())]
        inner += [
            f"{name}={value!r}"
            for name, value in sorted(self.__dict__.items())
            if isinstance(value, OptionsDict)
        ]
        return f"{type(self).__name__.lstrip('_')}({', '.join(inner)})"


def noted(name: str) -> None:
    """Note once that an option for the IPU has no effect."""
    note_once(f"{name} is about a chip that is not here; it is accepted and has no effect.")


def _same_type(before: object, value: object) -> bool:
    # A bool is an int for Python, and a mistake where a number is expected.
    if isinstance(before, bool) or isinstance(value, bool):
        return isinstance(before, bool) and isinstance(value, bool)
    if isinstance(before, float):
        return isinstance(value, int | float)
    return isinstance(value, type(before))
