"""Looking up a name of an original, as a program does."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from tailrace.compat.originals.names import Name


def look_up(entry: Name) -> Any:
    """The object with a name; raises what looking it up raises.

    >>> look_up(Name("ipu.loops", "repeat")).__name__
    'repeat'
    """
    parts = entry.full.split(".")
    found: Any = importlib.import_module(f"tailrace.compat.{parts[0]}")
    for part in parts[1:]:
        found = _step(found, part)
    return found


def _step(holder: object, name: str) -> Any:
    if isinstance(holder, type) and not hasattr(holder, name):
        # `options.Training` is set on objects only; the class annotates it.
        kind = inspect.get_annotations(holder).get(name)
        if kind is not None:  # an attribute of its objects, by the name of its class
            return vars(sys.modules[holder.__module__]).get(kind, kind)
        # The class in the list is a base whose objects are of a subclass.
        for kind in holder.__subclasses__():
            return getattr(kind, name)
    return getattr(holder, name)
