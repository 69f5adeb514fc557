"""Arrays given to `fit`, kept on the device whole: only the numbers of their rows travel.

Keras itself shuffles, and cuts into batches. It does so with arrays of a kind that notes which rows
each slice of it holds; a block of batches is then gathered on the device. Shuffled rows are not even
copied on the host: what Keras hands on has their shape and dtype, and no number in it is one of theirs.
That each batch is known again is checked, so that nobody ever trains on such numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from tailrace.errors import ProgramError
from tailrace.feeds.device_dataset import MOST_BYTES
from tailrace.feeds.transfer import put

ONCE_BYTES = 64 << 20
"""Arrays that are read once only are kept on the device up to this size: larger ones had better move
while the device works."""


_UNKNOWN = (
    "Arrays given to fit are kept on the device, and shuffled batches of them on the host are empty. "
    "This version of Keras, or a program around it, took one for data. Switch it off: "
    "model.set_infeed_queue_options(resident=False)."
)


class Slice(np.ndarray):
    """Rows of an array. Whatever is made of it in turn is not noted, and so not taken for rows."""

    source: np.ndarray | None = None
    """The array it is of."""
    rows: Any = None
    """Which rows of it these are: a slice, or their numbers."""


class Rows(np.ndarray):
    """An array whose slices know what they are; those of whole rows chosen by number are empty."""

    _empty: np.ndarray | None = None

    def __getitem__(self, index: Any) -> Any:
        """A slice."""
        if isinstance(index, slice) and _is_plain(index, len(self)):
            found = super().__getitem__(index).view(Slice)
        elif isinstance(index, np.ndarray) and index.ndim == 1 and index.dtype.kind == "i":
            if self._empty is None or len(self._empty) != len(index):
                self._empty = _empty(self, len(index))
            found = self._empty.view(Slice)
        else:
            return self.view(np.ndarray)[index]
        found.source, found.rows = self, index
        return found


def _is_plain(index: slice, length: int) -> bool:
    """Whether a slice is of rows one after another, counted from the start."""
    start, stop = index.start, index.stop
    return (
        index.step is None
        and start is not None
        and stop is not None
        and 0 <= start < stop <= length
    )


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
    def of(cls, source: np.ndarray, numbers: np.ndarray) -> RowNumbers:
        """Numbers of rows of an array."""
        made = numbers.view(cls)
        made.source = source
        return made

    def elements(self) -> np.ndarray:
        """The rows."""
        assert self.source is not None
        return self.source.view(np.ndarray)[self.view(np.ndarray)]


def source_of(leaf: Any) -> np.ndarray | None:
    """The array that a leaf of a batch is a slice of, if it is one."""
    return leaf.source if type(leaf) is Slice else None


def data_of(leaf: Any) -> np.ndarray:
    """What a leaf of a batch holds, wherever it is."""
    source = source_of(leaf)
    if source is None or isinstance(leaf.rows, slice):
        return leaf.view(np.ndarray)
    return source.view(np.ndarray)[leaf.rows]


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
        arrays: all that Keras was given.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._count, self._different = len(arrays), _different(arrays)
        self._kept: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def sources(self, leaves: Sequence[Any]) -> list[np.ndarray | None]:
        """For each leaf of a batch the array that it is a slice of; None if it is none."""
        found = [source_of(leaf) for leaf in leaves]
        ours = [source for source in found if source is not None]
        # More of them are all right: Keras repeats one array of weights for several outputs.
        if len(ours) < self._count or _different(ours) < self._different:
            raise ProgramError(_UNKNOWN)
        return found

    def gathered(self, block: Sequence[np.ndarray], forms: Any, device: Any) -> tuple[Any, ...]:
        """The leaves of a block on the device: rows of the arrays there, and what else there is.

        Args:
            block: for each leaf numbers of rows, the same for all that have them, or the leaf itself.
            forms: the dtype, and shape, that a batch has.
            device: where to.
        """
        rows = {n: leaf for n, leaf in enumerate(block) if isinstance(leaf, RowNumbers)}
        made = {n: put(leaf, device) for n, leaf in enumerate(block) if n not in rows}
        arrays = [self._on_device(leaf.source, forms[n].dtype, device) for n, leaf in rows.items()]
        numbers = next(iter(rows.values())).view(np.ndarray)
        made.update(zip(rows, _gather(arrays, jax.device_put(numbers, device)), strict=True))
        return tuple(made[n] for n in range(len(block)))

    def _on_device(self, source: Any, dtype: Any, device: Any) -> Any:
        key = (source.ctypes.data, source.shape, source.strides, source.dtype, device)
        if key not in self._kept:
            whole = put(source.view(np.ndarray).astype(dtype, copy=False), device)
            self._kept[key] = (source, whole)  # with the source: its memory stays its own
        return self._kept[key][1]


def _different(arrays: Sequence[np.ndarray]) -> int:
    """How many arrays there are, the same ones counted once."""
    return len({array.ctypes.data for array in arrays})


def same_rows(leaves: Sequence[Any]) -> Any:
    """The rows that slices hold of their arrays: those of one batch all hold the same."""
    rows = getattr(leaves[0], "rows", None)
    for leaf in leaves:
        if type(leaf) is not Slice or rows is None or not _equal(leaf.rows, rows):
            raise ProgramError(_UNKNOWN)
    return rows


def _equal(one: Any, other: Any) -> bool:
    """Whether rows are the same; for all leaves of a batch, Keras gives one and the same object."""
    return one is other or (type(one) is type(other) and bool(np.all(one == other)))


def numbers_of(batches: Sequence[Any]) -> np.ndarray:
    """The numbers of the rows of some batches, a batch to a row; batches are of one size.

    >>> numbers_of([slice(4, 6), slice(8, 10)])
    array([[4, 5],
           [8, 9]], dtype=int32)
    """
    if all(isinstance(rows, slice) for rows in batches):
        starts = np.array([rows.start for rows in batches], np.int32)
        return starts[:, None] + np.arange(batches[0].stop - batches[0].start, dtype=np.int32)
    return np.stack(batches).astype(np.int32, copy=False)


@jax.jit
def _gather(arrays: list[Any], rows: Any) -> list[Any]:
    return [jnp.take(array, rows, axis=0, mode="clip") for array in arrays]
