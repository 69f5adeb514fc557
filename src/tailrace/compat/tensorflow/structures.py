"""Specs and nests: `tf.TensorSpec`, `tf.nest`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.nests import leaves, map_leaves, rebuild
from tailrace.compat.tensorflow.dtypes import DTYPES, DType, as_dtype
from tailrace.compat.tensorflow.tensor_shape import TensorShape


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
        object.__setattr__(self, "shape", TensorShape(self.shape))
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
    return leaves(structure)


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
    # Compared before anything is called: leaves are then taken in step from all of them.
    for other in others:
        assert_same_structure(first, other)
    rests = [iter(flatten(other)) for other in others]
    return map_leaves(lambda leaf: function(leaf, *(next(rest) for rest in rests)), first)


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
    one, other = (map_leaves(lambda _: 0, nest) for nest in (nest1, nest2))
    if one != other:
        raise IPUValueError(
            f"The two structures don't have the same nested structure. Received: {one} and {other}."
        )


def pack_sequence_as(structure: Tree, flat_sequence: Sequence[Any]) -> Any:
    """Leaves in the form of a nest.

    Args:
        structure: the nest.
        flat_sequence: the leaves, in the order of `flatten`.

    Raises:
        IPUValueError: there are more or fewer leaves than the structure has.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.nest.pack_sequence_as([0, {"x": 0}], [1, 2])
    [1, {'x': 2}]
    """
    if len(flat_sequence) != len(leaves(structure)):
        raise IPUValueError(
            f"tf.nest.pack_sequence_as takes as many leaves as the structure has, "
            f"{len(leaves(structure))}. Received: {len(flat_sequence)}."
        )
    return rebuild(structure, iter(flat_sequence))


def is_nested(value: TensorLike) -> bool:
    """Whether a value is a nest: a list, a tuple or a dict.

    Args:
        value: the value.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.nest.is_nested([1]), tf.nest.is_nested(1)
    (True, False)
    """
    return isinstance(value, list | tuple | dict)
