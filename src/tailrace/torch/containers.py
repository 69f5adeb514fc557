"""Nested containers of tensors: tuples, lists, dicts, named tuples, and what users register.

What a model is called with and what it returns keep their exact types: a subclass of dict comes back
as that subclass, a named tuple as itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class CustomContainer(Protocol):
    """How a type of the user's own is taken apart and put together again."""

    def yield_tensors(self, struct: Any) -> Iterator[Any]:
        """The tensors in `struct`, always in the same order."""
        ...

    def reconstruct(self, original: Any, tensors: Iterator[Any]) -> Any:
        """A struct like `original` with these tensors in it."""
        ...


_custom: dict[type, CustomContainer] = {}


def register_container(kind: type, parser: CustomContainer | None) -> None:
    """Say how objects of a class of your own are taken apart; None forgets it."""
    if parser is None:
        _custom.pop(kind, None)
    else:
        _custom[kind] = parser


def is_custom(value: Any) -> bool:
    """Whether a value is of a class that was registered."""
    return type(value) in _custom


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of everything in nested containers that is not a container itself."""
    if type(value) in _custom:
        for number, part in enumerate(_custom[type(value)].yield_tensors(value)):
            yield _joined(path, number), part
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from flatten(part, _joined(path, key))
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        for name, part in zip(names, value, strict=True):
            yield from flatten(part, _joined(path, name))
    else:
        yield path, value


def rebuild(value: Any, replace: Callable[[Any], Any]) -> Any:
    """A container like `value`, every leaf replaced by `replace(leaf)`, in the order of `flatten`."""
    if type(value) in _custom:
        parser = _custom[type(value)]
        return parser.reconstruct(value, iter([replace(t) for t in parser.yield_tensors(value)]))
    if isinstance(value, dict):
        parts = {key: rebuild(part, replace) for key, part in value.items()}
        if type(value) is dict:
            return parts
        same = copy.copy(value)  # a subclass may have state of its own
        for key, part in parts.items():
            same[key] = part
        return same
    if isinstance(value, tuple | list):
        items = [rebuild(part, replace) for part in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return replace(value)


def _joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
