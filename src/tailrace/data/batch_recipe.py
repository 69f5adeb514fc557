"""The arrays that batches are cut from, and how they are cut.

Which examples are in batch number p is decided here, as a function of the fields and p alone.
`Batches` is the recipe that users hold; `BatchIterator` reads it.
"""

from abc import ABC
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from tailrace.base.checks import check_count, check_flag
from tailrace.base.trees import (
    Tree,
    leaf_called,
    leaves,
    leaves_with_paths,
    map_leaves,
    map_with_paths,
)
from tailrace.data.leaves import to_numpy
from tailrace.data.typed_keys import numbers_of_keys
from tailrace.errors import DataError

SHOWN = 4
"""The most rows that a text lists."""


def some_rows(rows: Sequence[int]) -> str:
    """How many rows, and the first of them.

    >>> some_rows([2]), some_rows(range(9))
    ('1 row: 2', '9 rows: 0, 1, 2, 3, ...')
    """
    more = ["..."] if len(rows) > SHOWN else []
    many = "" if len(rows) == 1 else "s"
    return f"{len(rows)} row{many}: {', '.join([*map(str, rows[:SHOWN]), *more])}"


@dataclass(frozen=True, eq=False)
class BatchRecipe(ABC):
    """How batches are cut from a tree of arrays; see `tr.batches` for the arguments."""

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
        # object.__setattr__, because the dataclass is frozen. Counts and flags may be those of NumPy.
        set_field = object.__setattr__
        for name in ("shuffle", "repeat", "drop_remainder"):
            if getattr(self, name) is not None or name != "drop_remainder":
                set_field(self, name, check_flag(name, getattr(self, name)))
        arrays = map_with_paths(_as_array, numbers_of_keys(self.arrays))
        num_rows = _common_leading_size(leaves_with_paths(arrays))
        left_out = tuple(sorted({int(row) for row in self.left_out}))
        # They are sorted, so the first and the last decide for all.
        if left_out and not 0 <= left_out[0] <= left_out[-1] < num_rows:
            wrong = [row for row in left_out if not 0 <= row < num_rows]
            raise DataError(
                f"Rows that are left out are numbers from 0 to {num_rows - 1}. Received: "
                f"{some_rows(wrong)}."
            )
        num_examples = num_rows - len(left_out)
        if not num_examples:
            raise DataError("There is nothing to cut batches from: all rows are left out.")
        if self.shuffle or self.left_out:
            # np.take copies an array that is not contiguous as a whole, at every call.
            arrays = map_leaves(np.ascontiguousarray, arrays)
        set_field(self, "arrays", arrays)
        set_field(self, "batch_size", int(self.batch_size))
        set_field(self, "seed", int(self.seed))
        set_field(self, "num_examples", num_examples)
        set_field(self, "left_out", left_out)
        set_field(self, "leaves", tuple(leaves(arrays)))
        # Others may still be evaluated, which keeps a smaller last batch.
        if self.drop_remainder or self.repeat:
            self.check_has_batches()

    def check_has_batches(self) -> None:
        """Raise an error if there are fewer examples than a batch has, and smaller ones are dropped."""
        if self.batches_per_epoch:
            return
        why = "drop_remainder=True drops" if self.drop_remainder else "training drops"
        raise DataError(
            f"A batch of {self.batch_size} cannot be cut from {self.num_examples} examples, and {why} "
            f"what is smaller. Choose batch_size <= {self.num_examples}, or drop_remainder=False."
        )

    @property
    def drops(self) -> bool:
        """Whether a smaller last batch is dropped; by default only evaluation keeps it."""
        return self.drop_remainder is not False

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
            # Of all rows: those left out are removed afterwards, and the others keep their order
            # among themselves.
            order = np.random.default_rng([self.seed, epoch]).permutation(count)
        return order[~np.isin(order, self.left_out)] if self.left_out else order

    @property
    def ordered(self) -> bool:
        """Whether batches are consecutive rows of the arrays, so that no indices are needed."""
        return not self.shuffle and not self.left_out


def _as_array(path: str, leaf: object) -> np.ndarray:
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
