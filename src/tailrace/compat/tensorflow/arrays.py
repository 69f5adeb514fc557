"""`tf.TensorArray`: rows written one by one, as one array with a row for each.

A loop of a program carries the array. Before the first write its rows have no form: until then it is a
name without a value for the loop (`control/symbols.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import DTypeLike, ShapeLike, TensorLike
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.tensorflow.dtypes import as_dtype, narrowed
from tailrace.errors import ProgramError
from tailrace.jaxprs.internals import Tracer


@jax.tree_util.register_pytree_node_class
class TensorArray:
    """Rows of one form, written and read by their number.

    Assign what `write` returns: `rows = rows.write(i, value)`. Rows that were never written are zeros.

    Args:
        dtype: the dtype of the rows.
        size: how many rows there are; known when the program is made.
        dynamic_size: whether a write past the last row adds rows; its number must be known, so a
            loop over values of the device needs `size`.
        element_shape: the shape of a row; None: that of the first that is written.
        **options: `clear_after_read`, `infer_shape`...: without effect.

    Raises:
        ProgramError: the size is a value of the device.

    >>> from tailrace.compat import tensorflow as tf
    >>> @tf.function
    ... def squares(x):
    ...     rows = tf.TensorArray(tf.float32, size=3)
    ...     for i in tf.range(3):
    ...         rows = rows.write(i, x[i] * x[i])
    ...     return rows.stack()
    >>> squares(tf.constant([1.0, 2.0, 3.0])).tolist()
    [1.0, 4.0, 9.0]
    """

    def __init__(
        self,
        dtype: DTypeLike,
        size: TensorLike = None,
        dynamic_size: bool | None = None,
        element_shape: ShapeLike = None,
        **options: Any,
    ) -> None:
        del options
        # The rows are one array, whose length is a part of its shape.
        if isinstance(size, Tracer):
            raise ProgramError(
                "The size of a tf.TensorArray must be known when the program is made. Received: a "
                "value of the device. Use a Python number, or a length of a shape: tf.shape(x)[0]."
            )
        self.dtype, self.dynamic_size = as_dtype(dtype), bool(dynamic_size)
        self._size = 0 if size is None else int(size)
        self._rows: Any = None
        # Known rows make it an array at once, which a loop can carry before the first write.
        if element_shape is not None and None not in tuple(element_shape):
            self._rows = jnp.zeros((self._size, *element_shape), narrowed(dtype))

    @property
    def is_written(self) -> bool:
        """Whether the form of its rows is known."""
        return self._rows is not None

    @property
    def element_shape(self) -> Any:
        """The shape of a row; None before the first write."""
        return None if self._rows is None else self._rows.shape[1:]

    def write(self, index: TensorLike, value: TensorLike, name: str | None = None) -> TensorArray:
        """The array with another row.

        Args:
            index: the number of the row.
            value: the row.
            name: without effect.

        Raises:
            IPUValueError: there is no such row.
            ProgramError: it should grow in a loop over values of the device.
        """
        del name
        row = self._row(value)
        rows = self._rows_like(row, index)
        return self._with(rows.at[index].set(row))

    def _rows_like(self, row: TensorLike, index: TensorLike) -> Any:
        """Rows, zeros at first, with the one that is written."""
        rows = self._rows
        if rows is None:
            rows = jnp.zeros((self._size, *row.shape), row.dtype)
        # Which row is written is known only when the program runs; how many there are must be known
        # now.
        if isinstance(index, Tracer):
            if self.dynamic_size:
                raise ProgramError(
                    "A tf.TensorArray with dynamic_size=True cannot grow in a loop over values of the "
                    "device: arrays of a program have one size. Give it the number of rows: "
                    "tf.TensorArray(dtype, size=n), without dynamic_size."
                )
            return rows
        missing = int(index) + 1 - rows.shape[0]
        if missing > 0 and not self.dynamic_size:
            raise IPUValueError(
                f"Tried to write to index {int(index)} but array is not resizeable and size is: "
                f"{rows.shape[0]}. Give a larger size=, or dynamic_size=True."
            )
        added = jnp.zeros((max(0, missing), *rows.shape[1:]), rows.dtype)
        return jnp.concatenate([rows, added]) if missing > 0 else rows

    def scatter(
        self, indices: TensorLike, value: TensorLike, name: str | None = None
    ) -> TensorArray:
        """The array with these rows.

        Args:
            indices: their numbers.
            value: the rows.
            name: without effect.
        """
        del name
        given = self._row(value)
        known = not isinstance(indices, Tracer)
        # The largest index decides whether the array must grow.
        last = np.max(np.asarray(indices)) if known else jnp.max(jnp.asarray(indices))
        rows = self._rows_like(given[0], last)
        return self._with(rows.at[jnp.asarray(indices)].set(given))

    def unstack(self, value: TensorLike, name: str | None = None) -> TensorArray:
        """The array whose rows are those of a tensor.

        Args:
            value: the tensor.
            name: without effect.
        """
        del name
        return self._with(self._row(value))

    def read(self, index: TensorLike, name: str | None = None) -> Any:
        """A row.

        Args:
            index: its number.
            name: without effect.
        """
        del name
        return self._written()[index]

    def gather(self, indices: TensorLike, name: str | None = None) -> Any:
        """Rows.

        Args:
            indices: their numbers.
            name: without effect.
        """
        del name
        return self._written()[jnp.asarray(indices)]

    def stack(self, name: str | None = None) -> Any:
        """All rows, as one tensor.

        Args:
            name: without effect.

        Raises:
            IPUValueError: nothing was written.
        """
        del name
        return self._written()

    def concat(self, name: str | None = None) -> Any:
        """All rows, one after the other.

        Args:
            name: without effect.
        """
        del name
        rows = self._written()
        return rows.reshape(-1, *rows.shape[2:])

    def size(self, name: str | None = None) -> Any:
        """How many rows there are.

        Args:
            name: without effect.
        """
        del name
        # numpy's number, so that a length computed from it stays known in a program (`lengths.py`).
        return np.int32(self._size)

    def identity(self) -> TensorArray:
        """The array."""
        return self

    def mark_used(self) -> None:
        """Nothing: what is not used is not computed."""

    close = mark_used

    def _row(self, value: TensorLike) -> Any:
        return jnp.asarray(value, narrowed(self.dtype))

    def _written(self) -> Any:
        if self._rows is None:
            raise IPUValueError(
                "Nothing was written to this tf.TensorArray. Assign what `write` returns: "
                "rows = rows.write(i, value)."
            )
        return self._rows

    def _with(self, rows: TensorLike) -> TensorArray:
        # Outside of programs TensorFlow changes the object; in one, that would leak into other traces.
        found = self if current() is None else object.__new__(TensorArray)
        found.dtype, found.dynamic_size = self.dtype, self.dynamic_size
        found._rows, found._size = rows, rows.shape[0]
        return found

    # -- a node of JAX's trees --------------------------------------------------------------------

    def tree_flatten(self) -> Any:
        """The array, and what stays."""
        # The size is part of the structure, so a branch or loop that changes it is refused.
        return (self._rows,), (self.dtype, self.dynamic_size, self._size)

    @classmethod
    def tree_unflatten(cls, kept: tuple[Any, bool, int], children: tuple[Any]) -> TensorArray:
        """One with another array.

        Args:
            kept: what stays.
            children: the array.
        """
        found = object.__new__(cls)
        found.dtype, found.dynamic_size, found._size = kept
        (found._rows,) = children
        return found
