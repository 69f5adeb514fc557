"""The random numbers and counters that decide what the next pass over a loader gives.

A loader shuffles with a generator that it keeps, or a global one, or by a counter (`epoch`) that it
or a callback advances. They are found in its attributes, and in those of its parts: a sampler, the
loader that it wraps. A checkpoint has them as they were when the pass began.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any

from tailrace.data.positions.random_sources import (
    is_generator,
    put_state,
    random_state,
    set_random_state,
    state_of,
)

GLOBAL = "global "
"""What the names of global generators begin with."""

MOST_PARTS = 64
"""How many objects of a loader are looked at."""

_LIBRARIES = (
    "jax",
    "tailrace",
    "tensorflow",
    "keras",
    "numpy",
    "grain",
    "threading",
    "multiprocessing",
)

State = dict[str, Any]
"""Values by name, for JSON: states of generators, and numbers."""


def loader_state(origin: object) -> State:
    """The states of generators, and numbers, in the attributes of a loader and its parts.

    Of parts, numbers count if they are called an epoch, or can be set by `set_epoch`.

    >>> class Loader:
    ...     def __init__(self):
    ...         self.epoch, self.name = 3, "train"
    >>> {name: value for name, value in loader_state(Loader()).items() if GLOBAL not in name}
    {'.epoch': 3}
    """
    found: State = {f"{GLOBAL}{name}": state for name, state in random_state().items()}
    for path, part in _parts(origin):
        for name, value in _attributes(part).items():
            if is_generator(value):
                found[f"{path}.{name}"] = state_of(value)
            elif _is_number(value) and _counts_passes(path, part, name):
                found[f"{path}.{name}"] = value
        if (epoch := _epoch_of(part)) is not None:
            found[f"{path}.set_epoch"] = epoch
    return found


def put_loader_state(origin: object, state: Mapping[str, Any]) -> None:
    """Put back what `state` has; everything else stays as it is."""
    ours = {name.removeprefix(GLOBAL): v for name, v in state.items() if name.startswith(GLOBAL)}
    set_random_state(ours)
    for path, part in _parts(origin):
        for name, value in _attributes(part).items():
            full = f"{path}.{name}"
            if full not in state:
                continue
            if is_generator(value):
                put_state(value, state[full])
            elif _is_number(value) and hasattr(part, "__dict__") and not _is_function(part):
                # Past `__setattr__`: a DataLoader refuses to change what it was made with.
                vars(part)[name] = state[full]
        if _epoch_of(part) not in (None, state.get(f"{path}.set_epoch", _epoch_of(part))):
            part.set_epoch(state[f"{path}.set_epoch"])


def generators_of(state: Mapping[str, Any]) -> State:
    """The states of generators alone."""
    return {name: value for name, value in state.items() if not _is_number(value)}


def changed(now: Mapping[str, Any], then: Mapping[str, Any]) -> State:
    """What differs from before.

    >>> changed({"a": 1, "b": 2}, {"a": 1, "b": 3})
    {'b': 2}
    """
    return {name: value for name, value in now.items() if then.get(name) != value}


def _parts(origin: object) -> Iterator[tuple[str, Any]]:
    """A loader, and the objects in its attributes, with their paths."""
    waiting, seen = [("", origin)], {id(origin)}
    for path, part in waiting:  # grows
        yield path, part
        inner = [getattr(part, "__self__", None), *getattr(part, "args", ())]
        inner = inner if _is_function(part) else []
        named = [*_attributes(part).items(), *((f"<{n}>", one) for n, one in enumerate(inner))]
        for name, value in named:
            if id(value) not in seen and len(seen) < MOST_PARTS and _has_parts(value):
                seen.add(id(value))
                waiting.append((f"{path}.{name}", value))


def _has_parts(value: object) -> bool:
    """Whether a value is an object of a program's own, or of a loader's library."""
    # An iterator is a pass under way, which is begun again; a module computes, and orders nothing.
    if isinstance(value, type | types.ModuleType | Iterator) or is_generator(value):
        return False
    if _is_function(value):
        return True
    library = type(value).__module__.partition(".")[0]
    return (
        hasattr(value, "__dict__") and library not in _LIBRARIES and not hasattr(value, "forward")
    )


def _attributes(part: Any) -> dict[str, Any]:
    if isinstance(part, functools.partial):
        return {"func": part.func, **part.keywords}
    if isinstance(part, types.MethodType):
        return {}
    if isinstance(part, types.FunctionType):
        cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=True)
        found = {name: cell.cell_contents for name, cell in cells if _is_set(cell)}
        # Of a script's globals, what it draws from.
        used = {name: part.__globals__.get(name) for name in part.__code__.co_names}
        return {**{name: one for name, one in used.items() if is_generator(one)}, **found}
    own = dict(getattr(part, "__dict__", {}))
    begins = getattr(type(part), "__iter__", None) or getattr(type(part), "__getitem__", None)
    if isinstance(begins, types.FunctionType) and not isinstance(part, type):
        used = {name: begins.__globals__.get(name) for name in begins.__code__.co_names}
        own = {**{name: one for name, one in used.items() if is_generator(one)}, **own}
    return own


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_function(value: object) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType | functools.partial)


def _counts_passes(path: str, part: Any, name: str) -> bool:
    """Whether a number may decide the order of a pass: most numbers in a dataset count other things."""
    if callable(getattr(part, "load_state_dict", None)):  # it restores its own
        return False
    return not path or callable(getattr(part, "set_epoch", None)) or "epoch" in name.lower()


def _is_number(value: object) -> bool:
    return type(value) in (bool, int) or (type(value) is float and math.isfinite(value))


def _epoch_of(part: Any) -> int | None:
    """The epoch of a part that has it elsewhere than in an attribute, as Hugging Face's datasets."""
    if not callable(getattr(part, "set_epoch", None)) or "epoch" in getattr(part, "__dict__", {}):
        return None
    try:
        return int(part.epoch)
    except Exception:  # it has none to read
        return None
