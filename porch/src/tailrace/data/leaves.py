"""How each kind of leaf becomes a numpy array, without a copy where that can be."""

import sys
from types import ModuleType
from typing import Any

import numpy as np

from tailrace.data.dtypes import check_numeric
from tailrace.data.trees import Tree, leaf_called, map_leaves, map_with_paths
from tailrace.errors import DataError

_PLAIN = frozenset("biufc")


def to_numpy(path: str, leaf: Any) -> np.ndarray:
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

    >>> to_numpy_tree({"x": [1.0, 2.0]})
    {'x': [array(1.), array(2.)]}
    """
    if type(tree) is tuple and all(type(x) is np.ndarray and x.dtype.kind in _PLAIN for x in tree):
        return tree  # what most datasets yield; the walk below would take longer than a small step
    try:
        return map_leaves(_to_numpy_without_path, tree)
    except DataError:
        # Once more, with paths, for the sake of the sentence: paths cost more than the conversion.
        return map_with_paths(to_numpy, tree)


def _to_numpy_without_path(leaf: Any) -> np.ndarray:
    return to_numpy("", leaf)


def _torch_to_numpy(torch: ModuleType, tensor: Any) -> np.ndarray:
    """The tensor's own memory as an array (a copy only if it is on a device or conjugated)."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8_"):
        # PyTorch knows no numpy type for these; ml_dtypes (which comes with JAX) has them under
        # the same names, so the bits travel as integers and are then called what they are.
        import ml_dtypes

        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
        return bits.numpy(force=True).view(getattr(ml_dtypes, name))
    return tensor.numpy(force=True)
