"""Arrays in memory as a deterministic stream of batches.

`Batches` is the recipe: the arrays and how to cut them. `BatchIterator` (batch_iterator.py) has a
position, which can be saved and restored. Batch p of the stream depends only on the recipe and p,
because epoch e is shuffled by a generator seeded with (seed, e). So it does not matter whether the
stream is read one batch at a time, many at once, or as indices into arrays on a device; nor where
reading stopped and resumed.
"""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np

from tailrace.data.batch_iterator import BatchIterator
from tailrace.data.counts import check_count
from tailrace.data.leaves import to_numpy
from tailrace.data.trees import (
    Tree,
    describe,
    leaf_called,
    leaves,
    leaves_with_paths,
    map_leaves,
    map_with_paths,
)
from tailrace.errors import DataError


class EndlessError(DataError, TypeError):
    """`len()` of an endless stream; a TypeError, so that `list()` ignores it."""


@dataclass(frozen=True, eq=False)
class Batches:
    """A recipe for batches over a tree of arrays; make it with `tr.batches`.

    Iterating it gives a new `BatchIterator` each time. The arrays are referenced, not copied (except
    that a shuffled array that is not contiguous is made so, once): do not write to them while they are
    read.
    """

    arrays: Tree
    batch_size: int
    _: KW_ONLY
    shuffle: bool = False
    seed: int = 0
    repeat: bool = False
    drop_remainder: bool | None = None
    left_out: tuple[int, ...] = ()
    """Rows that no batch contains; see `without`."""
    num_examples: int = field(init=False)
    """The number of examples: the common leading size of the arrays, without the rows left out."""
    leaves: tuple[np.ndarray, ...] = field(init=False, repr=False)
    """The arrays as a flat list, in tree order."""

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size, at_least=1)
        check_count("seed", self.seed, at_least=0)
        arrays = map_with_paths(_as_array, self.arrays)
        num_rows = _common_leading_size(leaves_with_paths(arrays))
        left_out = tuple(sorted({int(row) for row in self.left_out}))
        if left_out and not 0 <= left_out[0] <= left_out[-1] < num_rows:
            raise DataError(
                f"Rows that are left out are numbers from 0 to {num_rows - 1}. Received: {left_out}."
            )
        num_examples = num_rows - len(left_out)
        if not num_examples:
            raise DataError("There is nothing to cut batches from: all rows are left out.")
        if self.drop_remainder is True and num_examples < self.batch_size:
            raise DataError(
                f"A batch of {self.batch_size} cannot be cut from {num_examples} examples, and "
                f"drop_remainder=True drops what is smaller. Choose batch_size <= {num_examples}, "
                "or drop_remainder=False."
            )
        if self.shuffle or self.left_out:
            # np.take copies an array that is not contiguous as a whole, at every call.
            arrays = map_leaves(np.ascontiguousarray, arrays)
        # object.__setattr__, because the dataclass is frozen. Counts may be NumPy integers.
        set_field = object.__setattr__
        set_field(self, "arrays", arrays)
        set_field(self, "batch_size", int(self.batch_size))
        set_field(self, "seed", int(self.seed))
        set_field(self, "num_examples", num_examples)
        set_field(self, "left_out", left_out)
        set_field(self, "leaves", tuple(leaves(arrays)))

    @property
    def drops(self) -> bool:
        """Whether a smaller last batch is dropped; by default only evaluation keeps it."""
        return self.drop_remainder is not False

    def keeping_rows(self) -> "Batches":
        """The same batches with a smaller last one, unless `drop_remainder=True`."""
        return self if self.drop_remainder is not None else replace(self, drop_remainder=False)

    def without(self, rows: Any) -> "Batches":
        """The same batches without some rows: later rows move up.

        Args:
            rows: indices of rows of the arrays, such as `explain_step` reports.

        >>> list(batches(np.arange(5), 2).without([1]))
        [array([0, 2]), array([3, 4])]
        """
        more = np.atleast_1d(np.asarray(rows)).tolist()
        return replace(self, left_out=(*self.left_out, *more))

    def rows(self, first: int, count: int, epoch: int = 0) -> np.ndarray:
        """The indices of the examples in batches `first` to `first + count`.

        Args:
            first: the index of a batch, counted from the start of `epoch`.
            count: the number of batches; an execution takes steps x microbatches x replicas of them.
            epoch: the epoch where counting starts; `tr.Trainer` counts its epochs over all fits.

        Returns:
            Row indices, [count, batch_size].

        >>> batches(np.arange(6), 2).rows(1, 2).tolist()
        [[2, 3], [4, 5]]
        """
        iterator = self.iterate(epoch)
        iterator.seek(first)
        return iterator.indices(count)

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches per pass over the arrays, with a smaller last one if it is kept."""
        whole, rest = divmod(self.num_examples, self.batch_size)
        return whole if self.drops or not rest else whole + 1

    @property
    def whole_batches_per_epoch(self) -> int:
        """The number of full batches per pass over the arrays."""
        return self.num_examples // self.batch_size

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays: the memory to hold them on a device."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def order(self, epoch: int) -> np.ndarray:
        """The indices of one epoch's examples, in the order of delivery."""
        count = self.num_examples + len(self.left_out)
        order = np.arange(count)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(count)
        return order[~np.isin(order, self.left_out)] if self.left_out else order

    @property
    def ordered(self) -> bool:
        """Whether batches are consecutive rows of the arrays, so that no indices are needed."""
        return not self.shuffle and not self.left_out

    def iterate(self, epoch: int = 0) -> BatchIterator:
        """An iterator that starts at `epoch`: over that epoch only, or endless if repeating.

        A finite recipe has the same order each time it is iterated; a loop over epochs passes the epoch
        here so that each is shuffled differently.
        """
        check_count("epoch", epoch, at_least=0)
        return BatchIterator(self, int(epoch))

    def __iter__(self) -> BatchIterator:
        return self.iterate()

    def __len__(self) -> int:
        if self.repeat:
            raise EndlessError(
                "These batches repeat without end and have no length. "
                "One pass over the arrays has `batches_per_epoch` of them."
            )
        return self.batches_per_epoch

    def __bool__(self) -> bool:
        return True  # `__len__` raises for an endless stream; there is always at least one batch

    def __repr__(self) -> str:
        return (
            f"Batches({describe(self.arrays)}, batch_size={self.batch_size}, "
            f"shuffle={self.shuffle}, seed={self.seed}, repeat={self.repeat}, "
            f"drop_remainder={self.drop_remainder})"
        )


