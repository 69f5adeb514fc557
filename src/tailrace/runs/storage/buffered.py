"""A Zarr store that holds what is written until all of it goes to the disk together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zarr.storage import LocalStore

from tailrace.runs.storage.durable import put_files


class BufferedStore(LocalStore):
    """A directory that changes only in `flush`.

    Zarr writes a chunk, or the description of an array, whenever one changes. Held back, what
    belongs together is forced to the disk together, and a chunk that changes twice is written once.
    """

    def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
        super().__init__(root, read_only=read_only)
        self._held: dict[str, Any] = {}  # Zarr's buffers, by the names of files

    def flush(self, last: str) -> None:
        """Force everything to the disk; the file `last` only once the rest is there.

        What could not be written is written by the next flush, but for `last`.
        """
        final = self._held.pop(last).to_bytes()
        put_files(self.root, {name: held.to_bytes() for name, held in self._held.items()})
        self._held.clear()
        put_files(self.root, {last: final})

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        """What was written last, held back or not."""
        if key not in self._held:
            return await super().get(key, prototype, byte_range)
        if byte_range is not None:
            raise NotImplementedError("Files are read whole: the arrays of a run have no shards.")
        return self._held[key]

    async def exists(self, key: str) -> bool:
        """Whether there is such a file, or will be."""
        return key in self._held or await super().exists(key)

    async def set(self, key: str, value: Any) -> None:
        """Hold a file."""
        self._held[key] = value

    async def set_if_not_exists(self, key: str, value: Any) -> None:
        """Hold a file unless there is one."""
        if not await self.exists(key):
            await self.set(key, value)

    async def delete(self, key: str) -> None:
        """Forget a file, and remove it."""
        self._held.pop(key, None)
        await super().delete(key)

    async def delete_dir(self, prefix: str) -> None:
        """Forget a folder, and remove it."""
        for key in [key for key in self._held if key.startswith(f"{prefix.rstrip('/')}/")]:
            del self._held[key]
        await super().delete_dir(prefix)
