"""An optimizer in words. Those of optax are functions, whose numbers are in their closures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

MOST = 40
"""Parts that are named; a deeper nest of functions is cut off."""


def optimizer_text(optimizer: object) -> str:
    """What an optimizer does, part by part, with its numbers.

    >>> import optax
    >>> optimizer_text(optax.sgd(0.1, momentum=0.9))
    'trace(decay=0.9, nesterov=False), scale(step_size=-0.1)'
    >>> optimizer_text(optax.sgd(optax.exponential_decay(0.1, 100, 0.5)))[:60]
    'scale_by_schedule(step_size_fn=exponential_decay(decay_rate='
    >>> optimizer_text(optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9))
    'sgd(learning_rate=0.1, momentum=0.9, nesterov=False)'
    """
    # Only for people, and for a note about another optimizer: nothing is decided by this text.
    update = getattr(optimizer, "update", None)
    if not callable(update) or not hasattr(update, "__code__"):
        return getattr(optimizer, "in_words", type(optimizer).__name__)
    if (injected := _injected(getattr(optimizer, "init", None), update)) is not None:
        return injected
    return ", ".join(_parts(update, [])[:MOST]) or "nothing"


def _injected(init: object, update: object) -> str | None:
    """An `optax.inject_hyperparams`, as the optimizer that it calls; None for any other."""
    closed = {**_closed(init), **_closed(update)}
    factory = closed.get("inner_factory")
    if factory is None:
        return None
    groups = [closed.get(f"{kind}_hps", {}) for kind in ("numeric", "sched", "other")]
    # A schedule is wrapped in an object that counts its calls.
    numbers = {
        name: getattr(value, "schedule_fn", value)
        for group in groups
        for name, value in group.items()
    }
    return _call(getattr(factory, "__name__", "inject_hyperparams"), numbers)


def _parts(function: Callable[..., Any], seen: list[int]) -> list[str]:
    """The transformations that an update is made of."""
    # A user's transformation may refer to itself, or nest without end.
    if id(function) in seen or len(seen) > MOST:
        return []
    seen.append(id(function))
    closed = _closed(function)
    inside = [f for value in closed.values() for f in _updates(value)]
    found = [text for inner in inside for text in _parts(inner, seen)]
    name = _name(function)
    return [*([_call(name, closed)] if _numbers(closed) else []), *found]


def _updates(value: object) -> list[Callable[..., Any]]:
    """The update functions among what a function holds."""
    update = getattr(value, "update", None)
    if callable(update) and hasattr(update, "__code__"):
        return [update]
    if isinstance(value, tuple | list | dict):
        items = value.values() if isinstance(value, dict) else value
        return [f for item in items for f in _updates(item)]
    named = _qualname(value).endswith((".update_fn", ".update"))
    return [value] if named and callable(value) else []


def _closed(function: object) -> dict[str, Any]:
    """What a function holds, by name."""
    if isinstance(function, functools.partial):
        return {**_closed(function.func), **function.keywords}
    if (owner := getattr(function, "__self__", None)) is not None:
        return dict(vars(owner))
    if not isinstance(function, FunctionType):
        return {}
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return found


def _numbers(closed: dict[str, Any]) -> dict[str, str]:
    """Numbers, and functions of the step, as text."""
    found = {}
    for name, value in closed.items():
        if isinstance(value, bool | int | float | str | np.generic):
            found[name] = str(value)
        elif getattr(value, "shape", None) == () and hasattr(value, "dtype"):
            found[name] = f"{float(value):g}"
        elif isinstance(value, dict):
            found.update(_numbers(value))
        elif isinstance(value, tuple | list) and not _updates(value):
            parts = _numbers({str(number): item for number, item in enumerate(value)})
            found.update({name: f"[{', '.join(parts.values())}]"} if parts else {})
        elif hasattr(value, "__code__") and not _updates(value) and (text := _function(value)):
            found[name] = text
    return found


def _function(value: object) -> str:
    """A function of the step with its numbers; one that only wraps another is that one."""
    closed = _closed(value)
    numbers = _numbers(closed)
    if "<lambda>" in _qualname(value):
        inner = [text for text in numbers.values() if "(" in text]
        return inner[0] if inner else ""
    return _call(_name(value), closed) if numbers else ""


def _call(name: str, closed: dict[str, Any]) -> str:
    inside = ", ".join(f"{key}={value}" for key, value in _numbers(closed).items())
    return f"{name}({inside})"


def _name(function: object) -> str:
    return _qualname(function).split(".")[0] or type(function).__name__


def _qualname(function: object) -> str:
    return getattr(function, "__qualname__", "")
