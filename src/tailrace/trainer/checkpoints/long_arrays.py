"""Long histories in files of their own, beside the arrays that Orbax writes.

A history grows, and every checkpoint has all of it. Orbax copies an array in several threads, and the
C library keeps what a thread has freed: a process that trains for millions of steps would grow by a
copy of its history for each of those threads. Here it is written from where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from tailrace.trainer.checkpoints.proof import NotAsWritten

HISTORY = "history/"
"""The prefix of the names of arrays that grow with each step."""

LONG = 1 << 18
"""The bytes from which such an array has a file of its own."""


def long_names(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """The names of long arrays that grow."""
    return [n for n, array in arrays.items() if n.startswith(HISTORY) and array.nbytes >= LONG]


def write_long(directory: Path, arrays: Iterable[np.ndarray]) -> None:
    """Write arrays, each to a file."""
    for number, array in enumerate(arrays):
        # Exclusively: nothing that was planted under the name is written through.
        with (directory / _file(number)).open("xb") as file:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read_long(directory: Path, number: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Read an array; raises `NotAsWritten` if its file has another size."""
    path = directory / _file(number)
    size = path.stat().st_size
    # Before memory is taken for it.
    if size != int(np.prod(shape, dtype=object)) * dtype.itemsize:
        raise NotAsWritten(f"the file {path.name!r} has {size} bytes")
    return np.fromfile(path, np.uint8).view(dtype).reshape(shape)


def _file(number: int) -> str:
    # Numbered, not named by the array: names of metrics are a user's.
    return f"history-{number}.bin"
