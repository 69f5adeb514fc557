"""Arrays given to `fit`, kept on the device: only row indices are transferred.

Keras cuts arrays into batches by a simple rule: rows in order, or in the order of a permutation from
`np.random`. Here the same rule gives row indices, and blocks of batches are gathered on the device.
Keras' iterator over the arrays only marks the start of an epoch; it is not read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from tailrace.base.array_like import DTypeLike
from tailrace.base.trees import Tree
from tailrace.data.dtypes import narrowed
from tailrace.devices import devices
from tailrace.devices.devices import Device
from tailrace.feeds.device_dataset import MOST_BYTES
from tailrace.feeds.transfer import put

ONCE_BYTES = 64 << 20
"""The largest arrays that are kept on the device if they are read only once: larger ones are better
transferred while the device computes."""


BatchRows = np.ndarray | slice
"""The rows of one batch: their indices, or a range of them."""


@dataclasses.dataclass(eq=False)
class Rows:
    """The arrays that one fit reads, and the rule of its batches.

    Attributes:
        data: the arrays as `(x, y, sample_weight)`, each a tree or None.
        batch_size: the rows per batch; the last one of an epoch may have fewer.
        shuffle: as in Keras: True, False, or "batch" for a shuffle within each batch.
    """

    data: tuple[Any, Any, Any]
    batch_size: int
    shuffle: Any
    _kept: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> list[np.ndarray]:
        """All arrays, in the order of a batch's leaves."""
        return jax.tree.leaves(self.data)

    def epoch(self) -> Iterator[BatchRows]:
        """The rows of each batch: a slice, or their indices.

        >>> list(Rows((np.zeros(5), None, None), 2, False).epoch())
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
        """
        count = len(self.arrays[0])
        whole = self.shuffle and self.shuffle != "batch"
        # From NumPy's global generator, in one call at the start of an epoch: so the order, and
        # everything drawn after it, is that of Keras.
        order = np.random.permutation(count) if whole else None
        for start in range(0, count, self.batch_size):
            stop = min(start + self.batch_size, count)
            if order is not None:
                yield order[start:stop]
            elif self.shuffle:
                yield np.random.permutation(stop - start) + start
            else:
                yield slice(start, stop)

    def batch(self, rows: BatchRows) -> Tree:
        """A batch on the host."""
        return jax.tree.map(lambda array: array[rows], self.data)

    def gathered(
        self,
        numbers: np.ndarray,
        arrays: Sequence[tuple[np.ndarray, jax.ShapeDtypeStruct]],
        device: Device,
    ) -> list[jax.Array]:
        """Some rows of arrays, on the device: [*numbers.shape, *row] each.

        Args:
            numbers: the indices of the rows.
            arrays: some of these arrays, each with its dtype in a program.
            device: the device.
        """
        kept = [self._on_device(array, spec.dtype, device) for array, spec in arrays]
        return _gather(kept, jax.device_put(numbers, device))

    def _on_device(self, array: np.ndarray, dtype: DTypeLike, device: Device) -> jax.Array:
        key = (id(array), dtype, device)  # the arrays are kept alive here, so ids stay valid
        if key not in self._kept:
            self._kept[key] = put(narrowed(array, np.dtype(dtype)), device)
        return self._kept[key]


def rows_of(call: dict[str, Any]) -> Rows | None:
    """The data of `fit`, if they are only NumPy arrays whose rows are used unchanged."""
    x, y, weights = call["x"], call["y"], call["sample_weight"]
    arrays = [leaf for leaf in keras.tree.flatten((x, y, weights)) if leaf is not None]
    if call["validation_split"] or not arrays or not all(map(_is_sliced, arrays)):
        return None
    count = len(arrays[0])
    if any(len(array) != count for array in arrays):
        return None  # Keras reports the error
    nested = isinstance(y, list | tuple | dict)
    if call["class_weight"] is not None:
        if nested or y is None or weights is not None:
            return None
        weights = _weights_of_classes(y, call["class_weight"])
    elif nested and isinstance(weights, np.ndarray):  # one for all outputs
        weights = keras.tree.map_structure(lambda _: weights, y)
    size, steps = call["batch_size"], call["steps_per_epoch"]
    if not size:
        size = math.ceil(count / steps) if steps else 32
    return Rows((x, y, weights), size, call["shuffle"])


def _is_sliced(leaf: object) -> bool:
    """Whether Keras passes slices of an array on unchanged."""
    if type(leaf) is not np.ndarray or not leaf.ndim or leaf.dtype.kind not in "fiub":
        return False
    # Keras casts other floats, batch by batch.
    return leaf.dtype.kind != "f" or leaf.dtype == keras.config.floatx()


def _weights_of_classes(y: np.ndarray, class_weight: dict[int, float]) -> np.ndarray:
    """A weight per example, from weights per class; other classes have weight 1."""
    if y.ndim > 1:
        y = y.argmax(-1) if y.shape[-1] != 1 else y.squeeze(-1)
    found = [class_weight.get(int(one), 1.0) for one in np.round(y)]
    return np.array(found, keras.config.floatx())


class RowNumbers(np.ndarray):
    """Row indices with a reference to their array, which slices of them keep."""

    source: np.ndarray | None

    def __array_finalize__(self, made_from: np.ndarray | None) -> None:
        """Called by numpy for each new array of this kind."""
        self.source = getattr(made_from, "source", None)

    @classmethod
    def of(cls, source: np.ndarray, numbers: np.ndarray) -> RowNumbers:
        """Row indices of an array."""
        made = numbers.view(cls)
        made.source = source
        return made

    def elements(self) -> np.ndarray:
        """The rows."""
        assert self.source is not None
        return self.source[self.view(np.ndarray)]


def keeps(arrays: Sequence[np.ndarray], epochs: int) -> bool:
    """Whether it pays to keep arrays on the device: its memory is separate, and they fit."""
    if devices.platform() == "cpu":
        return False
    size = sum(array.nbytes for array in arrays)
    return size <= (MOST_BYTES if epochs > 1 else ONCE_BYTES)


def numbers_of(batches: Sequence[Any]) -> np.ndarray:
    """The row indices of some batches of one size, [batches, rows].

    >>> numbers_of([slice(4, 6), slice(8, 10)])
    array([[4, 5],
           [8, 9]], dtype=int32)
    """
    if all(isinstance(rows, slice) for rows in batches):
        starts = np.array([rows.start for rows in batches], np.int32)
        return starts[:, None] + np.arange(batches[0].stop - batches[0].start, dtype=np.int32)
    return np.stack(batches).astype(np.int32, copy=False)


@jax.jit
def _gather(arrays: list[jax.Array], rows: jax.Array) -> list[jax.Array]:
    # "clip" is plain gathering; the default would compare every index, to return NaN for one
    # outside.
    return [jnp.take(array, rows, axis=0, mode="clip") for array in arrays]
