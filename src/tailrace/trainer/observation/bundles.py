"""Bundles: one bad step in a directory, to run on another machine. Only arrays and JSON, no code.

bundle.json           step, seed, shapes, versions, the error
arrays.safetensors    the state before the step, and the elements of the step
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tailrace.data.files import read_json
from tailrace.errors import CheckpointError, MissingDependency, NonFiniteError
from tailrace.messages import logger
from tailrace.runs.info import versions
from tailrace.trainer.checkpoints.snapshot import STATE, Snapshot, put_state, state_arrays
from tailrace.trainer.engine import Engine

NOTE, ARRAYS, ELEMENT = "bundle.json", "arrays.safetensors", "element/"
FORMAT = 1


def keep_bundle(engine: Engine, failure: NonFiniteError) -> None:
    """Write the bundle that the guard requests; training has stopped before the step."""
    place = None if engine.guard is None else engine.guard.bundle
    if place is None or failure.elements is None:
        return
    try:
        write_bundle(place, engine, failure)
    except (
        CheckpointError,
        MissingDependency,
        OSError,
    ) as error:  # the failure itself matters more
        logger.warning("The bundle of step %s was not written: %s", failure.step, error)


def write_bundle(place: str | os.PathLike[str], engine: Engine, failure: NonFiniteError) -> None:
    """Write a bad step into a new directory."""
    library = import_safetensors()
    where = Path(place).absolute()
    if where.exists():
        raise CheckpointError(
            f"A bundle is written into a new directory, and {str(where)!r} is there already."
        )
    arrays, keys = state_arrays(engine)
    elements: Any = failure.elements
    arrays |= {f"{ELEMENT}{number}": leaf for number, leaf in enumerate(elements)}
    whole = Snapshot(arrays, {}).on_host()
    host = {name: np.ascontiguousarray(array) for name, array in whole.items()}
    note = {
        "format": FORMAT,
        "step": failure.step,
        "seed": engine.seed,
        "keys": keys,
        "elements_per_step": engine.accumulation.microbatches * engine.placement.replicas,
        "dtypes": {name: str(array.dtype) for name, array in host.items()},
        "text": str(failure),
        "versions": versions(),
    }
    partial = where.with_name(where.name + ".unfinished")
    partial.mkdir(parents=True, exist_ok=True)  # an unfinished one may exist
    library.save_file({name: _plain(array) for name, array in host.items()}, str(partial / ARRAYS))
    (partial / NOTE).write_text(json.dumps(note, indent=1), encoding="utf-8")
    # Complete or absent: the name appears once both files are written.
    os.rename(partial, where)


def read_bundle(place: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the note of a bundle."""
    library = import_safetensors()
    where = Path(place)
    try:
        note = read_json(where / NOTE, CheckpointError)
        stored = library.load_file(str(where / ARRAYS))
        arrays = {name: stored[name].view(jnp.dtype(kind)) for name, kind in note["dtypes"].items()}
        if note["format"] != FORMAT:
            raise CheckpointError(
                f"The bundle {str(where)!r} has form {note['format']!r}; this version reads {FORMAT}."
            )
    except (OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{str(where)!r} is no bundle, or is damaged: {type(error).__name__}: {error}"
        ) from error
    return arrays, note


def put_bundle(
    engine: Engine, place: str | os.PathLike[str]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Give an engine the state of a bundle; returns the elements of its step, and its note."""
    arrays, note = read_bundle(place)
    state = {name: array for name, array in arrays.items() if name.startswith(STATE)}
    put_state(engine, state, note)
    count = sum(name.startswith(ELEMENT) for name in arrays)
    return [arrays[f"{ELEMENT}{number}"] for number in range(count)], note


def _plain(array: np.ndarray) -> np.ndarray:
    """An array with a dtype that every reader supports: bfloat16 and the like as integers."""
    if array.dtype.isbuiltin == 1:
        return array
    return array.view(f"u{array.dtype.itemsize}")


def import_safetensors() -> Any:
    """Import safetensors, or raise an error that says what to install."""
    try:
        return importlib.import_module("safetensors.numpy")
    except ImportError:
        raise MissingDependency(
            "Bundles are written with safetensors, which is not installed: "
            "pip install 'tailrace[bundle]'."
        ) from None
