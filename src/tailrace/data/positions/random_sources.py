"""The random numbers that data draws: NumPy's, Python's, PyTorch's if it is loaded, and its own.

Most data draws from the global generators. A seeded PyTorch loader has a `torch.Generator`, and many a
PyDataset or sampler a generator of NumPy: in an attribute, where they are found.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

OWN = "own"
"""The entry of a state that has the states of the data's own generators."""

_PARTS = ("sampler", "batch_sampler", "dataset")


def generators_in(data: object) -> list[Any]:
    """The generators that data keeps in its attributes, in their order; a loader's parts included.

    >>> class Sampler:
    ...     def __init__(self):
    ...         self.rng, self.rows = np.random.default_rng(3), 8
    >>> len(generators_in(Sampler()))
    1
    """
    found: list[Any] = []
    seen: set[int] = set()
    holders = [data]
    for holder in holders:  # grows: a batch sampler of PyTorch has a sampler
        values = getattr(holder, "__dict__", {})
        for value in values.values():
            # By identity: a loader and its sampler share theirs.
            if is_generator(value) and id(value) not in seen:
                seen.add(id(value))
                found.append(value)
        holders += [
            values[name]
            for name in (*_PARTS, "_inner")
            if name in values and not any(values[name] is one for one in holders)
        ]
    return found


def random_state(own: Sequence[Any] = ()) -> dict[str, Any]:
    """The states of the generators, for JSON.

    >>> before = random_state()
    >>> drawn = np.random.permutation(5)
    >>> set_random_state(before)
    >>> bool((np.random.permutation(5) == drawn).all())
    True
    """
    kind, words, *rest = np.random.get_state(legacy=True)
    version, python, following = random.getstate()
    found: dict[str, Any] = {
        "numpy": [kind, np.asarray(words).tolist(), *rest],
        "python": [version, list(python), following],
    }
    # Not imported: a PyTorch loader can only be in use if it is loaded.
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = bytes(torch.get_rng_state().numpy()).hex()
    if own:
        found[OWN] = [state_of(generator) for generator in own]
    return found


def set_random_state(state: Mapping[str, Any], own: Sequence[Any] = ()) -> None:
    """Restore the states of the generators; those that `state` has none of stay as they are."""
    if "numpy" in state:
        kind, words, *rest = state["numpy"]
        np.random.set_state((kind, np.asarray(words, np.uint32), *rest))
    if "python" in state:
        version, python, following = state["python"]
        random.setstate((version, tuple(python), following))
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(_tensor(torch, state["torch"]))
    # There are others if the data makes them late, and this is not its first fit.
    if len(state.get(OWN, ())) == len(own):
        for generator, one in zip(own, state.get(OWN, ()), strict=True):
            if one is not None:
                put_state(generator, one)


def drawn_from(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The states before, of the generators that were drawn from.

    >>> drawn_from({"numpy": 1, "python": 2}, {"numpy": 1, "python": 3})
    {'python': 2}
    """
    return {name: state for name, state in before.items() if after.get(name) != state}


def not_drawn_from(
    before: Mapping[str, Any], now: Mapping[str, Any], instead: Mapping[str, Any]
) -> dict[str, Any]:
    """Other states, `instead`, for the generators that are as they were before.

    >>> then, now = {"numpy": 1, "own": [1, 2]}, {"numpy": 2, "own": [1, 3]}
    >>> not_drawn_from(then, now, {"numpy": 8, "own": [8, 8]})
    {'own': [8, None]}
    """
    found = {
        name: state
        for name, state in instead.items()
        if name != OWN and name in before and before[name] == now.get(name)
    }
    if OWN in instead and len(instead[OWN]) == len(before.get(OWN, ())):
        pairs = zip(before[OWN], now[OWN], instead[OWN], strict=True)
        found[OWN] = [state if then == one else None for then, one, state in pairs]
    return found


def is_generator(value: object) -> bool:
    """Whether a value is a generator of random numbers."""
    if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Generator)


def state_of(generator: Any) -> Any:
    """The state of a generator, for JSON."""
    if isinstance(generator, np.random.Generator):
        return _listed(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _listed(generator.get_state(legacy=False))
    if isinstance(generator, random.Random):
        version, words, following = generator.getstate()
        return [version, list(words), following]
    return bytes(generator.get_state().numpy()).hex()


def put_state(generator: Any, state: Any) -> None:
    """Set the state of a generator."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, following = state
        generator.setstate((version, tuple(words), following))
    else:
        generator.set_state(_tensor(sys.modules["torch"], state))


def _tensor(torch: Any, text: str) -> Any:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), np.uint8).copy())


def _listed(state: Any) -> Any:
    """A state of NumPy's for JSON: its arrays as lists, which NumPy takes as well."""
    if isinstance(state, dict):
        return {name: _listed(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state
