"""Arrays given to `fit`, kept on the device whole: only the numbers of their rows travel.

Keras itself shuffles, and cuts into batches. It does so with arrays of a kind that notes which rows
each slice of it holds; a block of batches is then gathered on the device. Shuffled rows are not even
copied on the host: what Keras hands on has their shape and dtype, and no number in it is one of theirs.
That each batch is known again is checked, so that nobody ever trains on such numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from tailrace.errors import ProgramError
from tailrace.feeds.resident import MOST_BYTES
from tailrace.feeds.transfer import put

ONCE_BYTES = 64 << 20
"""Arrays that are read once only are kept on the device up to this size: larger ones had better move
while the device works."""


_UNKNOWN = (
    "Arrays given to fit are kept on the device, and shuffled batches of them on the host are empty. "
    "This version of Keras, or a program around it, took one for data. Switch it off: "
    "model.set_infeed_queue_options(resident=False)."
)


class Slice(NamedTuple):
    """What is noted of a slice: itself, the array it is of, and the numbers of its rows there."""

    itself: weakref.ref[np.ndarray]
    source: np.ndarray
    rows: Any


_slices: dict[int, Slice] = {}
"""Of the slices that are alive, by their ids."""


class Rows(np.ndarray):
    """An array whose slices are noted. They are plain arrays: those of whole rows chosen by number,
    empty ones."""

    def __getitem__(self, index: Any) -> Any:
        """A slice."""
        whole = self.view(np.ndarray)
        if isinstance(index, slice):
            return _noted(whole[index], whole, range(*index.indices(len(whole))))
        if isinstance(index, np.ndarray) and index.ndim == 1 and index.dtype.kind == "i":
            return _noted(_empty(whole, len(index)), whole, index)
        return whole[index]


def _noted(found: np.ndarray, source: np.ndarray, rows: Any) -> np.ndarray:
    key = id(found)
    # `source` is made anew for each slice, from one and the same memory.
    _slices[key] = Slice(weakref.ref(found, lambda _: _slices.pop(key, None)), source, rows)
    return found


def _empty(like: np.ndarray, count: int) -> np.ndarray:
    """Something of the shape and dtype of rows, which takes no memory and no time."""
    strange = np.nan if like.dtype.kind == "f" else 1 if like.dtype.kind == "b" else 99
    shape = (count, *like.shape[1:])
    return np.ndarray(shape, like.dtype, np.full((), strange, like.dtype), 0, (0,) * len(shape))


class RowNumbers(np.ndarray):
    """Numbers of rows, which know the array that has those rows; so do parts of them."""

    source: np.ndarray | None

    def __array_finalize__(self, made_from: Any) -> None:
        """Called by numpy for each new array of this kind."""
        self.source = getattr(made_from, "source", None)

    @classmethod
    def of(cls, source: np.ndarray, shape: tuple[int, ...]) -> RowNumbers:
        """Room for so many of them."""
        made = np.empty(shape, np.int32).view(cls)
        made.source = source
        return made

    def elements(self) -> np.ndarray:
        """The rows."""
        assert self.source is not None
        return self.source[self.view(np.ndarray)]


def slice_of(leaf: Any) -> Slice | None:
    """What was noted of a leaf of a batch, if it is a slice."""
    found = _slices.get(id(leaf))
    return found if found is not None and found.itself() is leaf else None


def rows_of(leaf: Any) -> Any:
    """The numbers of the rows that a slice holds."""
    found = slice_of(leaf)
    if found is None:
        raise ProgramError(_UNKNOWN)
    return found.rows


def data_of(leaf: Any) -> np.ndarray:
    """What a leaf of a batch holds, wherever it is."""
    found = slice_of(leaf)
    if found is None or isinstance(found.rows, range):
        return leaf
    return found.source[found.rows]


def keeps(data: Any, epochs: int) -> bool:
    """Whether it pays to keep arrays on the device: it has a memory of its own, and they fit."""
    if jax.default_backend() == "cpu":
        return False
    size = sum(leaf.nbytes for leaf in arrays_in(data))
    return size <= (MOST_BYTES if epochs > 1 else ONCE_BYTES)


def are_arrays(data: Any) -> bool:
    """Whether there is nothing but arrays of numpy, of which Keras takes slices as they are."""

    def sliced(leaf: Any) -> bool:
        if type(leaf) is not np.ndarray or not leaf.ndim or leaf.dtype.kind not in "fiub":
            return False
        return leaf.dtype.kind != "f" or leaf.dtype == keras.config.floatx()

    return all(map(sliced, arrays_in(data)))


def arrays_in(data: Any) -> list[Any]:
    """What stands in a tree of arrays, or whatever it is instead."""
    return [leaf for leaf in keras.tree.flatten(data) if leaf is not None]


def as_rows(data: Any) -> Any:
    """The same arrays, of the kind whose slices are noted."""
    return keras.tree.map_structure(
        lambda leaf: leaf.view(Rows) if type(leaf) is np.ndarray else leaf, data
    )


class Resident:
    """The arrays that are on the device for the time of one fit.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def sources(self, leaves: Sequence[Any]) -> list[np.ndarray | None]:
        """For each leaf of a batch the array that it is a slice of; None if it is none."""
        found = [slice_of(leaf) for leaf in leaves]
        if sum(one is not None for one in found) != self._count:
            raise ProgramError(_UNKNOWN)
        return [None if one is None else one.source for one in found]

    def gathered(self, block: Sequence[np.ndarray], forms: Any, device: Any) -> tuple[Any, ...]:
        """The leaves of a block on the device: rows of the arrays there, and what else there is.

        Args:
            block: for each leaf numbers of rows, or the leaf itself.
            forms: the dtype, and shape, that a batch has.
            device: where to.
        """
        rows = {n: leaf for n, leaf in enumerate(block) if isinstance(leaf, RowNumbers)}
        made = {n: put(leaf, device) for n, leaf in enumerate(block) if n not in rows}
        arrays = [self._on_device(leaf.source, forms[n].dtype, device) for n, leaf in rows.items()]
        numbers = jax.device_put([leaf.view(np.ndarray) for leaf in rows.values()], device)
        made.update(zip(rows, _gather(arrays, numbers), strict=True))
        return tuple(made[n] for n in range(len(block)))

    def _on_device(self, source: Any, dtype: Any, device: Any) -> Any:
        key = (source.ctypes.data, source.shape, source.strides, source.dtype, device)
        if key not in self._kept:
            whole = put(source.astype(dtype, copy=False), device)
            self._kept[key] = (source, whole)  # with the source: its memory stays its own
        return self._kept[key][1]


@jax.jit
def _gather(arrays: list[Any], rows: list[Any]) -> list[Any]:
    pairs = zip(arrays, rows, strict=True)
    return [jnp.take(array, number, axis=0, mode="clip") for array, number in pairs]