def batches(
    arrays: Tree,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    repeat: bool = False,
    drop_remainder: bool | None = None,
) -> Batches:
    """A dataset of batches cut from arrays in memory.

    Args:
        arrays: an array, or a tree of them (dicts, tuples, lists), all with the same leading size.
            Anything that `np.asarray` accepts is an array. Dtypes are kept: uint8 images stay
            uint8 until they are on the device.
        batch_size: the number of examples per batch.
        shuffle: whether to use a new random order in each epoch.
        seed: the seed of those orders. The order of epoch e depends only on (seed, e).
        repeat: whether to start over at the end, forever.
        drop_remainder: whether to drop a last batch with fewer than `batch_size` examples. None:
            training drops it, because a step is compiled for one shape; `evaluate` and `predict`
            take every row.

    Returns:
        A `Batches`, which can be iterated any number of times.

    >>> data = batches({"x": np.arange(5), "y": np.arange(5) * 2}, batch_size=2)
    >>> len(data), next(iter(data))
    (2, {'x': array([0, 1]), 'y': array([0, 2])})
    >>> stacked, count = iter(data).read(10)
    >>> count, stacked["x"].tolist()
    (2, [[0, 1], [2, 3]])
    """
    return Batches(
        arrays,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        repeat=repeat,
        drop_remainder=drop_remainder,
    )


def _as_array(path: str, leaf: Any) -> np.ndarray:
    array = to_numpy(path, leaf)
    if array.ndim == 0:
        raise DataError(
            f"Every array needs a leading dimension to cut batches from, but {leaf_called(path)} "
            f"is a single value ({leaf!r}). A list is read as a tree of arrays: write "
            "np.asarray([...]) for an array of numbers."
        )
    return array


def _common_leading_size(named: list[tuple[str, np.ndarray]]) -> int:
    if not named:
        raise DataError("There is nothing to cut batches from: the tree holds no array.")
    first_path, first = named[0]
    for path, array in named:
        if 0 in array.shape:
            raise DataError(
                f"No dimension may have the size 0, but {leaf_called(path)} has the shape "
                f"{array.shape}."
            )
        if len(array) != len(first):
            raise DataError(
                f"All arrays must have the same leading size, but {leaf_called(first_path)} has "
                f"{len(first)} and {leaf_called(path)} has {len(array)}."
            )
    return len(first)
