"""Arrays in memory as a deterministic stream of batches.

`Batches` is the recipe: the arrays and how to cut them (batch_recipe.py). `BatchIterator` has a
position, which can be saved and restored. Batch p of the stream depends only on the recipe and p,
because epoch e is shuffled by a generator seeded with (seed, e). So it does not matter whether the
stream is read one batch at a time, many at once, or as indices into arrays on a device; nor where
reading stopped and resumed.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tailrace.base.checks import check_count
from tailrace.base.trees import Tree, describe
from tailrace.data.batch_iterator import BatchIterator
from tailrace.data.batch_recipe import BatchRecipe, some_rows
from tailrace.errors import DataError


class EndlessError(DataError, TypeError):
    """`len()` of an endless stream; a TypeError, so that `list()` ignores it."""


@dataclass(frozen=True, eq=False)
class Batches(BatchRecipe):
    """A recipe for batches over a tree of arrays; make it with `tr.batches`.

    Iterating it gives a new `BatchIterator` each time. The arrays are referenced, not copied (except
    that a shuffled array that is not contiguous is made so, once): do not write to them while they are
    read.
    """

    def keeping_rows(self) -> "Batches":
        """The same batches with a smaller last one, unless `drop_remainder=True`."""
        # An explicit choice holds in evaluation too; only the default differs.
        return self if self.drop_remainder is not None else replace(self, drop_remainder=False)

    def without(self, rows: npt.ArrayLike) -> "Batches":
        """The same batches without some rows: later rows move up.

        Args:
            rows: indices of rows of the arrays, such as `explain_step` reports.

        >>> import numpy as np, tailrace as tr
        >>> list(tr.batches(np.arange(5), 2).without([1]))
        [array([0, 2]), array([3, 4])]
        """
        more = np.atleast_1d(np.asarray(rows)).ravel().tolist()
        for row in more:
            check_count("row", row, at_least=0, more=" (its number in the arrays)")
        # Added to those left out before; `BatchRecipe` sorts them and removes duplicates.
        return replace(self, left_out=(*self.left_out, *more))

    def rows(self, first: int, count: int, epoch: int = 0) -> np.ndarray:
        """The indices of the examples in batches `first` to `first + count`.

        Args:
            first: the index of a batch, counted from the start of `epoch`.
            count: the number of batches; an execution takes steps x microbatches x replicas of them.
            epoch: the epoch where counting starts; `tr.Trainer` counts its epochs over all fits.

        Returns:
            Row indices, [count, batch_size].

        >>> import numpy as np, tailrace as tr
        >>> tr.batches(np.arange(6), 2).rows(1, 2).tolist()
        [[2, 3], [4, 5]]
        """
        # By the iterator itself, so that what is reported is what was read.
        iterator = self.iterate(epoch)
        iterator.seek(first)
        return iterator.indices(count)

    def iterate(self, epoch: int = 0) -> BatchIterator:
        """An iterator that starts at `epoch`: over that epoch only, or endless if repeating.

        A finite recipe has the same order each time it is iterated; a loop over epochs passes the epoch
        here so that each is shuffled differently.
        """
        check_count("epoch", epoch, at_least=0)
        self.check_has_batches()
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
            + (f".without({some_rows(self.left_out)})" if self.left_out else "")
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

    Raises:
        DataError: the arrays have different lengths, or there is nothing to cut batches from.

    >>> import numpy as np
    >>> import tailrace as tr
    >>> data = tr.batches({"x": np.arange(5), "y": np.arange(5) * 2}, batch_size=2)
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
