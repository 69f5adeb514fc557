"""Nested containers of tensors: tuples, lists, dicts, named tuples, dataclasses, and what users
register.

Arguments and results of a model keep their exact types: a subclass of dict is returned as that
subclass, a named tuple as itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Protocol


class CustomContainer(Protocol):
    """How a user's type is flattened and rebuilt."""

    def yield_tensors(self, struct: object) -> Iterator[Any]:
        """The tensors in `struct`, always in the same order."""
        ...

    def reconstruct(self, original: object, tensors: Iterator[Any]) -> Any:
        """A struct like `original` with these tensors in it."""
        ...


_custom: dict[type, CustomContainer] = {}


def register_container(kind: type, parser: CustomContainer | None) -> None:
    """Register how objects of a class are flattened, so that `forward` may take and return them.

    Args:
        kind: the class.
        parser: an object with `yield_tensors(structure)` and `reconstruct(original, tensors)`; None
            removes the registration.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> class Pair:
    ...     def __init__(self, first, second):
    ...         self.first, self.second = first, second
    >>> class PairParser:
    ...     def yield_tensors(self, structure):
    ...         yield from (structure.first, structure.second)
    ...     def reconstruct(self, original_structure, tensor_iterator):
    ...         return Pair(next(tensor_iterator), next(tensor_iterator))
    >>> tt.register_container(Pair, PairParser())
    >>> class Sum(torch.nn.Module):
    ...     def forward(self, pair):
    ...         return pair.first + pair.second
    >>> tt.inference_model(Sum())(Pair(torch.ones(2), torch.ones(2)))
    tensor([2., 2.])
    >>> tt.register_container(Pair, None)
    """
    if parser is None:
        _custom.pop(kind, None)
    else:
        _custom[kind] = parser


def is_custom(value: object) -> bool:
    """Whether the class of a value was registered."""
    # The exact class: a subclass may hold more than its parser knows.
    return type(value) in _custom


def flatten(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of every leaf in nested containers."""
    # Registered classes first: one may be a dict or tuple that its parser takes apart otherwise.
    if type(value) in _custom:
        for number, part in enumerate(_custom[type(value)].yield_tensors(value)):
            yield _joined(path, number), part
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from flatten(part, _joined(path, key))
        for name, part in fields_beside(value).items():
            yield from flatten(part, _joined(path, name))
    elif isinstance(value, tuple | list):
        # Fields of named tuples by name: outputs are found by these paths.
        names = getattr(value, "_fields", range(len(value)))
        for name, part in zip(names, value, strict=True):
            yield from flatten(part, _joined(path, name))
    elif is_dataclass(value):
        for name, part in fields_beside(value).items():
            yield from flatten(part, _joined(path, name))
    else:
        yield path, value


def rebuild(value: object, replace: Callable[[Any], Any]) -> Any:
    """A container like `value`, every leaf replaced by `replace(leaf)`, in the order of `flatten`."""
    if type(value) in _custom:
        parser = _custom[type(value)]
        return parser.reconstruct(value, iter([replace(t) for t in parser.yield_tensors(value)]))
    if isinstance(value, dict):
        parts = {key: rebuild(part, replace) for key, part in value.items()}
        if type(value) is dict:
            return parts
        # A dict that is also a dataclass, as model outputs of `transformers` are.
        beside = {name: rebuild(part, replace) for name, part in fields_beside(value).items()}
        same = copy.copy(value)  # a subclass may have more state
        for key, part in parts.items():
            same[key] = part
        # A class whose items are also attributes, such as a model output.
        shown = {name: parts[name] for name in attributes_of(value) if name in parts}
        return _with_fields(same, {**shown, **beside})
    if isinstance(value, tuple | list):
        # A named tuple takes its items one by one, every other sequence all at once.
        items = [rebuild(part, replace) for part in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value):
        fields = fields_beside(value)
        replaced = {name: rebuild(part, replace) for name, part in fields.items()}
        if all(replaced[name] is part for name, part in fields.items()):
            return value  # such as a configuration
        return _with_fields(copy.copy(value), replaced)
    return replace(value)


def is_dataclass(value: object) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_beside(value: object) -> dict[str, Any]:
    """The set fields of a dataclass, without those that are also items."""
    items = value if isinstance(value, dict) else ()
    names = (name for name in _fields(value) if name not in items and hasattr(value, name))
    return {name: getattr(value, name) for name in names}


def held_elsewhere(value: object, held: Callable[[Any], bool]) -> tuple[str, type] | None:
    """(attribute, class) of something `held` that `flatten` does not visit; None if there is none."""
    if held(value) or type(value) in _custom:
        return None
    parts = list(fields_beside(value).values())
    known = set(_fields(value))
    if isinstance(value, dict):
        parts += value.values()
        known |= {key for key in value if isinstance(key, str)}
    elif isinstance(value, tuple | list):
        parts += value
    for part in parts:
        if found := held_elsewhere(part, held):
            return found
    # What `flatten` visits is known; anything else that holds a tensor would go unnoticed.
    for name, part in attributes_of(value).items():
        if name not in known and _holds(part, held, set(), _DEPTH):
            return name, type(value)
    return None


_DEPTH = 6
"""The depth of the search in objects of unknown classes."""


def _holds(value: object, held: Callable[[Any], bool], seen: set[int], depth: int) -> bool:
    if held(value):
        return True
    # Objects refer to each other in circles, and large ones (a tokenizer) would take long.
    if id(value) in seen or not depth:
        return False
    seen.add(id(value))
    inside = list(attributes_of(value).values())
    inside += value.values() if isinstance(value, dict) else ()
    inside += value if isinstance(value, tuple | list) else ()
    return any(_holds(part, held, seen, depth - 1) for part in inside)


def attributes_of(value: object) -> dict[str, Any]:
    """The attributes of an object of an unknown class; empty for classes and functions."""
    if isinstance(value, set | frozenset | deque):
        return {str(number): part for number, part in enumerate(value)}
    if isinstance(value, type | FunctionType | ModuleType):
        return {}
    found = {}
    # Slots of base classes too: they are in no `__dict__`.
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return {**found, **getattr(value, "__dict__", {})}


def _fields(value: object) -> list[str]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return []
    return [field.name for field in dataclasses.fields(value)]


def _with_fields(value: object, fields: dict[str, Any]) -> Any:
    for name, part in fields.items():
        object.__setattr__(value, name, part)  # works for frozen ones, and runs no __init__
    return value


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
