"""Iterators of TensorFlow 1: `tf.data.make_one_shot_iterator(dataset).get_next()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tailrace.compat.ipu.errors import FailedPreconditionError, OutOfRangeError
from tailrace.compat.ipu.graph.deferred import Deferred, Feed, Operation, computing, describing
from tailrace.compat.tensorflow.operations.table import leaves, mapped


class Iterator:
    """The elements of a dataset; each run of a session takes the next one.

    Args:
        dataset: a dataset of TensorFlow.
        started: whether it needs no initializer.
    """

    def __init__(self, dataset: Any, started: bool) -> None:
        self._dataset = dataset
        self._elements = iter(dataset) if started else None

    @property
    def initializer(self) -> Operation:
        """An operation that begins with the first element (again)."""
        return Operation("iterator initializer", self._begin)

    def _begin(self) -> None:
        self._elements = iter(self._dataset)

    def get_next(self, name: str | None = None) -> Any:
        """The next element: in a graph that of each run, elsewhere that of now.

        Raises:
            OutOfRangeError: there is none.
            FailedPreconditionError: the initializer has not run.
        """
        del name
        if not describing():
            return mapped(np.asarray, self._next())
        whole = Deferred(lambda _: [np.asarray(leaf) for leaf in leaves(self._next())], "get_next")
        numbers = iter(range(len(list(leaves(self._dataset.element_spec)))))
        return mapped(lambda _: whole[next(numbers)], self._dataset.element_spec)

    def _next(self) -> Any:
        if self._elements is None:
            raise FailedPreconditionError(
                "The iterator has not begun. Run its initializer first: sess.run(it.initializer)."
            )
        with computing(Feed()):
            try:
                return next(self._elements)
            except StopIteration:
                raise OutOfRangeError(
                    "End of sequence: the dataset has no more elements."
                ) from None


def make_one_shot_iterator(dataset: Any) -> Iterator:
    """The elements of a dataset, once."""
    return Iterator(dataset, started=True)


def make_initializable_iterator(dataset: Any, shared_name: str | None = None) -> Iterator:
    """The elements of a dataset, from when the initializer is run."""
    del shared_name
    return Iterator(dataset, started=False)


ITERATORS: dict[str, Callable[..., Any]] = {
    "make_initializable_iterator": make_initializable_iterator,
    "make_one_shot_iterator": make_one_shot_iterator,
}
