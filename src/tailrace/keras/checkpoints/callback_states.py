"""The state of Keras callbacks: their attributes that are plain values and arrays.

Keras' callbacks have no method that returns their state. It is in their attributes: `wait` and
`best_weights` of EarlyStopping, a list of losses in a user's callback. Those that have changed since
training began are saved; functions, files and models are not. If a callback has `get_state` and
`set_state`, those are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tailrace.errors import CheckpointError

LENGTH = "length of the file"
"""An additional entry of a CSVLogger."""

ARRAY = "stored array"
"""The placeholder of an array in a note; no attribute has such a name."""

# Keras sets these when a fit begins.
_NOT_STATE = ("params", "_params", "model", "_model")


class _NotPlain(Exception):
    """A value that cannot be saved."""


def plain_state(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """The attributes of a callback that can be saved, encoded; arrays are unchanged."""
    own: Any = callback
    if callable(getattr(own, "get_state", None)):
        try:
            return {name: _encoded(value) for name, value in own.get_state().items()}
        except _NotPlain:
            raise CheckpointError(
                f"get_state of a callback returns a dict of numbers, strings, lists, dicts and NumPy "
                f"arrays. Received: something else from {type(callback).__name__}."
            ) from None
    found: dict[str, Any] = {}
    # All attributes, underscored ones too: nothing else tells what is state.
    for name, value in vars(callback).items():
        try:
            if name not in _NOT_STATE:
                found[name] = _encoded(value)
        except _NotPlain:
            continue
    # Its file is state as well: rows after the checkpoint come again, and must be cut off.
    if isinstance(callback, keras.callbacks.CSVLogger) and callback.csv_file is not None:
        if not callback.csv_file.closed:
            callback.csv_file.flush()
        found[LENGTH] = os.path.getsize(callback.filename)
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What differs between two states. The length of a file is always included: it may have earlier
    rows.

    >>> changes({"wait": 0, "patience": 3}, {"wait": 1, "patience": 3})
    {'wait': 1}
    """
    return {
        name: value
        for name, value in now.items()
        if name == LENGTH or name not in before or not _same(value, before[name])
    }


def set_plain_state(callback: keras.callbacks.Callback, state: Mapping[str, Any]) -> None:
    """Restore the state of a callback, if it has one."""
    if not state:
        return
    decoded = {name: _decoded(value) for name, value in state.items() if name != LENGTH}
    own: Any = callback
    if callable(getattr(own, "set_state", None)):
        own.set_state(decoded)
    else:
        if "min_delta" in state and getattr(own, "monitor_op", own) is None:
            own._set_monitor_op()  # Keras also flips the sign of min_delta here
        vars(own).update(decoded)


def reopen(callback: keras.callbacks.Callback, state: Mapping[str, Any]) -> Callable[[], None]:
    """Let a CSVLogger append to its file; returns a function to call once training has begun."""
    if LENGTH not in state or not isinstance(callback, keras.callbacks.CSVLogger):
        return lambda: None
    if not Path(callback.filename).exists():
        return lambda: None
    # Rows after the checkpoint will be written again.
    os.truncate(callback.filename, min(state[LENGTH], os.path.getsize(callback.filename)))
    appends, callback.append = callback.append, True
    return lambda: setattr(callback, "append", appends)


def _encoded(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value.copy()
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"number": value.item(), "dtype": str(value.dtype)}
    # Exact types: a named tuple, or a list of a subclass, could not be made again from its entries.
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(one) for one in value]}
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        # As pairs: JSON would turn integer keys into strings.
        return {"dict": [[key, _encoded(one)] for key, one in value.items()]}
    raise _NotPlain


def _decoded(value: object) -> Any:
    if not isinstance(value, dict):
        return value
    if "number" in value:
        return np.dtype(value["dtype"]).type(value["number"])
    if "dict" in value:
        return {key: _decoded(one) for key, one in value["dict"]}
    kind = list if "list" in value else tuple
    return kind(_decoded(one) for one in value[kind.__name__])


def _same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return (
            isinstance(one, np.ndarray)
            and isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and np.array_equal(one, other)
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    # By type as well: 1 == True == 1.0 in Python, and an attribute that changed its type has
    # changed.
    return type(one) is type(other) and one == other


def without_arrays(value: object, arrays: dict[str, np.ndarray], name: str) -> Any:
    """A state for JSON; its arrays go to `arrays`, under names with the prefix `name`."""
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return {ARRAY: name}
    if isinstance(value, list):
        return [without_arrays(one, arrays, f"{name}/{n}") for n, one in enumerate(value)]
    if isinstance(value, dict):
        return {k: without_arrays(one, arrays, f"{name}/{k}") for k, one in value.items()}
    return value


def with_arrays(value: object, arrays: Mapping[str, np.ndarray]) -> Any:
    """The inverse of `without_arrays`."""
    if isinstance(value, list):
        return [with_arrays(one, arrays) for one in value]
    if isinstance(value, dict):
        if ARRAY in value:
            return arrays[value[ARRAY]]
        return {name: with_arrays(one, arrays) for name, one in value.items()}
    return value
