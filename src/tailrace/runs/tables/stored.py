"""Rows of a run on disk: read on demand, and checked while they are read.

Declared sizes are compared with the files before memory is allocated: the compression makes a chunk at
most `MOST_DENSE` times smaller, so a small file cannot claim to be a large array.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.base.files import read_head, too_large
from tailrace.base.messages import shown
from tailrace.errors import RunError, TailraceError
from tailrace.records.record import Record, Source
from tailrace.runs.storage.attributes import unsealed
from tailrace.runs.storage.files import ZarrArray, ZarrGroup, build_tree, import_zarr, own_dtype
from tailrace.taps.reductions import STATS

CODECS = {"bytes", "blosc", "crc32c"}
"""The codecs of a run's arrays; see `tailrace.runs.storage.compression.codecs`."""

MOST_DENSE = 256
"""The largest compression ratio of LZ4."""

BLOSC_HEADER = 16
"""The header bytes of a compressed chunk; bytes 4 to 7 are its uncompressed size."""


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table of records on disk.

    Attributes:
        directory: the run.
        path: the path of its group in it.
        group: the Zarr group.
        start: the first row to read.
        stop: the row after the last one to read: the number of committed rows.
    """

    directory: Path
    path: str
    group: ZarrGroup
    start: int
    stop: int

    def column(self, name: str, tensor: int | None = None) -> np.ndarray:
        """The rows of a column, for one tensor or all."""
        return read_rows(self.directory, self.path, self.group, name, self.start, self.stop, tensor)

    @property
    def names(self) -> list[str]:
        """The names of its tensors."""
        return [str(name) for name in unsealed(self.group.attrs)["names"]]

    @property
    def kind(self) -> str:
        """What taps kept of them."""
        return str(self.group.attrs["kind"])


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """The records of one tensor in a table, read on demand.

    Attributes:
        table: the table.
        number: the index of the tensor in the table.
        name: the tensor.
        kind: what the tap kept of it.
    """

    table: StoredTable
    number: int
    name: str
    kind: str

    def __len__(self) -> int:
        return self.table.stop - self.table.start

    def __repr__(self) -> str:
        return f"Record({self.name!r}, {self.kind}, {len(self)} values, on disk)"

    def record(self) -> Record:
        """Read them."""
        with describing(self.table.directory, self.table.path):
            return self._read()

    def _read(self) -> Record:
        table, arrays = self.table, set(self.table.group.array_keys())
        steps = table.column("step")
        if STATS.names and set(STATS.names) <= arrays:
            columns = {name: table.column(name, self.number) for name in STATS.names}
            values: Any = np.empty(columns["mean"].shape, STATS)
            for name, column in columns.items():
                values[name] = column
        elif "values" in arrays:
            values = table.column("values", self.number)
        else:
            tree = table.group.attrs.get("tree")
            values = build_tree(tree, lambda leaf: table.column(f"values{leaf}", self.number))
        stage = int(self._stage())
        return Record(
            self.name,
            self.kind,
            values,
            steps,
            table.column("microbatch"),
            table.column("replica"),
            np.full(len(steps), stage),
            table.column("ran", self.number) if "ran" in arrays else None,
        )

    def _stage(self) -> Any:
        table, name = self.table, "stage"
        count = _one_array(table.group, name).shape[0]
        return read_rows(table.directory, table.path, table.group, name, 0, count)[self.number]


@dataclasses.dataclass(frozen=True)
class Sorted:
    """The records of one tensor from several tables, sorted by step."""

    parts: Sequence[StoredPart]

    def record(self) -> Record:
        """Read and merge them."""
        import jax

        found = [part.record() for part in self.parts]
        # Stable: rows of one step keep the order of their microbatches.
        order = np.argsort(np.concatenate([r.steps for r in found]), kind="stable")
        pick = lambda *arrays: np.concatenate(arrays)[order]  # noqa: E731
        tags = [
            pick(*(getattr(record, tag) for record in found))
            for tag in ("steps", "microbatches", "replicas", "stages")
        ]
        ran = [record.ran for record in found if record.ran is not None]
        values = jax.tree.map(pick, *(record.values for record in found))
        made = Record(found[0].name, found[0].kind, values, *tags)
        return dataclasses.replace(made, ran=pick(*ran)) if ran else made


def stored_records(
    directory: Path, root: ZarrGroup, starts: Sequence[int] = ()
) -> dict[tuple[str, str], list[Source]]:
    """All committed records, by name and kind; `starts` has each table's first row to read."""
    found: dict[tuple[str, str], list[StoredPart]] = {}
    for table in stored_tables(directory, root, starts):
        for position, name in enumerate(table.names):
            part = StoredPart(table, position, name, table.kind)
            found.setdefault((part.name, part.kind), []).append(part)
    return {
        # In several tables if its shape, or the steps at which it is observed, changed between
        # fits.
        key: list(parts[:1]) if len(parts) == 1 else [Sorted(parts)]
        for key, parts in found.items()
    }


def stored_tables(
    directory: Path, root: ZarrGroup, starts: Sequence[int] = ()
) -> list[StoredTable]:
    """The tables with committed rows; `starts` has each table's first row to read."""
    found = []
    for number, stop in enumerate(committed(directory, root)["records"]):
        path = f"records/{number}"
        start = starts[number] if number < len(starts) else 0
        with describing(directory, path):
            table = StoredTable(directory, path, root[path], start, stop)
            _ = table.names, table.kind  # raises if the table is damaged
        if start < stop:
            found.append(table)
    return found


