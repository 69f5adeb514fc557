"""Shapes, specs and nests: `tf.TensorShape`, `tf.TensorSpec`, `tf.nest`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.tensorflow.dtypes import DTYPES, DType, as_dtype
from tailrace.compat.tensorflow.operations.table import leaves, mapped
from tailrace.data.array_like import ShapeLike, TensorLike
from tailrace.data.trees import Tree


class TensorShape(tuple[Any, ...]):
    """A shape; unknown lengths are None.

    Args:
        dims: the lengths, a number or another shape.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.TensorShape([None, 3]).as_list(), tf.TensorShape([2, 3]).num_elements()
    ([None, 3], 6)
    """

    def __new__(cls, dims: ShapeLike = ()) -> TensorShape:
        """From a list, a number or another shape."""
        given = [dims] if isinstance(dims, int) else list(dims)
        return super().__new__(cls, given)

    @property
    def rank(self) -> int:
        """How many axes there are."""
        return len(self)

    ndims = rank

    def as_list(self) -> list[Any]:
        """The lengths."""
        return list(self)

    def is_fully_defined(self) -> bool:
        """Whether all lengths are known."""
        return None not in self

    def num_elements(self) -> int | None:
        """How many elements there are."""
        if None in self:
            return None
        count = 1
        for length in self:
            count *= length
        return count


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a tensor.

    Attributes:
        shape: a `TensorShape`.
        dtype: a `DType`.
        name: what it is called.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.TensorSpec([None, 3], tf.int32).dtype
    tf.int32
    """

    shape: Any
    dtype: Any = DTYPES["float32"]
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", TensorShape(self.shape or ()))
        object.__setattr__(self, "dtype", as_dtype(self.dtype))

    @classmethod
    def from_tensor(cls, tensor: TensorLike, name: str | None = None) -> TensorSpec:
        """The shape and dtype that a tensor has.

        Args:
            tensor: the tensor.
            name: what it is called.
        """
        dtype: DType = as_dtype(str(tensor.dtype))
        return cls(tensor.shape, dtype, name)


def flatten(structure: Tree) -> list[Any]:
    """The leaves of a nest of lists, tuples and dicts.

    Args:
        structure: the nest.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.nest.flatten([1, {"x": (2, 3)}])
    [1, 2, 3]
    """
    return list(leaves(structure))


def map_structure(function: Callable[..., Any], *structures: Any) -> Any:
    """A nest of what a function returns for the leaves of one nest or several of one form.

    Args:
        function: the function, of as many arguments as there are nests.
        *structures: the nests.

    Raises:
        IPUValueError: the structures differ.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.nest.map_structure(lambda a, b: a + b, [1, {"x": 2}], [10, {"x": 20}])
    [11, {'x': 22}]
    """
    first, *others = structures
    for other in others:
        assert_same_structure(first, other)
    rests = [iter(flatten(other)) for other in others]
    return mapped(lambda leaf: function(leaf, *(next(rest) for rest in rests)), first)


def assert_same_structure(nest1: Tree, nest2: Tree, **_: Any) -> None:
    """Raise an error if two nests have different forms.

    Args:
        nest1: a nest.
        nest2: another.
        **_: without effect.

    Raises:
        IPUValueError: the structures differ.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.nest.assert_same_structure([1, 2], [3, 4])
    """
    one, other = (mapped(lambda _: 0, nest) for nest in (nest1, nest2))
    if one != other:
        raise IPUValueError(
            f"The two structures don't have the same nested structure. Received: {one} and {other}."
        )


def pack_sequence_as(structure: Tree, flat_sequence: Sequence[Any]) -> Any:
    """Leaves in the form of a nest.

    Args:
        structure: the nest.
        flat_sequence: the leaves, in the order of `flatten`.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.nest.pack_sequence_as([0, {"x": 0}], [1, 2])
    [1, {'x': 2}]
    """
    rest = iter(flat_sequence)
    return mapped(lambda _: next(rest), structure)


def is_nested(value: TensorLike) -> bool:
    """Whether a value is a nest: a list, a tuple or a dict.

    Args:
        value: the value.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.nest.is_nested([1]), tf.nest.is_nested(1)
    (True, False)
    """
    return isinstance(value, list | tuple | dict)
