"""`run.json`: the description of a run."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tailrace._version import __version__
from tailrace.base.files import read_json
from tailrace.base.messages import shown
from tailrace.errors import RunError
from tailrace.runs.storage.durable import put_files
from tailrace.runs.storage.files import FORMAT
from tailrace.runs.storage.held import HeldDirectory
from tailrace.taps.catalogue import Catalogue, Entry

RUN_FILE = "run.json"
MOST_VALUES = 1000
"""The largest array that is stored as a list: NumPy's text of a larger one is abbreviated."""
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "zarr", "keras", "torch")


def versions() -> dict[str, str]:
    """The versions of Tailrace, Python and the installed packages that a run depends on.

    >>> {"tailrace", "python", "jax", "numpy"} <= set(versions())
    True
    """
    found = {"tailrace": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def write_info(directory: HeldDirectory, info: Mapping[str, Any]) -> None:
    """Write `run.json` atomically."""
    whole = {
        "format": FORMAT,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        **info,
    }
    put_files(directory, {RUN_FILE: json.dumps(whole, indent=1, default=_plain).encode()})


def _plain(value: object) -> Any:
    """What JSON has for an object: numbers and lists for small arrays, a text for anything else."""
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.size <= MOST_VALUES:
        # Keys, and arrays that were deleted or are elsewhere, have no values here.
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return np.asarray(value).tolist()
    return str(value)


def read_info(directory: Path, limit: int | None = None) -> dict[str, Any]:
    """The content of `run.json`, or an error that says why it cannot be read; see `tr.open_run`."""
    where = shown(str(directory))
    if not os.path.exists(directory):  # also False without permission to look the path up
        raise RunError(
            f"There is no run directory at '{where}': nothing is there. Give the path that "
            f"Trainer(run_dir=...) was given."
        )
    if not directory.is_dir():
        raise RunError(f"A run is a directory. '{where}' is a file.")
    path = directory / RUN_FILE
    # `lexists`: a link that leads nowhere is damage, not a missing run.
    if not os.path.lexists(path):
        try:
            there = "is empty" if not any(directory.iterdir()) else f"has no {RUN_FILE}"
        except OSError as error:
            there = f"cannot be looked at ({error.strerror})"
        raise RunError(
            f"'{where}' holds no run: it {there}. A run is written by tr.Trainer(..., run_dir=...)."
        )
    try:
        info = read_json(path, RunError, limit)
        version = info["format"]
        newer = version > FORMAT
    except RunError:
        raise
    # Also JSON that is something else: a list, or a format that is no number.
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"The file {RUN_FILE} of '{where}' is damaged ({type(error).__name__}): it is not the "
            f"description of a run. The arrays beside it can be opened with zarr."
        ) from error
    if newer:
        packages = info.get("versions")
        # The file is untrusted, even for this message.
        packages = packages if isinstance(packages, dict) else {}
        by = shown(str(packages.get("tailrace", "a newer version")))[:50]
        raise RunError(
            f"'{where}' has format {shown(str(version))[:50]} (written by tailrace {by}), and this "
            f"version, {__version__}, reads formats up to {FORMAT}. Update tailrace."
        )
    return info


def read_catalogue(
    rows: Iterable[Mapping[str, Any]], use_order: Iterable[object] = ()
) -> Catalogue:
    """The catalogue in `run.json`, and the names of tensors of parameters in the order of their use."""
    uses = {str(name): use for use, name in enumerate(use_order)}
    return Catalogue(
        Entry(
            str(row["name"]),
            str(row["kind"]),
            tuple(int(n) for n in row["shape"]),
            str(row["dtype"]),
            int(row.get("stage", -1)),
            str(row.get("source", "")),
            use=uses.get(str(row["name"]), -1),
        )
        for row in rows
    )