def committed(directory: Path, root: ZarrGroup) -> dict[str, Any]:
    """The number of committed rows of the history and of each table."""
    with describing(directory, "zarr.json"):
        counts = unsealed(root.attrs["committed"])
        history, records = int(counts["history"]), [int(n) for n in counts["records"]]
        if min([history, *records]) < 0:
            raise ValueError("a number of rows is negative")
        return {"history": history, "records": records}


def read_rows(
    directory: Path,
    path: str,
    group: ZarrGroup,
    name: str,
    start: int,
    stop: int,
    tensor: int | None = None,
) -> np.ndarray:
    """Rows of one array; a missing or damaged chunk is an error, not zeros."""
    where = f"{path}/{name}"
    with describing(directory, where):
        array = _one_array(group, name)
        if array.shape[0] < stop:
            raise RunError(
                f"The run '{shown(str(directory))}' is truncated: {where} has {array.shape[0]} "
                f"rows, and {stop} were written."
            )
        # All three before Zarr reads anything: it would allocate what a file declares, and return fill
        # values where a chunk is missing.
        _check_size(directory, where, array, stop - start, tensor)
        _check_chunks(directory, where, array, start, stop, tensor)
        index = slice(start, stop) if tensor is None else (slice(start, stop), tensor)
        values = np.asarray(array[index])
        # Stored wider than it was recorded, where Zarr has no such dtype.
        own = array.attrs.get("dtype")
        return values if own is None else values.astype(own_dtype(str(own)))


def _check_chunks(
    directory: Path, where: str, array: ZarrArray, start: int, stop: int, tensor: int | None
) -> None:
    if start >= stop or not math.prod(array.shape[1:]):
        return
    rows = range(start // array.chunks[0], -(-stop // array.chunks[0]))
    rest = [range(-(-n // c)) for n, c in zip(array.shape[1:], array.chunks[1:], strict=True)]
    if tensor is not None:
        # Only the chunks that will be read: others may be missing without harm.
        rest[0] = range(tensor // array.chunks[1], tensor // array.chunks[1] + 1)
    for row in rows:
        for other in np.ndindex(*(len(r) for r in rest)):
            chunk = (row, *(r[i] for r, i in zip(rest, other, strict=True)))
            file = directory / where / array.metadata.encode_chunk_key(chunk)
            if file.is_file():
                _check_density(file, array)
            else:
                raise RunError(
                    f"The run '{shown(str(directory))}' is truncated: the chunk "
                    f"{'/'.join(map(str, chunk))} of {where} is missing. Other arrays can still "
                    f"be read."
                )


def _one_array(group: ZarrGroup, name: str) -> Any:
    """An array with the writer's codecs; others could decompress to any size."""
    array = group[name]
    codecs = [codec.to_dict() for codec in array.metadata.codecs]
    named = [codec["name"] for codec in codecs]
    if not {"blosc", "crc32c"} <= set(named) <= CODECS:
        raise ValueError(f"it is compressed by {named}, and runs by blosc with a checksum")
    return array


def _check_size(
    directory: Path, where: str, array: ZarrArray, rows: int, tensor: int | None
) -> None:
    # Values of variable length have no fixed size, and are never read.
    values = math.prod(array.shape[1:] if tensor is None else array.shape[2:])
    # A chunk is decompressed whole, however few of its rows are asked for.
    size = max(rows * values, math.prod(array.chunks)) * np.dtype(array.dtype).itemsize
    limit = array.store_path.store.limit
    if size > limit:
        raise too_large(f"{where} of the run '{shown(str(directory))}'", size, limit, RunError)


def _check_density(file: Path, array: ZarrArray) -> None:
    """Refuse a chunk whose declared size is impossible, before memory is allocated for it."""
    expected = math.prod(array.chunks) * np.dtype(array.dtype).itemsize
    head = read_head(file, BLOSC_HEADER, RunError)
    size = file.stat().st_size
    # The decompressor believes this number and allocates it.
    declared = int.from_bytes(head[4:8], "little")
    if len(head) < BLOSC_HEADER or declared != expected or expected > MOST_DENSE * size:
        raise ValueError(
            f"the chunk {file.name} has {size:,} bytes and says that it is {declared:,}, where "
            f"{expected:,} are expected"
        )


def open_root(directory: Path, limit: int | None = None) -> Any:
    """The Zarr group of a run, for reading."""
    zarr = import_zarr()
    # Zarr would say that there is no group; what it means for a run is said here.
    if not (directory / "zarr.json").exists():
        raise RunError(
            f"The run '{shown(str(directory))}' is damaged: zarr.json cannot be read, because it is "
            f"missing. It says how many rows count. If this is a copy, copy the run again."
        )
    with describing(directory, "zarr.json"):
        from tailrace.runs.storage.stores import RunStore

        return zarr.open_group(RunStore(directory, limit), mode="r", zarr_format=3)


@contextlib.contextmanager
def describing(directory: Path, where: str) -> Iterator[None]:
    """Turn any error in this context into an error about that part of the run."""
    try:
        yield
    except TailraceError:
        raise
    except Exception as error:
        raise damaged(directory, where, error) from error


def damaged(directory: Path, where: str, error: Exception) -> RunError:
    """The error for a part that cannot be read."""
    reason = " ".join(shown(str(error)).split())[:200]
    return RunError(
        f"The run '{shown(str(directory))}' is damaged: {where} cannot be read "
        f"({type(error).__name__}: {reason}). Other arrays can still be read."
    )
