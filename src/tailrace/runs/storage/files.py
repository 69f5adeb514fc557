"""The layout of a run on disk: the files of a run directory, and values as arrays.

    run.json              the description: versions, devices, options, taps, catalogue, plan
    lock                  held by the process that writes
    zarr.json             the root of a Zarr v3 group; its attributes say how many rows count
    history/              metric0, metric1, ... [step, microbatch, replica]; weight
    records/0, 1, ...     tables: tensors of one shape that are observed at the same steps
    executions/           first_step, steps and ended, one row per execution
    validations/          step (the number of steps before it) and metric0, metric1, ..., one row per
                          validation; absent in runs without any
    nonfinite.json        why a NaN or Inf stopped the run; absent in other runs

A table has the coordinates step, microbatch and replica, one value per row (`record`), and tensor and
stage, one value per tensor. The kept values are in `values` [record, tensor, ...]; statistics in one
array per field (`mean`, `std`, ...); a tree that a function returned in `values0`, `values1`, ...
Names of tensors and metrics are data: they are never used as names of arrays or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tailrace.errors import MissingDependency, RunError

ZarrGroup = Any
"""A `zarr.Group`. Zarr is imported only when it is used, and to a type checker whatever a group holds
is an array or another group."""

ZarrArray = Any
"""A `zarr.Array`, for the same reason."""

FORMAT = 1
"""The version of this layout. A reader refuses a higher one."""

CHUNK_BYTES = 1 << 20
"""The approximate size of a chunk before compression."""

MOST_ROWS, MOST_TENSORS = 16_384, 16
"""The most rows, and the most tensors, per chunk."""

CHUNK_NAMES: Any = {"name": "default", "separator": "."}
"""Chunks are in the folder of their array's description, so that only one folder must be synced."""

NOT_IN_ZARR = {"bfloat16": "float32", "int4": "int8", "uint4": "uint8", "int2": "int8"}
"""Dtypes without a name in Zarr, and wider ones that represent their values exactly."""


def import_zarr() -> Any:
    """Import Zarr, or raise an error that says how to install it."""
    try:
        import zarr
    except ImportError as error:
        raise MissingDependency.for_feature("A run directory", "zarr", "records") from error
    return zarr


def chunk_shape(shape: tuple[int, ...], itemsize: int, tensors: int | None) -> tuple[int, ...]:
    """The chunk shape for rows of values: rows, tensors, and whole values.

    A chunk holds few tensors, so that reading one does not decode all the others.

    >>> chunk_shape((), 4, 100), chunk_shape((), 8, None)
    ((16384, 16), (16384,))
    >>> chunk_shape((258,), 4, 100)
    (1016, 1, 258)
    """
    size = max(1, math.prod(shape)) * itemsize
    if tensors is None:
        return (max(1, min(MOST_ROWS, CHUNK_BYTES // size)), *(max(1, n) for n in shape))
    # At least 1,024 rows to a chunk come before many tensors: runs are read over time, one tensor
    # after the other.
    together = max(1, min(MOST_TENSORS, tensors, CHUNK_BYTES // (size * 1024)))
    rows = max(1, min(MOST_ROWS, CHUNK_BYTES // (size * together)))
    return (rows, together, *(max(1, n) for n in shape))


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which values are stored; wider if Zarr does not support theirs.

    >>> import ml_dtypes
    >>> stored_dtype(np.dtype(ml_dtypes.bfloat16)), stored_dtype(np.dtype("int16"))
    (dtype('float32'), dtype('int16'))
    """
    if dtype.name.startswith(("float8_", "float6_", "float4_")):
        return np.dtype("float32")
    return np.dtype(NOT_IN_ZARR.get(dtype.name, dtype))


def own_dtype(name: str) -> np.dtype:
    """The dtype with a name from a file.

    >>> own_dtype("bfloat16").itemsize
    2
    """
    import ml_dtypes

    # The name is from a file: only types count, not other attributes of the module.
    own = getattr(ml_dtypes, name, None)
    try:
        return np.dtype(own if isinstance(own, type) else name)
    except TypeError:
        raise RunError(f"No dtype is called {name!r}: the run is damaged.") from None


# -- trees --------------------------------------------------------------------------------------


def describe_tree(value: object, leaf: Callable[[Any], int]) -> Any:
    """The structure of a tree of dicts, lists and tuples, as JSON; `leaf` numbers the leaves.

    >>> numbers = iter(range(9))
    >>> describe_tree({"a": np.ones(1), "b": [np.ones(1), None]}, lambda _: next(numbers))
    {'dict': {'a': 0, 'b': {'list': [1, None]}}}
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        # JSON would turn other keys into strings, and the tree would come back as another one.
        if not all(isinstance(key, str) for key in value):
            raise RunError(
                f"A function of a tap that goes into a run directory returns dicts with strings as "
                f"keys. Received the keys {list(value)!r}."
            )
        return {"dict": {key: describe_tree(inner, leaf) for key, inner in value.items()}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [describe_tree(inner, leaf) for inner in value]}
    if isinstance(value, np.ndarray):
        return leaf(value)
    raise RunError(
        f"A function of a tap that goes into a run directory returns arrays, or dicts, lists and "
        f"tuples of them. Received: {type(value).__name__}."
    )


def build_tree(structure: int | Mapping[str, Any] | None, leaf: Callable[[int], Any]) -> Any:
    """The tree described by a structure; the inverse of `describe_tree`.

    >>> build_tree({"tuple": [0, {"dict": {"a": 1}}]}, lambda number: number * 10)
    (0, {'a': 10})
    """
    if structure is None:
        return None
    if isinstance(structure, int):
        return leaf(structure)
    (kind, inner), *_ = structure.items()
    if kind == "dict":
        return {key: build_tree(part, leaf) for key, part in inner.items()}
    parts = [build_tree(part, leaf) for part in inner]
    return parts if kind == "list" else tuple(parts)
