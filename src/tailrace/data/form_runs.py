"""A dataset as runs of elements of equal shapes: usually one run and a smaller last batch.

Programs are compiled for elements of one shape. `evaluate` and `predict`, which must use every row,
read a dataset run by run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from tailrace.base.trees import Tree, leaves_with_paths, map_leaves
from tailrace.data.adapters import as_dataset
from tailrace.data.batches import Batches
from tailrace.data.dataset import Dataset


def form_runs(dataset: object) -> Iterator[Any]:
    """Split `dataset` into consecutive datasets whose elements have equal shapes.

    Each must be read to its end before the next is requested.

    >>> import numpy as np
    >>> [len(list(run)) for run in form_runs([(np.ones(4),), (np.ones(4),), (np.ones(3),)])]
    [2, 1]
    """
    source = as_dataset(dataset)
    if source.fast is not None:
        yield from _parts_of_arrays(source.fast.keeping_rows())
        return
    # As a stream, not grouped in advance: the dataset may be endless, or larger than memory.
    run = _Run(source.name, _elements(source))
    run.when_empty = source.when_empty
    yield run
    # Set when the run before was read to its end: that is why runs must be read in order.
    while run.following is not None:
        run = _Run(source.name, chain([run.following], run.elements), run.first + run.count)
        yield run


def _elements(source: Dataset) -> Iterator[Tree]:
    """The elements of a dataset, which is opened by who reads them.

    A dataset that raises or blocks when it is opened is then named, like one that does so later.
    """
    # Not `yield from`, which would close an iterator of the user's with this one.
    for element in source.iterate():  # noqa: UP028
        yield element


class _Run(Dataset):
    """The elements of an iterator while they have the shapes of the first one."""

    restartable = False

    def __init__(self, name: str, elements: Iterator[Tree], first: int = 0) -> None:
        self.name, self.elements, self.first, self.count = name, elements, first, 0
        self.following: Tree | None = None

    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """The elements; the first one of another shape is kept as `following`."""
        form = None
        for element in self.elements:
            found = _form(element)
            form = found if form is None else form
            if found != form:
                self.following = element
                return
            self.count += 1
            yield element


def _parts_of_arrays(batches: Batches) -> Iterator[Any]:
    """The full batches, still as a recipe, and the rest as one element."""
    whole, size = batches.whole_batches_per_epoch, batches.batch_size
    if batches.repeat or whole:
        yield dataclasses.replace(batches, drop_remainder=True)
    # With its indices from the recipe: full batches stay in the fast path, and only the last one is cut
    # by hand.
    rest = batches.order(0)[whole * size :]
    if not batches.drops and not batches.repeat and len(rest):
        yield [map_leaves(lambda leaf: np.take(leaf, rest, axis=0), batches.arrays)]


def _form(element: Tree) -> tuple[Any, ...]:
    return tuple(
        (path, np.shape(leaf), getattr(leaf, "dtype", type(leaf)))
        for path, leaf in leaves_with_paths(element)
    )
