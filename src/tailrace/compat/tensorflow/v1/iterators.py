"""Iterators of TensorFlow 1: `tf.data.make_one_shot_iterator(dataset).get_next()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tailrace.compat.arguments import DatasetLike
from tailrace.compat.ipu.errors import FailedPreconditionError, OutOfRangeError
from tailrace.compat.ipu.graph.deferred import Deferred, Feed, Operation, computing, describing
from tailrace.compat.nests import leaves, map_leaves, rebuild


class Iterator:
    """The elements of a dataset; each run of a session takes the next one.

    Args:
        dataset: a dataset of TensorFlow.
        started: whether it needs no initializer.
    """

    def __init__(self, dataset: DatasetLike, started: bool) -> None:
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
            return map_leaves(np.asarray, self._next())
        whole = Deferred(lambda _: [np.asarray(leaf) for leaf in leaves(self._next())], "get_next")
        spec = self._dataset.element_spec
        # One description for all parts: a run takes one element, however many of its parts it fetches.
        return rebuild(spec, (whole[number] for number in range(len(leaves(spec)))))

    def _next(self) -> Any:
        if self._elements is None:
            raise FailedPreconditionError(
                "The iterator has not begun. Run its initializer first: sess.run(it.initializer)."
            )
        # A dataset may call our operations, which must be computed here, not described.
        with computing(Feed()):
            try:
                return next(self._elements)
            except StopIteration:
                raise OutOfRangeError(
                    "End of sequence: the dataset has no more elements."
                ) from None


def make_one_shot_iterator(dataset: DatasetLike) -> Iterator:
    """The elements of a dataset, once."""
    return Iterator(dataset, started=True)


def make_initializable_iterator(dataset: DatasetLike, shared_name: str | None = None) -> Iterator:
    """The elements of a dataset, from when the initializer is run."""
    del shared_name
    return Iterator(dataset, started=False)


ITERATORS: dict[str, Callable[..., Any]] = {
    "make_initializable_iterator": make_initializable_iterator,
    "make_one_shot_iterator": make_one_shot_iterator,
}
