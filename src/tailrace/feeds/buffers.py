"""Memory for blocks of elements, reused once no array refers to it.

Fresh memory costs more than copying into it: the system maps and clears it page by page. A block is
lent out as an array; when the last reference to it is gone, JAX's included, the memory returns to the
pool, in whichever thread that happens.
"""

# pyright: reportUnnecessaryComparison=false

from __future__ import annotations

import contextlib
from collections import deque

import numpy as np

from tailrace.base.array_like import DTypeLike

# XLA's CPU backend uses an array in place, without a copy, if it starts on such a boundary.
_ALIGNMENT = 64
LENT_FROM = 1 << 20
"""Smaller blocks come from the allocator, which need not map pages for them."""
MOST_IDLE = 1 << 30
"""The most bytes kept for reuse; the rest is returned to the system."""


class _Pool:
    """Memory kept for reuse. Its methods must be reentrant: the garbage collector may return memory at
    any point, even inside one of them, so nothing here takes a lock."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[np.ndarray]] = {}
        self._older: dict[int, deque[np.ndarray]] = {}

    @property
    def idle_bytes(self) -> int:
        """The bytes kept for reuse."""
        waiting = [*self._idle.copy().items(), *self._older.copy().items()]
        return sum(size * len(same) for size, same in waiting)

    def take(self, size: int) -> np.ndarray:
        """Memory of this size, reused or fresh."""
        for waiting in (self._idle, self._older):
            with contextlib.suppress(KeyError, IndexError):
                return waiting[size].pop()
        return np.empty(size, np.uint8)

    def give_back(self, memory: np.ndarray) -> None:
        """Return memory that is no longer in use."""
        if self.idle_bytes + memory.nbytes <= MOST_IDLE:
            self._idle.setdefault(memory.nbytes, deque()).append(memory)

    def trim(self) -> None:
        """Return to the system what was not reused since the last call."""
        # Two generations: what a fit still uses was taken and given back since the last call, and
        # stays.
        self._older, self._idle = self._idle, {}


class _Lent:
    """The owner of lent memory: arrays keep it alive, and it returns the memory when they are gone."""

    def __init__(self, pool: _Pool, size: int) -> None:
        self._memory, self._give_back = pool.take(size), pool.give_back
        self.__array_interface__ = self._memory.__array_interface__

    def __del__(self) -> None:
        if MOST_IDLE is not None:  # None while the interpreter shuts down
            self._give_back(self._memory)


_pool = _Pool()


def trim() -> None:
    """Return to the system what was not reused since the last call."""
    _pool.trim()


def idle_bytes() -> int:
    """The bytes kept for reuse."""
    return _pool.idle_bytes


def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Uninitialized memory that a CPU device can use without a copy.

    Never write to it again once a device has it: the device may alias it.

    >>> allocate((3, 2), np.float32).shape
    (3, 2)
    """
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    room = size + _ALIGNMENT
    raw = np.asarray(_Lent(_pool, room)) if size >= LENT_FROM else np.empty(room, np.uint8)
    # NumPy aligns to 16 bytes only, so the block begins a little further on.
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
