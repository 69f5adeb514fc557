"""The states of PyTorch's objects (`state_dict`) as JSON and arrays, without code."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tailrace.errors import CheckpointError

Arrays = dict[str, Any]

SMALL = 64
"""Tensors of at most this many numbers are in the JSON."""

_KINDS: dict[str, Any] = {
    "dict": dict,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
}


def encoded(value: Any, arrays: Arrays, name: str) -> Any:
    """A state for JSON. Tensors go to `arrays`, under names that begin with `name`.

    >>> encoded({"last_lr": [0.1], "milestones": (2, 4)}, {}, "scheduler")
    {'dict': [['last_lr', [0.1]], ['milestones', {'tuple': [2, 4]}]]}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return encoded(value.item(), arrays, name)
    if isinstance(value, torch.Tensor):
        return _tensor(value.detach().cpu(), arrays, name)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        arrays[name] = value.copy()
        return {"array": name}
    if type(value) is list:
        return [encoded(one, arrays, f"{name}/{n}") for n, one in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [encoded(one, arrays, f"{name}/{n}") for n, one in enumerate(value)]}
    kind = type(value).__name__
    if isinstance(value, dict) and type(value) is _KINDS.get(kind):
        # As pairs: JSON would turn integer keys into strings. Functions stay those of the object.
        pairs = [(key, one) for key, one in value.items() if not callable(one)]
        if all(isinstance(key, str | int) for key, _ in pairs):
            return {kind: [[key, encoded(one, arrays, f"{name}/{key}")] for key, one in pairs]}
    raise CheckpointError(
        f"A checkpoint has numbers, texts, tensors, and lists and dicts of them. Received: {name}, a "
        f"{kind}. Leave it out of the object's state_dict()."
    )


def decoded(value: Any, arrays: Mapping[str, Any]) -> Any:
    """The inverse of `encoded`."""
    if isinstance(value, list):
        return [decoded(one, arrays) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "array":
        return np.array(arrays[held])
    if kind == "tuple":
        return tuple(decoded(one, arrays) for one in held)
    if kind == "tensor":
        numbers = held["numbers"] if "numbers" in held else np.array(arrays[held["array"]])
        dtype = getattr(torch, held["dtype"])
        made = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else None
        if made is None:
            return torch.tensor(numbers, dtype=dtype)
        return made.view(dtype) if held["bits"] else made
    return _KINDS[kind]({key: decoded(one, arrays) for key, one in held})


def _tensor(value: torch.Tensor, arrays: Arrays, name: str) -> Any:
    said = {"dtype": str(value.dtype).removeprefix("torch.")}
    if value.numel() <= SMALL and not value.is_complex():
        return {"tensor": {**said, "numbers": value.tolist()}}
    bits = value.dtype == torch.bfloat16
    arrays[name] = (value.view(torch.int16) if bits else value).numpy().copy()
    return {"tensor": {**said, "array": name, "bits": bits}}
