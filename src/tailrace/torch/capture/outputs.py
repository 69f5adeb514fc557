"""What forward returns, whatever its class: the tensors in it, and the same with others.

Containers are taken apart as those of arguments are. An object of any other class (a cache of keys and
values) is looked into by its attributes, and copied with its tensors replaced.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

from tailrace.errors import ProgramError
from tailrace.torch.calls.containers import (
    attributes_of,
    fields_beside,
    flatten,
    held_elsewhere,
    is_custom,
    is_dataclass,
    rebuild,
)

_LEFT_ALONE = (str, bytes, int, float, complex, type, FunctionType, ModuleType, torch.dtype)


def tensors_in(value: object) -> list[tuple[str, torch.Tensor]]:
    """(path, tensor) of each tensor in a structure, in the attributes of its objects too."""
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()
    for path, leaf in _leaves(value, "", seen):
        found.append((path, leaf))
    return found


def _leaves(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if value is None or isinstance(value, (_LEFT_ALONE, torch.nn.Module)):
        return
    if id(value) in seen:  # objects refer to each other in circles
        return
    seen.add(id(value))
    for name, part in _parts(value):
        yield from _leaves(part, f"{path}.{name}" if path else name, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if is_custom(value):
        yield from flatten(value)
    elif isinstance(value, dict):
        yield from ((str(key), part) for key, part in value.items())
        yield from fields_beside(value).items()
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        yield from ((str(name), part) for name, part in zip(names, value, strict=True))
    elif is_dataclass(value):
        yield from fields_beside(value).items()
    else:
        yield from sorted(attributes_of(value).items())


@dataclasses.dataclass
class Template:
    """What forward returns, to be made again with other tensors.

    Args:
        value: what it returned.
        tensors: the tensors in it that are exchanged.
    """

    value: Any
    tensors: list[torch.Tensor]

    def __post_init__(self) -> None:
        exchanged = {id(tensor) for tensor in self.tensors}
        self._plain = held_elsewhere(self.value, lambda leaf: id(leaf) in exchanged) is None
        self._shared = {} if self._plain else {id(one): one for one in _kept(self.value, set())}
        try:
            self.filled(lambda tensor: tensor)
        except Exception as error:
            raise ProgramError(
                f"Each call returns a copy of what forward returns, with its tensors in it. A "
                f"{type(self.value).__name__} cannot be copied: {error}. Return the tensors themselves."
            ) from error

    def filled(self, tensor: Callable[[torch.Tensor], Any]) -> Any:
        """The same, with other tensors."""
        others = {id(one): tensor(one) for one in self.tensors}
        if self._plain:
            return rebuild(self.value, lambda leaf: others.get(id(leaf), leaf))
        # A copy that takes each tensor to be copied already, as another one.
        return copy.deepcopy(self.value, {**self._shared, **others})


def _kept(value: Any, seen: set[int]) -> Iterator[Any]:
    """Objects without tensors, such as configurations: all copies share them."""
    if value is None or isinstance(value, _LEFT_ALONE) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, torch.nn.Module) or not tensors_in(value):
        yield value
        return
    for _, part in _parts(value):
        yield from _kept(part, seen)
