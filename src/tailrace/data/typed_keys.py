"""Typed random keys in datasets: on their way to the device they are the numbers that they consist of.

NumPy has no keys, and a device gets blocks of plain arrays. So a leaf of keys becomes a node with their
numbers, named after their generator, and functions that get the element get keys again.
"""

from __future__ import annotations

import functools
import sys
from collections import namedtuple
from typing import Any

import numpy as np

from tailrace.base.trees import Tree, map_leaves

_MARK = "keys_of_"


@functools.cache
def _node(generator: str) -> Any:
    # A class for each generator: the structure of an element then says which one it is.
    return namedtuple(_MARK + generator, ["numbers"])


def numbers_of_keys(tree: Tree) -> Tree:
    """A tree in which nodes with numbers stand for typed keys."""
    return map_leaves(_numbers_of, tree)


def _numbers_of(leaf: Any) -> Any:
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(leaf, jax.Array):
        return leaf
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    numbers = np.asarray(jax.random.key_data(leaf))
    return _node(str(jax.random.key_impl(leaf)))(numbers)


def generator_of_node(node: object) -> str | None:
    """The generator of a node with the numbers of keys; None of anything else."""
    name = type(node).__name__
    if not isinstance(node, tuple) or not name.startswith(_MARK):
        return None
    generator = name.removeprefix(_MARK)
    return generator if type(node) is _node(generator) else None
