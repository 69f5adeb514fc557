"""Zarr stores of a run directory: one for untrusted reads, and one that buffers writes."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, Store
from zarr.buffer import default_buffer_prototype

from tailrace.base.files import read_bytes, read_limit
from tailrace.errors import RunError
from tailrace.runs.storage.durable import put_files
from tailrace.runs.storage.held import HeldDirectory


class DirectoryStore(Store, abc.ABC):
    """The files of a run directory as they are on disk: only regular files within the size limit.

    Args:
        root: the directory.
        limit: the most bytes of one file, or one array; None for that of `read_limit`.
        read_only: whether the store refuses writes.
    """

    # Properties of the base class in some versions of zarr, plain attributes in others.
    supports_writes = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    supports_deletes = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    supports_listing = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, root: Path, limit: int | None = None, *, read_only: bool = True) -> None:
        super().__init__(read_only=read_only)
        self.root, self.limit = root, read_limit(limit)

    def with_read_only(self, read_only: bool = False) -> RunStore:
        """The same files, for reading."""
        if not read_only:
            raise NotImplementedError("A run is written by its writer alone.")
        return RunStore(self.root, self.limit)

    def read_file(
        self, key: str, prototype: BufferPrototype | None, byte_range: ByteRequest | None
    ) -> Buffer | None:
        """The content of a file; None if there is none."""
        if byte_range is not None:
            raise NotImplementedError("Files are read whole: the arrays of a run have no shards.")
        # Zarr parses descriptions whole, so they have a lower limit than chunks.
        is_description = key.endswith(".json")
        try:
            found = read_bytes(self.root / key, RunError, self.limit, description=is_description)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(found)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Several files."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def list(self) -> AsyncIterator[str]:
        """The names of all files."""
        async for name in self.list_prefix(""):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """The names of all files with this prefix."""
        for path in self.root.rglob("*"):
            name = path.relative_to(self.root).as_posix()
            if path.is_file() and name.startswith(prefix):
                yield name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The entries of a folder."""
        folder = self.root / prefix
        for path in folder.iterdir() if folder.is_dir() else ():
            yield path.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    def __str__(self) -> str:
        return str(self.root)


class RunStore(DirectoryStore):
    """The files of a run directory for reading."""

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The content of a file; None if there is none."""
        return self.read_file(key, prototype, byte_range)

    async def exists(self, key: str) -> bool:
        """Whether there is such a file."""
        return (self.root / key).is_file()

    async def set(self, key: str, value: Buffer) -> None:
        """Nothing is written here."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Nothing is removed here."""
        self._check_writable()


class BufferedStore(DirectoryStore):
    """A store that writes only in `flush`.

    Zarr writes a chunk, or the description of an array, whenever one changes. With buffering, files
    that belong together are synced together, and a chunk that changes twice is written once.
    """

    def __init__(self, directory: HeldDirectory) -> None:
        super().__init__(directory.path, read_only=False)
        self._directory = directory
        self._held: dict[str, Buffer] = {}  # Zarr's buffers, by the names of files

    def flush(self, last: str) -> None:
        """Sync everything to disk; the file `last` only after the rest.

        Files that could not be written, except `last`, are written by the next flush.
        """
        # Removed before the others are written: if they fail, counts that include them must not be
        # left for the next flush.
        final = self._held.pop(last).to_bytes()
        put_files(self._directory, {name: held.to_bytes() for name, held in self._held.items()})
        self._held.clear()
        put_files(self._directory, {last: final})

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The latest content, buffered or not."""
        if key not in self._held or byte_range is not None:
            return self.read_file(key, prototype, byte_range)
        return self._held[key]

    async def exists(self, key: str) -> bool:
        """Whether a file exists or is buffered."""
        return key in self._held or (self.root / key).is_file()

    async def set(self, key: str, value: Buffer) -> None:
        """Buffer a file."""
        self._held[key] = value

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Buffer a file unless it exists."""
        if not await self.exists(key):
            await self.set(key, value)

    async def delete(self, key: str) -> None:
        """Drop a file from the buffer, and remove it."""
        self._held.pop(key, None)
        self._directory.remove(key)

    async def delete_dir(self, prefix: str) -> None:
        """Drop a folder from the buffer, and remove it."""
        folder = prefix.rstrip("/")
        for key in [key for key in self._held if key.startswith(f"{folder}/")]:
            del self._held[key]
        # Never the directory itself: the lock and other files are in it.
        if folder:
            self._directory.remove(folder)
