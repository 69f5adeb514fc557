"""Values appended execution by execution: in compact memory, or in a file."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tailrace.errors import RunError

BLOCK = 1 << 18
"""The bytes that are moved to the file at once; fewer stay in memory."""


class ValueFile:
    """A file without a name, which holds the values of long histories.

    It cannot be found by a path, so nobody can remove or replace it, and it is gone when the process
    ends.

    Args:
        opened: opens it, and returns its handle; called when it is first needed.
    """

    def __init__(self, opened: Callable[[], int]) -> None:
        self._opened, self._handle, self._end = opened, -1, 0
        self._refused = False

    def put(self, pieces: Sequence[np.ndarray]) -> StoredValues | None:
        """Append the values of some pieces; None if the file cannot be made or is full.

        After that it takes no more: a caller that joined a growing history for every attempt would
        spend its time on copies.
        """
        if self._refused:
            return None
        values = np.concatenate(pieces)
        try:
            if self._handle < 0:
                self._handle = self._opened()
                weakref.finalize(self, os.close, self._handle)
            data, start = values.tobytes(), self._end
            # One write may be cut short, on a full disk: the next one gives the error then.
            done = 0
            while done < len(data):
                done += os.pwrite(self._handle, memoryview(data)[done:], start + done)
        except OSError:
            self._refused = True
            return None
        self._end = start + len(data)
        return StoredValues(self, start, values.shape, values.dtype)

    def get(self, start: int, count: int) -> bytes:
        """Bytes that were appended."""
        parts: list[bytes] = []
        while count:
            try:
                part = os.pread(self._handle, count, start)
            except OSError as error:
                raise _unreadable(error.strerror or str(error)) from error
            if not part:
                raise _unreadable("it has become shorter")
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return b"".join(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredValues:
    """Values in a file.

    Attributes:
        file: the file.
        start: their position in it.
        shape: their shape.
        dtype: their dtype.
    """

    file: ValueFile
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def read(self) -> np.ndarray:
        """The values."""
        count = int(np.prod(self.shape)) * self.dtype.itemsize
        return np.frombuffer(self.file.get(self.start, count), self.dtype).reshape(self.shape)


class Column:
    """Values appended execution by execution.

    The values of an execution are part of a larger buffer, taps included, which they would keep alive:
    so they are copied, and many short pieces are joined.
    """

    def __init__(self) -> None:
        self._pieces: list[np.ndarray | StoredValues] = []
        self._whole: np.ndarray | None = None

    def append(self, values: np.ndarray, file: ValueFile | None = None) -> None:
        """Append a copy of values; with a file, blocks of many values move there."""
        self._whole = None
        pieces = self._pieces
        pieces.append(np.array(values))
        # Joined pieces double in size, so each value is copied only a few times in all.
        while len(pieces) > 1 and len(pieces[-2]) <= len(pieces[-1]):
            before, last = pieces[-2:]
            if isinstance(before, StoredValues) or isinstance(last, StoredValues):
                break
            pieces[-2:] = [np.concatenate([before, last])]
        if file is not None:
            self._move(file)

    def _move(self, file: ValueFile) -> None:
        there = [piece for piece in self._pieces if isinstance(piece, StoredValues)]
        here = [piece for piece in self._pieces if not isinstance(piece, StoredValues)]
        if sum(piece.nbytes for piece in here) < BLOCK:
            return
        stored = file.put(here)
        if stored is not None:
            # One assignment: another thread may be reading.
            self._pieces = [*there, stored]

    @property
    def form(self) -> tuple[int, ...]:
        """The shape of the values of one step."""
        return self._pieces[0].shape[1:]

    def values(self) -> np.ndarray:
        """All of them, as one array."""
        pieces = self._pieces
        if len(pieces) == 1 and isinstance(pieces[0], np.ndarray):
            return pieces[0]
        # By its length too: another thread may append while this one reads the file.
        if self._whole is None or len(self._whole) != len(self):
            whole = _joined(pieces)
            if not any(isinstance(piece, StoredValues) for piece in pieces):
                pieces[:] = [whole]
                return whole
            # Until the next values come: after a fit, each access would read the file again.
            self._whole = whole
            return whole
        return self._whole

    def __len__(self) -> int:
        return sum(len(piece) for piece in self._pieces)

    def __getstate__(self) -> dict[str, Any]:
        # The file belongs to this process.
        return {"_pieces": [self.values()], "_whole": None}


def _joined(pieces: list[np.ndarray | StoredValues]) -> np.ndarray:
    count = sum(len(piece) for piece in pieces)
    dtype = np.result_type(*(piece.dtype for piece in pieces))
    whole, done = np.empty((count, *pieces[0].shape[1:]), dtype), 0
    # Piece by piece: two copies of a long history need not be in memory.
    for piece in pieces:
        there = piece.read() if isinstance(piece, StoredValues) else piece
        whole[done : done + len(there)] = there
        done += len(there)
    return whole


def _unreadable(why: str) -> RunError:
    return RunError(
        f"The values of this history are in a file of the run directory, which cannot be read any "
        f"more: {why}. tr.open_run reads what the run directory has of them."
    )
