"""Memory for blocks of elements, used again when nobody looks at it any more.

Fresh memory costs more than copying into it: the system maps and clears it page by page. A block is
lent out as an array; when the last array on it is gone, and with it what JAX holds of it, the memory
goes back into the pool, wherever that happens.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import numpy as np

# XLA on the CPU uses an array as it is, without copying it, if it starts on such a boundary.
_ALIGNMENT = 64
LENT_FROM = 1 << 20
"""Smaller blocks come from the allocator, which maps nothing for them."""
MOST_IDLE = 1 << 30
"""Bytes that wait to be used again; what would be more is given back to the system."""


class _Pool:
    """Memory that waits to be used again. Its methods may be interrupted by themselves at any point:
    the garbage collector returns memory whenever it likes, so nothing here takes a lock."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[np.ndarray]] = {}
        self._older: dict[int, deque[np.ndarray]] = {}

    @property
    def idle_bytes(self) -> int:
        """How much waits."""
        waiting = [*self._idle.copy().items(), *self._older.copy().items()]
        return sum(size * len(same) for size, same in waiting)

    def take(self, size: int) -> np.ndarray:
        """Memory of a size: some that waits, or fresh."""
        for waiting in (self._idle, self._older):
            with contextlib.suppress(KeyError, IndexError):
                return waiting[size].pop()
        return np.empty(size, np.uint8)

    def give_back(self, memory: np.ndarray) -> None:
        """Nobody uses it any more."""
        if self.idle_bytes + memory.nbytes <= MOST_IDLE:
            self._idle.setdefault(memory.nbytes, deque()).append(memory)

    def trim(self) -> None:
        """Give back to the system what was not taken since the last time."""
        self._older, self._idle = self._idle, {}


class _Lent:
    """What the arrays on lent memory keep alive, and which returns it when they are gone."""

    def __init__(self, pool: _Pool, size: int) -> None:
        self._memory, self._give_back = pool.take(size), pool.give_back
        self.__array_interface__ = self._memory.__array_interface__

    def __del__(self) -> None:
        if MOST_IDLE is not None:  # at the end of the process it is, and nothing is used again
            self._give_back(self._memory)


_pool = _Pool()


def trim() -> None:
    """Give back to the system what was not used since the last time this was called."""
    _pool.trim()


def idle_bytes() -> int:
    """How many bytes wait to be used again."""
    return _pool.idle_bytes


def allocate(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory with any contents, which a CPU device uses without a copy.

    Never write to it again once a device has it: the device may alias it.

    >>> allocate((3, 2), np.float32).shape
    (3, 2)
    """
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    room = size + _ALIGNMENT
    raw = np.asarray(_Lent(_pool, room)) if size >= LENT_FROM else np.empty(room, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
