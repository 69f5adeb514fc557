"""Batches of arrays that are on the device: only row indices are computed on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tailrace.base.spans.span import span
from tailrace.base.trees import Tree
from tailrace.feeds.feed import Staged
from tailrace.keras.data.batch_source import Block, Form, form_of, too_short
from tailrace.keras.data.resident_arrays import BatchRows, RowNumbers, Rows, numbers_of


class ResidentBatches:
    """The batches of one epoch, in blocks; with the methods of `Batches`.

    Args:
        iterator: Keras' iterator over the same arrays, which identifies the epoch; it is not read.
        shape: converts a batch to the element that programs see.
        forms: the forms seen so far; kept by the caller.
        rows: the arrays.
    """

    failure: Exception | None = None

    def __init__(
        self,
        iterator: Iterator[Any],
        shape: Callable[[Any], Any],
        forms: dict[Any, Form],
        rows: Rows,
    ) -> None:
        self.iterator = iterator
        self._shape, self._forms, self._rows = shape, forms, rows
        self._epoch = rows.epoch()
        self._held: BatchRows | None = None

    def bytes_per_batch(self) -> int:
        """The size of a batch."""
        rows = self._rows
        return sum(array.nbytes // max(1, len(array)) for array in rows.arrays) * rows.batch_size

    def take(
        self, count: int, replicas: int, sharding: jax.sharding.Sharding, ahead: int, room: int = 0
    ) -> Block | None:
        """Up to `count` batches of one size, padded to `room`; None at the end."""
        del ahead  # nothing is read
        taken = self._next_of_one_size(count)
        if not taken:
            return None
        form = self._form(taken[0])
        if max(count, room) == 1:  # transferred with the call, as in Keras
            alone = form.alone(jax.tree.leaves(self._rows.batch(taken[0])))
            return Block(form, 1, Staged(list(alone), alone, 1, replicas), sharding)
        numbers = numbers_of(taken)
        arrays = self._leaves(self._rows.data, form)
        # Numbers in place of rows: who needs the elements of a step (a guard, a replay) looks them
        # up.
        host: list[Any] = [RowNumbers.of(array, numbers) for array, _ in arrays]
        # Padded, so that a short block runs in the program of the long ones.
        padded = np.pad(numbers, ((0, max(count, room) - len(taken)), (0, 0)), mode="edge")
        with span("infeed copy", bytes=padded.nbytes):
            device = self._rows.gathered(padded, arrays, sharding)
        return Block(form, len(taken), Staged(host, tuple(device), len(taken), replicas), sharding)

    def next_of(self, form: Form) -> tuple[np.ndarray, ...] | None:
        """The next batch as the elements of one iteration, if it has this form; None otherwise."""
        taken = self._next_of_one_size(1)
        if not taken:
            return None
        if self._form(taken[0]) is not form:
            self._held = taken[0]
            return None
        return form.alone(jax.tree.leaves(self._rows.batch(taken[0])))

    def read_next(self) -> None:
        """Do nothing: the rows are on the device."""

    def skip(self, count: int) -> None:
        """Skip batches that were used before."""
        for number in range(count):
            if next(self._epoch, None) is None:
                raise too_short(number, count)

    def close(self) -> None:
        """Do nothing: there is no thread."""

    def _next_of_one_size(self, count: int) -> list[BatchRows]:
        taken: list[BatchRows] = []
        while len(taken) < count:
            rows, self._held = self._held, None
            rows = next(self._epoch, None) if rows is None else rows
            if rows is None:
                break
            if taken and _size(rows) != _size(taken[0]):
                self._held = rows
                break
            taken.append(rows)
        return taken

    def _form(self, rows: BatchRows) -> Form:
        leaves, structure = jax.tree.flatten(self._rows.data)
        # The last batch of an epoch may be smaller, and then has another form.
        key = (structure, _size(rows), *[(leaf.shape[1:], leaf.dtype) for leaf in leaves])
        if key not in self._forms:
            self._forms[key] = form_of(self._rows.batch(rows), self._shape, self._forms.values())
        return self._forms[key]

    def _leaves(self, batch: Tree, form: Form) -> list[tuple[Any, Any]]:
        """The leaves of a batch in the order of an element, each with its form."""
        leaves = jax.tree.leaves(batch)
        return [(leaves[n], spec) for n, spec in zip(form.order, form.spec.leaves, strict=True)]


def _size(rows: BatchRows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)
