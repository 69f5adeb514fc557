"""Training models that share tensors, such as the two of a GAN.

Each has a separate copy on the device and trains it. Before one of them runs, updates by the others
are copied through the host's tensors, so that at most one is ahead of the host at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

# Weak: a model that the user drops must not be kept alive by those that shared with it.
_living: weakref.WeakSet[Any] = weakref.WeakSet()
_changes = [0]
"""The number of times a model has joined or left, after which cached relations are recomputed."""


def living_models() -> list[Any]:
    """The training models that are wrapped around a module."""
    return list(_living)


class Sharing:
    """The tensors of one training model, and the other models that share some of them.

    Attributes:
        tensors: parameters and buffers by name, at the time the model joined.
    """

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)
        self.tensors: dict[str, torch.Tensor] = {}
        self._others: list[tuple[Any, frozenset[str]]] = []
        self._known, self._seen = -1, weakref.WeakKeyDictionary[Any, int]()

    def join(self, module: torch.nn.Module) -> None:
        """Start sharing the module's tensors."""
        self.tensors = dict((*module.named_parameters(), *module.named_buffers()))
        _living.add(self._owner())
        _changes[0] += 1

    def leave(self) -> None:
        """Stop sharing."""
        _living.discard(self._owner())
        self._others = []
        _changes[0] += 1

    @property
    def others(self) -> list[tuple[Any, frozenset[str]]]:
        """The models that share some tensors, with the names of those here."""
        if self._known != _changes[0]:
            self._known = _changes[0]
            own = self._owner()
            found = []
            # Computed when asked for, and again only after a change: every call asks.
            for other in _living if own in _living else ():
                theirs = {id(tensor) for tensor in other._sharing.tensors.values()}
                names = frozenset(n for n, t in self.tensors.items() if id(t) in theirs)
                if names and other is not own:
                    found.append((other, names))
            self._others = found
        return self._others

    def newer(self) -> Iterator[tuple[Any, frozenset[str]]]:
        """Those of them that have changed their weights since the last call."""
        # By version, not by comparing values: those are on the device.
        for other, names in self.others:
            version = other.version
            if self._seen.get(other, 0) != version:
                self._seen[other] = version
                yield other, names
