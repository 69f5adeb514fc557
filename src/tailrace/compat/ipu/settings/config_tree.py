"""A tree of typed options: `config.io_tiles.num_io_tiles = 8`, checked when it is set."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Iterator
from typing import Any

from tailrace.compat.ipu.errors import IPUTypeError, IPUValueError
from tailrace.errors import TailraceError


class CategoryError(TailraceError, Exception):
    """A category of options was assigned to, as if it were an option."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option: what it may be, what it is at first, and what it does here.

    Attributes:
        types: the classes that a value may have.
        default: its value at first.
        doc: what it means.
        only_there: whether it made sense on the original chip only, and is noted here.
        deprecated: whether another option replaces it.
    """

    types: tuple[type, ...]
    default: Any
    doc: str
    only_there: bool = True
    deprecated: bool = False

    def accepts(self, value: object) -> bool:
        """Whether `value` has one of the types; a bool is not an int here."""
        if isinstance(value, bool):
            return bool in self.types
        return isinstance(value, self.types)

    @property
    def type_name(self) -> str:
        """The types, as messages show them."""
        names = [kind.__name__ for kind in self.types]
        return names[0] if len(names) == 1 else f"one of ({', '.join(names)})"


class Category:
    """Options and further categories under one name."""

    def __init__(self, declared: dict[str, Any], name: str = "") -> None:
        # Around our own __setattr__, which takes every name for that of an option.
        object.__setattr__(self, "_declared", declared)
        object.__setattr__(self, "_name", name)
        # Defaults are copied: a list that one configuration changes must not be another's.
        children = {
            key: Category(value, f"{name}{key}.") if isinstance(value, dict) else _copied(value)
            for key, value in declared.items()
        }
        object.__setattr__(self, "_children", children)

    def __getattr__(self, key: str) -> Any:
        # `copy`, `pickle` and notebooks look for such methods, and expect an AttributeError.
        if key.startswith("__"):
            raise AttributeError(key)
        children = self._children
        if key not in children:
            raise IPUValueError(self._unknown(key))
        return children[key]

    def __setattr__(self, key: str, value: object) -> None:
        if key not in self._declared:
            raise IPUValueError(self._unknown(key))
        full, option = self._name + key, self._declared[key]
        if not isinstance(option, Option):
            raise CategoryError(f"{full} is a category and cannot be assigned to.")
        if not option.accepts(value):
            raise IPUTypeError(
                f"Trying to set {full} to {value!r}, but it must be of type {option.type_name}."
            )
        self._children[key] = value

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._declared]

    def __repr__(self) -> str:
        return "\n".join(f"{name} = {value!r}" for name, _, value in self.options())

    def options(self) -> Iterator[tuple[str, Option, Any]]:
        """(full name, option, value) of every option in it."""
        for key, declared in self._declared.items():
            value = self._children[key]
            if isinstance(value, Category):
                yield from value.options()
            else:
                yield self._name + key, declared, value

    def _unknown(self, key: str) -> str:
        near = difflib.get_close_matches(key, self._declared, n=1, cutoff=0.5)
        hint = f" Did you mean '{self._name}{near[0]}'?" if near else ""
        return f"'{self._name}{key}' is not a valid option of the configuration.{hint}"


def _copied(option: Option) -> Any:
    return option.default.copy() if isinstance(option.default, list | dict) else option.default


def plain(value: object) -> Any:
    """A value as JSON can hold it: enums become integers."""
    return value.value if isinstance(value, enum.Enum) else value


def restored(option: Option, value: object) -> Any:
    """The value of an option, from what `plain` made of it."""
    if isinstance(value, list) and list not in option.types and tuple in option.types:
        return tuple(value)
    for kind in option.types:
        # Not a bool: `True` is a value of its own for `floating_point_behaviour.esr`, not member 1.
        if issubclass(kind, enum.Enum) and not isinstance(value, bool | enum.Enum):
            return kind(value)
    return value
