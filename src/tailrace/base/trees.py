"""Trees of arrays without JAX: flattening and rebuilding elements, and naming their leaves.

An element is a tree: dicts, tuples, lists and named tuples are nodes, `None` is an empty node, and
everything else is a leaf. These are JAX's rules, so an accepted element can be passed to a program
unchanged. A leaf's path is written as an index expression: `['image']`, `[0]['mask']`, `.label`.

`jax.tree` would do the same. But this package does not import JAX, so that a process that only reads
data starts without it, in a fraction of the time.

Building paths takes time: streams of elements are mapped by `map_leaves`, and the functions with paths
are for errors and one-time work.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Tree = Any
"""A tree of arrays, as in JAX: any containers, nested to any depth."""

TreeDef = Any
"""The structure of a tree: a `jax.tree_util.PyTreeDef`, which type checkers see as a variable."""


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """A tree of the same structure whose leaves are `function(leaf)`.

    Mappings of any kind are returned as plain dicts, in the same order.

    >>> map_leaves(str, {"a": (1, 2), "b": None})
    {'a': ('1', '2'), 'b': None}
    """
    if tree is None:
        return None
    if isinstance(tree, tuple):
        children = [map_leaves(function, child) for child in tree]
        make = getattr(type(tree), "_make", tuple)  # a named tuple stays one
        return make(children)
    if isinstance(tree, list):
        return [map_leaves(function, child) for child in tree]
    # The exact type first: an isinstance check against the abstract one takes ten times as long.
    if type(tree) is dict or isinstance(tree, Mapping):
        return {key: map_leaves(function, child) for key, child in tree.items()}
    return function(tree)


def leaves(tree: Tree) -> list[Any]:
    """Every leaf, in the order in which `map_leaves` visits them.

    >>> leaves(({"x": 1}, 2))
    [1, 2]
    """
    found: list[Any] = []
    # By the same traversal as `map_leaves`, so that the two can never disagree on the order.
    map_leaves(found.append, tree)
    return found


def rebuild(form: Tree, values: Iterator[Any]) -> Tree:
    """A tree with the structure of `form` whose leaves are taken from `values`, in order.

    >>> rebuild({"x": 0, "y": (0, 0)}, iter("abc"))
    {'x': 'a', 'y': ('b', 'c')}
    """
    return map_leaves(lambda _: next(values), form)


def paths(tree: Tree, path: str = "") -> list[str]:
    """The path of every leaf, in the same order as `leaves`.

    >>> paths(({"x": 1}, 2)), paths(3)
    (["[0]['x']", '[1]'], [''])
    """
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        branches = [(f"[{key!r}]", child) for key, child in tree.items()]
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        names: tuple[str, ...] = getattr(tree, "_fields", ())
        branches = [(f".{name}", child) for name, child in zip(names, tree, strict=True)]
    elif isinstance(tree, (tuple, list)):
        branches = [(f"[{i}]", child) for i, child in enumerate(tree)]
    else:
        return [path]
    return [found for step, child in branches for found in paths(child, path + step)]


def leaves_with_paths(tree: Tree) -> list[tuple[str, Any]]:
    """Every leaf with its path.

    >>> leaves_with_paths(({"x": 1}, 2))
    [("[0]['x']", 1), ('[1]', 2)]
    """
    return list(zip(paths(tree), leaves(tree), strict=True))


def map_with_paths(function: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Like `map_leaves`, with `function(path, leaf)`.

    >>> map_with_paths(lambda path, leaf: f"{path}={leaf}", {"a": (1, 2)})
    {'a': ("['a'][0]=1", "['a'][1]=2")}
    """
    return rebuild(tree, (function(path, leaf) for path, leaf in leaves_with_paths(tree)))


def leaf_called(path: str) -> str:
    """The name of the leaf at `path`, for messages.

    >>> leaf_called("['x']"), leaf_called("")
    ("leaf ['x']", 'the array')
    """
    return f"leaf {path}" if path else "the array"


def describe(tree: Tree, limit: int = 160) -> str:
    """A tree in one short line: arrays as dtype[shape], anything else by its type.

    >>> import numpy as np
    >>> describe({"x": np.zeros((2, 3)), "name": "a"})
    "{'x': float64[2, 3], 'name': str}"
    """
    text = repr(map_leaves(_describe_leaf, tree))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class _Shown(str):
    """Text that prints without quotes inside a tree."""

    __slots__ = ()
    __repr__ = str.__str__


def _describe_leaf(leaf: Any) -> _Shown:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return _Shown(f"{leaf.dtype}{list(leaf.shape)}")
    return _Shown(type(leaf).__name__)
