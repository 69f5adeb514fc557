"""The random numbers that Keras' data adapters draw: NumPy's, Python's, PyTorch's if it is loaded."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def random_state() -> dict[str, Any]:
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
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states of the generators."""
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(words, np.uint32), *rest))
    version, python, following = state["python"]
    random.setstate((version, tuple(python), following))
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        kept = np.frombuffer(bytes.fromhex(state["torch"]), np.uint8).copy()
        torch.set_rng_state(torch.from_numpy(kept))
