"""Numbers and flags that forward keeps in attributes, such as a count of its calls."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))
_MISSING = object()


class Numbers:
    """Those of a module before its forward pass is captured."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._before = [(path, inner, _held(inner)) for path, inner in module.named_modules()]

    def changed(self) -> Changes:
        """What is another number now."""
        found = []
        for path, inner, before in self._before:
            for name, now in _held(inner).items():
                was = before.get(name, _MISSING)
                if type(was) is not type(now) or was != now:
                    found.append((f"{path}.{name}".strip("."), inner, name, was, now))
        return Changes(found)


@dataclasses.dataclass
class Changes:
    """Attributes that forward has changed: (path, module, name, before, after)."""

    found: list[tuple[str, torch.nn.Module, str, Any, Any]]

    def __bool__(self) -> bool:
        return bool(self.found)

    @property
    def names(self) -> list[str]:
        """Their paths."""
        return [path for path, *_ in self.found]

    @contextlib.contextmanager
    def made_again(self) -> Iterator[None]:
        """With the changes in place for as long as this lasts, and as before afterwards."""
        try:
            for _, inner, name, _, now in self.found:
                vars(inner)[name] = now
            yield
        finally:
            for _, inner, name, was, _ in self.found:
                if was is _MISSING:
                    vars(inner).pop(name, None)
                else:
                    vars(inner)[name] = was


def _held(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN}
