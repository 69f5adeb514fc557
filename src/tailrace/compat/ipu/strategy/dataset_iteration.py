"""`iter(dataset)` in the scope of an `IPUStrategy` gives an infeed, as in the original.

The classes of datasets are hooked once, when a scope is first opened; the hook asks which scope is open
in this thread or task. Libraries that iterate there (Keras' `fit`, TensorFlow itself) get what they
always get: the rule is for `iter` written in a program.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from tailrace.compat.arguments import DatasetLike
from tailrace.data.batches import Batches
from tailrace.keras.scopes import Scopes

_LIBRARIES = ("tailrace", "keras", "tensorflow", "torch")
_scopes = Scopes("ipu_dataset_iterators")
_hooked: set[type] = set()


def datasets_are_infeeds(make: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """While it is open, `iter(dataset)` written here is `make(dataset)`."""
    hook_datasets()
    return _scopes.opened(make)


def hook_datasets() -> None:
    """Hook the classes of datasets of the libraries that are loaded now."""
    # Each time a scope opens: a library may have been imported since.
    for kind in _kinds():
        if kind not in _hooked:
            _hooked.add(kind)
            _hook(kind)


def _kinds() -> list[Any]:
    """The classes of datasets, of those libraries that are loaded."""
    kinds: list[Any] = [Batches]
    for module, path in (
        ("tensorflow", ("data", "Dataset")),
        ("torch", ("utils", "data", "DataLoader")),
    ):
        found: Any = sys.modules.get(module)
        for name in path:
            found = getattr(found, name, None)
        if isinstance(found, type):
            kinds.append(found)
    return kinds


def _hook(kind: type[Any]) -> None:
    plain = kind.__iter__

    def iterate(dataset: DatasetLike) -> Any:
        make = _scopes.innermost()
        # The library that iterates is known by the caller's module: Python gives no other sign of it.
        caller = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
        if make is None or caller in _LIBRARIES:
            return plain(dataset)
        return make(dataset)

    kind.__iter__ = iterate
