"""Nests of values by TensorFlow's rules: lists, tuples, named tuples and dicts, to any depth.

Neither of the other two kinds of trees fits. In JAX's trees (`jax.tree`) None is an empty node, and a
dict comes back with its keys in another order. In those of elements (`data.trees`) None is empty too,
and a mapping of any class comes back as a dict. In a nest of TensorFlow None is a leaf: an operation
that a function returned, or a gradient that does not exist.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tailrace.base.trees import Tree


def map_leaves(function: Callable[[Any], Any], nest: Tree) -> Any:
    """A nest of the same form whose leaves are `function(leaf)`.

    >>> map_leaves(str, {"b": (1, None), "a": [2]})
    {'b': ('1', 'None'), 'a': ['2']}
    """
    if isinstance(nest, dict):
        # Visited in the order of the keys, which is TensorFlow's: two dicts with the same keys have
        # their leaves at the same places, whichever key was written first.
        made = {key: map_leaves(function, nest[key]) for key in _in_order(nest)}
        if type(nest) is dict:
            return {key: made[key] for key in nest}
        again = copy.copy(nest)  # a defaultdict is not made of another dict alone
        again.update(made)
        return again
    # A shape, or what a queue will deliver, is a tuple or list to Python and one value to
    # TensorFlow.
    if not isinstance(nest, list | tuple) or hasattr(nest, "is_one_value"):
        return function(nest)
    values = [map_leaves(function, value) for value in nest]
    if isinstance(nest, list):
        return values  # also of a class that Keras tracks attributes with
    return type(nest)(*values) if hasattr(nest, "_fields") else tuple(values)


def leaves(nest: Tree) -> list[Any]:
    """Every leaf, in the order in which `map_leaves` visits them.

    >>> leaves({"b": (1, None), "a": [2]})
    [2, 1, None]
    """
    found: list[Any] = []
    map_leaves(found.append, nest)
    return found


def rebuild(form: Tree, values: Iterator[Any]) -> Any:
    """A nest of the form of another, with these leaves in the order of `leaves`.

    >>> rebuild({"b": (0, 0), "a": 0}, iter("xyz"))
    {'b': ('y', 'z'), 'a': 'x'}
    """
    return map_leaves(lambda _: next(values), form)


def _in_order(keys: Iterable[Any]) -> list[Any]:
    found = list(keys)
    try:
        return sorted(found)
    except TypeError:  # keys of different kinds; TensorFlow refuses them, outfeeds need not
        return found
