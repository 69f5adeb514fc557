"""`tf.TensorShape`: a tuple of lengths with TensorFlow's methods, so that JAX takes it for a shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

import numpy as np

from tailrace.base.array_like import ShapeLike
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.deferred import describes_everywhere


class Dimension(int):
    """A known length with TensorFlow 1's `value`; otherwise an integer.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.TensorShape([2, 3]).dims[0].value
    2
    """

    @property
    def value(self) -> int:
        """The length."""
        return int(self)


class UnknownDimension:
    """A length that is not known; TensorFlow 1 has an object for it, TensorFlow 2 has None."""

    value = None

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, UnknownDimension)

    def __hash__(self) -> int:
        return hash(None)

    def __repr__(self) -> str:
        return "Dimension(None)"


class TensorShape(tuple[Any, ...]):
    """A shape; unknown lengths are None, and so is the rank of a shape that is not known at all.

    Args:
        dims: the lengths, a number or another shape; None: nothing is known.

    Raises:
        IPUValueError: by methods that compare or require something: the shape is another one.

    >>> from tailrace.compat import tensorflow as tf
    >>> shape = tf.TensorShape([None, 3])
    >>> shape.as_list(), shape.rank, shape.is_compatible_with([2, 3])
    ([None, 3], 2, True)
    """

    is_one_value = True  # for nests, which would take it apart as a tuple
    _is_known = True

    def __new__(cls, dims: ShapeLike = ()) -> TensorShape:
        """From a list, a number or another shape."""
        if isinstance(dims, TensorShape):
            return dims
        given: list[Any] = (
            [] if dims is None else [dims] if isinstance(dims, int | np.integer) else list(dims)
        )
        # Plain numbers inside, so that JAX and numpy take it as a tuple of ints.
        found = super().__new__(cls, (each.value if _is_v1(each) else each for each in given))
        found._is_known = dims is not None
        return found

    # -- what it is -------------------------------------------------------------------------------

    @property
    def rank(self) -> int | None:
        """How many axes there are; None if that is not known."""
        return tuple.__len__(self) if self._is_known else None

    ndims = rank

    @property
    def dims(self) -> list[Any] | None:
        """The lengths as objects with a `value`; None if nothing is known."""
        return [_dimension(each) for each in tuple.__iter__(self)] if self._is_known else None

    def as_list(self) -> list[Any]:
        """The lengths."""
        self._need_rank("as_list()")
        return list(tuple.__iter__(self))

    def is_fully_defined(self) -> bool:
        """Whether all lengths are known."""
        return self._is_known and not tuple.__contains__(self, None)

    def num_elements(self) -> int | None:
        """How many elements there are; None if a length is not known."""
        return math.prod(tuple.__iter__(self)) if self.is_fully_defined() else None

    # -- what else it may be ----------------------------------------------------------------------

    def is_compatible_with(self, other: ShapeLike) -> bool:
        """Whether a tensor could have both shapes.

        Args:
            other: a shape.
        """
        theirs = TensorShape(other)
        if not (self._is_known and theirs._is_known):
            return True
        pairs = list(_pairs(self, theirs))
        return self.rank == theirs.rank and all(a is None or b is None or a == b for a, b in pairs)

    def is_subtype_of(self, other: ShapeLike) -> bool:
        """Whether every tensor of this shape has the other.

        Args:
            other: a shape.
        """
        theirs = TensorShape(other)
        if not theirs._is_known:
            return True
        return self.rank == theirs.rank and all(
            b is None or a == b for a, b in _pairs(self, theirs)
        )

    def merge_with(self, other: ShapeLike) -> TensorShape:
        """The shape of a tensor that has both.

        Args:
            other: a shape.
        """
        theirs = TensorShape(other)
        self.assert_is_compatible_with(theirs)
        if not (self._is_known and theirs._is_known):
            return self if self._is_known else theirs
        return TensorShape(b if a is None else a for a, b in _pairs(self, theirs))

    def most_specific_compatible_shape(self, other: ShapeLike) -> TensorShape:
        """The shape that says what is known of both.

        Args:
            other: a shape.
        """
        theirs = TensorShape(other)
        if self.rank is None or self.rank != theirs.rank:
            return TensorShape(None)
        return TensorShape(a if a == b else None for a, b in _pairs(self, theirs))

    def concatenate(self, other: ShapeLike) -> TensorShape:
        """The axes of this shape, then those of another.

        Args:
            other: a shape.
        """
        theirs = TensorShape(other)
        if not (self._is_known and theirs._is_known):
            return TensorShape(None)
        return TensorShape((*tuple.__iter__(self), *tuple.__iter__(theirs)))

    def with_rank(self, rank: int) -> TensorShape:
        """The shape, which must have this rank.

        Args:
            rank: how many axes.
        """
        if not self._is_known:
            return TensorShape([None] * rank)
        return self._required(self.rank == rank, f"must have rank {rank}")

    def with_rank_at_least(self, rank: int) -> TensorShape:
        """The shape, which must have this rank or a higher one.

        Args:
            rank: how many axes.
        """
        enough = self.rank is None or self.rank >= rank
        return self._required(enough, f"must have rank at least {rank}")

    def with_rank_at_most(self, rank: int) -> TensorShape:
        """The shape, which must have this rank or a lower one.

        Args:
            rank: how many axes.
        """
        enough = self.rank is None or self.rank <= rank
        return self._required(enough, f"must have rank at most {rank}")

    def assert_has_rank(self, rank: int) -> None:
        """Refuse another rank.

        Args:
            rank: how many axes.
        """
        self.with_rank(rank)

    def assert_is_compatible_with(self, other: ShapeLike) -> None:
        """Refuse a shape that no tensor of this one can have.

        Args:
            other: a shape.
        """
        self._required(self.is_compatible_with(other), f"and {other} are incompatible")

    def assert_same_rank(self, other: ShapeLike) -> None:
        """Refuse a shape of another rank.

        Args:
            other: a shape.
        """
        rank = TensorShape(other).rank
        same = None in (rank, self.rank) or rank == self.rank
        self._required(same, f"and {other} must have the same rank")

    def assert_is_fully_defined(self) -> None:
        """Refuse a shape with a length that is not known."""
        self._required(self.is_fully_defined(), "is not fully defined")

    # -- as a sequence ------------------------------------------------------------------------------

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        self._need_rank("A length")
        if isinstance(key, slice):
            return TensorShape(tuple.__getitem__(self, key))
        length = tuple.__getitem__(self, key)
        # A program of TensorFlow 1 writes `x.shape[0].value`; one of TensorFlow 2 asks `is None`.
        return _dimension(length) if describes_everywhere() else length

    def __len__(self) -> int:
        self._need_rank("The number of axes")
        return tuple.__len__(self)

    def __add__(self, other: ShapeLike) -> TensorShape:
        return self.concatenate(other)

    def __radd__(self, other: ShapeLike) -> TensorShape:
        return TensorShape(other).concatenate(self)

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(
            other, list | tuple
        ):  # TensorFlow compares with lists as well
            theirs = TensorShape(other)
            return self._is_known == theirs._is_known and tuple.__eq__(self, theirs)
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)

    def __bool__(self) -> bool:
        return self._is_known  # a scalar's shape is true: its rank is known

    def __str__(self) -> str:
        return tuple.__repr__(self) if self._is_known else "<unknown>"

    def __repr__(self) -> str:
        return f"TensorShape({self.as_list() if self._is_known else None})"

    # -- inside -------------------------------------------------------------------------------------

    def _required(self, holds: bool, rule: str) -> TensorShape:
        if not holds:
            raise IPUValueError(f"Shape {self} {rule}.")
        return self

    def _need_rank(self, what: str) -> None:
        if not self._is_known:
            raise IPUValueError(
                f"{what} is not defined on an unknown TensorShape: nothing is known of it, not even "
                f"its rank. Give the placeholder or the spec a shape; unknown lengths are None."
            )


def _is_v1(length: object) -> bool:
    return isinstance(length, Dimension | UnknownDimension)


def _dimension(length: int | None) -> Dimension | UnknownDimension:
    return UnknownDimension() if length is None else Dimension(length)


def _pairs(one: Iterable[Any], other: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """The lengths of two shapes side by side, as plain numbers."""
    return zip(tuple(one), tuple(other), strict=False)
