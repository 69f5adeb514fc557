"""A model's state in a file of plain arrays: weights, buffers, optimizer state, the step count.

The file is a numpy archive with one array a tensor and a JSON note; nothing in it is code, so that
reading one from elsewhere is safe.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tailrace._version import __version__
from tailrace.errors import RunError

_NOTE = "tailrace.json"
_BITS = {"bfloat16": (np.uint16, jnp.bfloat16)}


def write_state(path: Any, trees: Mapping[str, Any], note: Mapping[str, Any]) -> pathlib.Path:
    """Write trees of arrays by name; the file appears whole or not at all."""
    target = pathlib.Path(path)
    if target.is_dir():
        raise RunError(f"A model is saved in a file. Received a directory: {str(target)!r}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for kind, tree in trees.items():
        for name, value in flat(tree).items():
            array = np.asarray(value)
            dtypes[f"{kind}/{name}"] = str(array.dtype)
            if str(array.dtype) in _BITS:
                array = array.view(_BITS[str(array.dtype)][0])
            arrays[f"{kind}/{name}"] = array
    text = json.dumps({"version": __version__, "dtypes": dtypes, **note})
    arrays[_NOTE] = np.frombuffer(text.encode(), np.uint8)
    part = target.with_name(f"{target.name}.part")
    with part.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)  # type: ignore[arg-type]
    os.replace(part, target)
    return target


def read_state(path: Any) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The trees of a file, and its note."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        note = json.loads(arrays.pop(_NOTE).tobytes())
    except (OSError, KeyError, ValueError) as error:
        raise RunError(
            f"{str(path)!r} is not a model saved by model.save(path): {error}."
        ) from error
    trees: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        dtype = note["dtypes"][name]
        if dtype in _BITS:
            array = array.view(_BITS[dtype][1])
        kind, _, rest = name.partition("/")
        *around, last = rest.split("/")
        place = trees.setdefault(kind, {})
        for part in around:
            place = place.setdefault(part, {})
        place[last] = array
    return trees, note


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The arrays of nested dicts, by path.

    >>> flat({"a": {"b": 1}, "c": 2})
    {'a/b': 1, 'c': 2}
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{before}{name}/"))
        else:
            found[f"{before}{name}"] = value
    return found


def check_same_form(saved: Mapping[str, Any], own: Mapping[str, Any], what: str) -> None:
    """Refuse arrays that are not those of the model."""
    saved, own = flat(saved), flat(own)
    if saved.keys() != own.keys():
        missing, more = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
        raise RunError(
            f"A saved model fits a module with the same {what}. Missing in the file: "
            f"{missing or 'none'}. Only in the file: {more or 'none'}."
        )
    for name, value in own.items():
        if np.shape(saved[name]) != np.shape(value):
            raise RunError(
                f"A saved model fits a module with the same {what}. {name!r} is "
                f"{list(np.shape(value))} here and {list(np.shape(saved[name]))} in the file."
            )
