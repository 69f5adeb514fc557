"""Columns that grow together: the arrays of one Zarr group, appended by rows.

Rows are buffered in memory until `write`, which appends them after the committed rows and does not
touch those: if a write is interrupted, the rows committed before it are intact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tailrace.runs.storage.files import CHUNK_NAMES, ZarrGroup, chunk_shape, stored_dtype


class Columns:
    """The arrays of one group.

    Args:
        group: a Zarr group to create arrays in.
        rows: the name of the dim along which they grow.

    Attributes:
        committed: the number of rows that count; the caller publishes it to readers, then calls
            `counted`.
    """

    def __init__(self, group: ZarrGroup, rows: str) -> None:
        self.group, self._rows = group, rows
        self.committed = 0
        self._arrays: dict[str, Any] = {}
        self._waiting: dict[str, list[tuple[int, np.ndarray]]] = {}
        self._count = 0

    @classmethod
    def reopened(cls, group: ZarrGroup, rows: str, committed: int) -> Columns:
        """Existing columns, of which the first rows count."""
        from tailrace.runs.storage.compression import reopened

        columns = cls(group, rows)
        columns.committed = committed
        for name, array in group.arrays():
            # Others are fixed coordinates, which do not grow.
            if array.metadata.dimension_names[:1] == (rows,) and name not in ("tensor", "stage"):
                columns._arrays[name] = reopened(array)
        return columns

    def add_fixed(self, name: str, values: np.ndarray, dims: Sequence[str]) -> None:
        """Write an array that does not grow, such as a coordinate of another dim."""
        from tailrace.runs.storage.compression import codecs

        array = self.group.create_array(
            name,
            shape=values.shape,
            chunks=tuple(max(1, n) for n in values.shape),
            dtype=str if values.dtype == object else values.dtype,
            dimension_names=tuple(dims),
            compressors=codecs(),
            chunk_key_encoding=CHUNK_NAMES,
            config={"write_empty_chunks": True},
        )
        array[...] = values

    def add_column(
        self,
        name: str,
        dtype: np.dtype,
        shape: tuple[int, ...],
        dims: Sequence[str],
        *,
        tensors: int | None = None,
        attributes: dict[str, Any] | None = None,
        missing: float | None = None,
    ) -> None:
        """Create a column of values of `shape`; `dims` names its dims.

        Args:
            name: the name of the array.
            dtype: the dtype of the values.
            shape: the shape of one row, without the tensor dim.
            dims: a name for each dim of a row, tensors first.
            tensors: the number of tensors per row; None if a row is one value.
            attributes: the attributes of the array.
            missing: what rows without a value read as; None: NaN, -1 or 0, by the dtype.
        """
        from tailrace.runs.storage.compression import codecs

        wide = stored_dtype(dtype)
        row = shape if tensors is None else (tensors, *shape)
        # What rows of a column read as if it was added later, or has no value in them: recognisable
        # as missing.
        fill = {"f": float("nan"), "c": float("nan"), "i": -1}.get(wide.kind, 0)
        fill = fill if missing is None else missing
        # Readers cast back, so that bfloat16 comes out as it went in.
        own = {"dtype": dtype.name} if wide != dtype else {}
        self._arrays[name] = self.group.create_array(
            name,
            shape=(0, *row),
            chunks=chunk_shape(shape, wide.itemsize, tensors),
            dtype=wide,
            dimension_names=(self._rows, *dims),
            fill_value=fill,
            attributes={**(attributes or {}), **own},
            compressors=codecs(),
            chunk_key_encoding=CHUNK_NAMES,
            config={"write_empty_chunks": True},
        )

    @property
    def rows(self) -> int:
        """The number of rows, including buffered ones."""
        return self.committed + self._count

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def form(self, name: str) -> tuple[int, ...]:
        """The shape of one row of a column."""
        return self._arrays[name].shape[1:]

    def append(self, count: int, values: dict[str, np.ndarray]) -> None:
        """Buffer `count` rows; columns not in `values` get their fill value."""
        for name, rows in values.items():
            # With its place: columns may skip rows, which then have fill values.
            self._waiting.setdefault(name, []).append((self._count, rows))
        self._count += count

    def write(self) -> int:
        """Write the buffered rows after the committed ones; returns the number of rows."""
        total = self.rows
        for name, array in self._arrays.items():
            # Also columns without new rows: all have one length, and the rest are fill values.
            if self._count:
                array.resize((total, *array.shape[1:]))
            for start, rows in _neighbours(self._waiting.get(name, [])):
                first = self.committed + start
                array[first : first + len(rows)] = rows.astype(array.dtype, copy=False)
        return total

    def counted(self) -> None:
        """Commit the written rows."""
        self.committed += self._count
        self._waiting.clear()
        self._count = 0

    def forget(self) -> None:
        """Drop the buffered rows, which could not be written."""
        self._waiting.clear()
        self._count = 0


def _neighbours(pieces: list[tuple[int, np.ndarray]]) -> list[tuple[int, np.ndarray]]:
    """Join consecutive pieces, so that a chunk is encoded once."""
    joined: list[tuple[int, list[np.ndarray]]] = []
    end = -1
    for start, rows in pieces:
        if joined and start == end:
            joined[-1][1].append(rows)
        else:
            joined.append((start, [rows]))
        end = start + len(rows)
    return [(start, np.concatenate(rows)) for start, rows in joined]
