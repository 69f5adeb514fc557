"""Arrays in memory, as a stream of batches that can be read in any way and is always the same.

`Batches` is the recipe: the arrays and how to cut them. `BatchIterator` (batch_iterator.py) is the
running half: it has a position, which can be saved and set. Batch number p of the stream is a
function of the recipe and p alone, because epoch e is shuffled by a generator seeded with (seed,
e). So it does not matter whether the stream is read one batch at a time, many at once, or as
indices into arrays that already lie on a device; nor where reading stopped and started again.
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
    """`len()` of a stream without end; a TypeError, so that `list()` and its like get past it."""


@dataclass(frozen=True, eq=False)
class Batches:
    """A recipe for batches over a tree of arrays; make it with `tr.batches`.

    Iterating it gives a fresh `BatchIterator` each time. The arrays are held, not copied (a
    shuffled array that is not contiguous is made so, once): do not write to them while they are
    being read.
    """

    arrays: Tree
    batch_size: int
    _: KW_ONLY
    shuffle: bool = False
    seed: int = 0
    repeat: bool = False
    drop_remainder: bool | None = None
    left_out: tuple[int, ...] = ()
    """Rows that are in no batch; see `without`."""
    num_examples: int = field(init=False)
    """How many examples there are: the common leading size of the arrays, less what is left out."""
    leaves: tuple[np.ndarray, ...] = field(init=False, repr=False)
    """The arrays without their tree, in tree order."""

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
            # np.take copies the whole of an array that is not contiguous, at every call.
            arrays = map_leaves(np.ascontiguousarray, arrays)
        # A frozen dataclass is written to once, here. The counts may have come as numpy's integers.
        set_field = object.__setattr__
        set_field(self, "arrays", arrays)
        set_field(self, "batch_size", int(self.batch_size))
        set_field(self, "seed", int(self.seed))
        set_field(self, "num_examples", num_examples)
        set_field(self, "left_out", left_out)
        set_field(self, "leaves", tuple(leaves(arrays)))

    @property
    def drops(self) -> bool:
        """Whether a smaller last batch is dropped; where nothing was said, only evaluation keeps it."""
        return self.drop_remainder is not False

    def keeping_rows(self) -> "Batches":
        """The same batches with a smaller last one, unless it was said that it is dropped."""
        return self if self.drop_remainder is not None else replace(self, drop_remainder=False)

    def without(self, rows: Any) -> "Batches":
        """The same batches without some rows: those behind them move up.

        Args:
            rows: numbers of rows of the arrays, such as `explain_step` names.

        >>> list(batches(np.arange(5), 2).without([1]))
        [array([0, 2]), array([3, 4])]
        """
        more = np.atleast_1d(np.asarray(rows)).tolist()
        return replace(self, left_out=(*self.left_out, *more))

    def rows(self, first: int, count: int, epoch: int = 0) -> np.ndarray:
        """Which examples the batches number `first` to `first + count` consist of.

        Args:
            first: the number of a batch, counted from the start of `epoch`.
            count: how many batches; an execution takes steps x microbatches x replicas of them.
            epoch: where counting starts; `tr.Trainer` counts its epochs over all fits.

        Returns:
            Row numbers, [count, batch_size].

        >>> batches(np.arange(6), 2).rows(1, 2).tolist()
        [[2, 3], [4, 5]]
        """
        iterator = self.iterate(epoch)
        iterator.seek(first)
        return iterator.indices(count)

    @property
    def batches_per_epoch(self) -> int:
        """Batches in one pass over the arrays, a smaller last one included if it is kept."""
        whole, rest = divmod(self.num_examples, self.batch_size)
        return whole if self.drops or not rest else whole + 1

    @property
    def whole_batches_per_epoch(self) -> int:
        """Batches of the full size in one pass over the arrays."""
        return self.num_examples // self.batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of all the arrays: what it takes to hold them on a device."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def order(self, epoch: int) -> np.ndarray:
        """The examples of one epoch in the order in which they are delivered."""
        count = self.num_examples + len(self.left_out)
        order = np.arange(count)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(count)
        return order[~np.isin(order, self.left_out)] if self.left_out else order

    @property
    def ordered(self) -> bool:
        """Whether batches are consecutive rows of the arrays, which need no indices."""
        return not self.shuffle and not self.left_out

    def iterate(self, epoch: int = 0) -> BatchIterator:
        """An iterator that begins at `epoch`: over that epoch alone, or without end if repeating.

        A finite recipe has the same order each time it is iterated; a loop over epochs passes their
        number here so that each of them is shuffled differently.
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
            Anything that `np.asarray` takes is an array. Their dtypes are kept: uint8 images stay
            uint8 until they are on the device.
        batch_size: examples in one batch.
        shuffle: take the examples in a new random order in each epoch.
        seed: chooses those orders. Epoch e depends on (seed, e) and on nothing else.
        repeat: start over at the end, without end.
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
