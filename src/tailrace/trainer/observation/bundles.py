"""Bundles: one bad step in a directory, to run on another machine. Only arrays and JSON, no code.

bundle.json           step, seed, shapes, versions, the error
arrays.safetensors    the state before the step, and the elements of the step
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tailrace.base.checks import is_whole
from tailrace.base.files import json_checksum, open_regular, read_json
from tailrace.base.messages import logger
from tailrace.base.paths import check_path
from tailrace.errors import CheckpointError, MissingDependency, NonFiniteError
from tailrace.runs.info import versions
from tailrace.trainer.checkpoints.orbax_files import checksum
from tailrace.trainer.checkpoints.snapshot import BUILD, Snapshot, state_arrays
from tailrace.trainer.engine import Engine

NOTE, ARRAYS, ELEMENT = "bundle.json", "arrays.safetensors", "element/"
FORMAT = 1


def keep_bundle(engine: Engine, failure: NonFiniteError) -> None:
    """Write the bundle that the guard requests; training has stopped before the step."""
    place = None if engine.guard is None else engine.guard.bundle
    if place is None or failure.elements is None:
        return
    try:
        where = write_bundle(place, engine, failure)
        logger.warning("The bundle of step %s is in %r.", failure.step, str(where))
    except (
        CheckpointError,
        MissingDependency,
        OSError,
    ) as error:  # the failure itself matters more
        logger.warning("The bundle of step %s was not written: %s", failure.step, error)


def write_bundle(place: str | os.PathLike[str], engine: Engine, failure: NonFiniteError) -> Path:
    """Write a bad step into a new directory, and return it: the one asked for, or one beside it."""
    library = import_safetensors()
    asked = where = Path(place).absolute()
    # Of an earlier bad step, perhaps: neither of them is to be lost.
    for number in itertools.count(2):
        if not os.path.lexists(where):
            break
        where = asked.with_name(f"{asked.name}-{number}")
    arrays, keys = state_arrays(engine)
    elements: Any = failure.elements
    arrays |= {f"{ELEMENT}{number}": leaf for number, leaf in enumerate(elements)}
    whole = Snapshot(arrays, {}).on_host()
    # safetensors writes the buffer as it is, without regard to strides. Not np.ascontiguousarray,
    # which gives a scalar (the count of Adam) a dim.
    host = {name: np.asarray(array, order="C") for name, array in whole.items()}
    note = {
        "format": FORMAT,
        "step": failure.step,
        "seed": engine.seed,
        "keys": keys,
        "elements_per_step": engine.accumulation.microbatches * engine.placement.replicas,
        "dtypes": {name: str(array.dtype) for name, array in host.items()},
        "checksums": {name: checksum(array) for name, array in host.items()},
        "text": str(failure),
        BUILD: engine.built,
        "versions": versions(),
    }
    # Last: over everything else in the note.
    note["checksum"] = json_checksum(note)
    partial = where.with_name(where.name + ".unfinished")
    partial.mkdir(parents=True, exist_ok=True)  # an unfinished one may exist
    library.save_file({name: _plain(array) for name, array in host.items()}, str(partial / ARRAYS))
    (partial / NOTE).write_text(json.dumps(note, indent=1), encoding="utf-8")
    # Complete or absent: the name appears once both files are written.
    os.rename(partial, where)
    return where


def read_bundle(place: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the note of a bundle."""
    library = import_safetensors()
    where = check_path("bundle", place)
    if not (where / NOTE).exists():
        raise CheckpointError(
            f"{str(where)!r} is not a bundle, or is damaged: "
            f"{f'it has no {NOTE}' if where.exists() else 'nothing is there'}. Give the directory that "
            f"tr.stop_on_nonfinite(bundle=...) was given."
        )
    try:
        note = dict(read_json(where / NOTE, CheckpointError))
        if note["format"] != FORMAT:
            raise CheckpointError(
                f"The bundle {str(where)!r} has format {note['format']!r}; this version reads {FORMAT}."
            )
        # safetensors opens what it is given, and would wait forever for a pipe of this name.
        open_regular(where / ARRAYS, CheckpointError).close()
        stored = library.load_file(str(where / ARRAYS))
        arrays = {name: stored[name].view(jnp.dtype(kind)) for name, kind in note["dtypes"].items()}
        _check_note(note, arrays)
    except CheckpointError:
        raise
    except Exception as error:  # safetensors has an error class of its own
        raise CheckpointError(
            f"{str(where)!r} is not a bundle, or is damaged: {type(error).__name__}: {error}"
        ) from error
    return arrays, note


def _check_note(note: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Raise a ValueError if a note or an array is not what was written."""
    for name in ("step", "seed", "elements_per_step"):
        if not is_whole(note[name]):
            raise ValueError(f"{name} is {note[name]!r}")
    # Bundles of earlier versions have no checksums; one that has those of arrays has this one too.
    known = "checksum" in note or "checksums" in note
    if known and note.pop("checksum", None) != json_checksum(note):
        raise ValueError("bundle.json is not what was written")
    for name, written in note.get("checksums", {}).items():
        if checksum(arrays[name]) != written:
            raise ValueError(f"array {name!r} is not what was written")


def elements_in(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The elements of a bundle's step, stacked leaf by leaf."""
    count = sum(name.startswith(ELEMENT) for name in arrays)
    return [arrays[f"{ELEMENT}{number}"] for number in range(count)]


def _plain(array: np.ndarray) -> np.ndarray:
    """An array with a dtype that every reader supports: bfloat16 and the like as integers."""
    if array.dtype.isbuiltin == 1:
        return array
    # The dtype is in the note, and `read_bundle` views the bits as it again.
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
