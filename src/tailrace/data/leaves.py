"""Conversion of each kind of leaf to a NumPy array, without a copy if possible."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

import numpy as np

from tailrace.base.trees import Tree, leaf_called, map_leaves, map_with_paths
from tailrace.data.dtypes import check_numeric
from tailrace.data.typed_keys import numbers_of_keys
from tailrace.errors import DataError

_PLAIN = frozenset("biufc")


def to_numpy(path: str, leaf: object) -> np.ndarray:
    """The leaf as a numpy array of numbers, or a DataError that names it by its path.

    >>> to_numpy("['x']", 3).dtype
    dtype('int64')
    """
    if type(leaf) is np.ndarray:
        array = leaf
    else:
        try:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(leaf, getattr(torch, "Tensor", ())):
                array = _torch_to_numpy(torch, leaf)
            else:
                array = np.asarray(leaf)
        except Exception as error:
            raise DataError(
                f"Every leaf must be an array, but {leaf_called(path)} is a "
                f"{type(leaf).__name__}, which numpy cannot read ({error})."
            ) from error
    return check_numeric(path, array)


def to_numpy_tree(tree: Tree) -> Tree:
    """All leaves of an element through `to_numpy`.

    A list of Python's numbers in a dict is one array:

    >>> to_numpy_tree({"x": [1.0, 2.0]})
    {'x': array([1., 2.])}
    """
    if type(tree) is tuple and all(type(x) is np.ndarray and x.dtype.kind in _PLAIN for x in tree):
        return tree  # the common case: the traversal below would take longer than a small step
    tree = numbers_of_keys(join_numbers(tree))
    try:
        return map_leaves(_to_numpy_without_path, tree)
    except DataError:
        # Again with paths, for the message: paths cost more than the conversion.
        return map_with_paths(to_numpy, tree)


def join_numbers(tree: Tree) -> Tree:
    """An element whose dicts have arrays for lists of Python's numbers, of any depth.

    Columns of Hugging Face's `datasets` are such lists. Other lists are left: they are trees.

    >>> join_numbers({"x": [[1, 2], [3, 4]], "y": [True, False]})
    {'x': array([[1, 2],
           [3, 4]]), 'y': array([ True, False])}
    """
    if isinstance(tree, Mapping):
        return {key: _joined(f"[{key!r}]", value) for key, value in tree.items()}
    if type(tree) is tuple:
        return tuple(join_numbers(value) for value in tree)
    return tree


def _joined(path: str, value: Tree) -> Tree:
    if not isinstance(value, list):
        return join_numbers(value)
    inner: Any = value
    while isinstance(inner, list) and inner:
        inner = cast(list[Any], inner)[0]
    if not isinstance(inner, int | float | complex):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        array = None  # of unequal lengths
    if array is None or array.dtype.kind not in _PLAIN:
        raise DataError(
            f"Every leaf must be an array, and a list of numbers becomes one if its lists have equal "
            f"lengths and hold nothing else. Received: {leaf_called(path)}, a list of {len(value)} of "
            f"another kind: {value!r:.80}. Pad it in the dataset, or leave that column out."
        )
    return array


def _to_numpy_without_path(leaf: object) -> np.ndarray:
    return to_numpy("", leaf)


def _torch_to_numpy(torch: ModuleType, tensor: Any) -> np.ndarray:
    """An array that aliases the tensor's memory (a copy if it is on a device or conjugated)."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8_"):
        # PyTorch has no NumPy dtype for these; ml_dtypes (a dependency of JAX) has them under the same
        # names, so the bits are viewed as integers and then as that dtype.
        import ml_dtypes

        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
        return bits.numpy(force=True).view(getattr(ml_dtypes, name))
    return tensor.numpy(force=True)
