"""Lengths of axes that are known in a program: what `tf.shape` gives, and what is computed from it.

JAX would make them values of the program, from which no shape can be computed. numpy keeps them known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from tailrace.base.array_like import DTypeLike, Index, TensorLike
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.tensorflow.dtypes import DType, narrowed
from tailrace.jaxprs.internals import Tracer

OPERATIONS = frozenset(
    [
        "add",
        "cast",
        "concat",
        "equal",
        "expand_dims",
        "floordiv",
        "floormod",
        "gather",
        "greater",
        "greater_equal",
        "less",
        "less_equal",
        "maximum",
        "minimum",
        "multiply",
        "not_equal",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_sum",
        "reshape",
        "reverse",
        "slice",
        "split",
        "squeeze",
        "stack",
        "subtract",
        "unstack",
    ]
)
"""Operations by which programs compute shapes, without the name of their module."""


class Lengths(np.ndarray):
    """Known lengths, one or several; what is computed from them by Python's operators is known too."""

    def __getitem__(self, index: Index) -> Any:
        # `tf.shape(x)[i]` in a loop of the program: a value, from which no shape can be made.
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(index)):
            return jnp.asarray(self)[index]  # which of them is known only when the program runs
        return known(super().__getitem__(index))

    def __array_wrap__(
        self, array: np.ndarray, context: object = None, return_scalar: bool = False
    ) -> Any:
        del context, return_scalar
        return known(array)


def known(found: TensorLike) -> Lengths:
    """Numbers as known lengths.

    >>> known([4, 3])[0] // 2
    Lengths(2)
    """
    return np.asarray(found).view(Lengths)


def lengths_of(tensor: TensorLike, found: int | tuple[Any, ...], dtype: DTypeLike) -> Any:
    """Numbers that a tensor's shape gives: known ones in a program, a tensor elsewhere.

    While Keras asks a layer for the shape of its result, the length of the batch is a symbol; a shape
    with one stays as it is.
    """
    if any(map(is_symbol, found if isinstance(found, tuple) else (found,))):
        return found
    if current() is not None or isinstance(tensor, Tracer):
        return known(np.asarray(found, narrowed(dtype)))
    return jnp.asarray(found, narrowed(dtype))


def is_symbol(length: TensorLike) -> bool:
    """Whether a length is not known: None, or one that JAX has a symbol for."""
    return length is None or export.is_symbolic_dim(length)


def are_lengths(leaves: Iterable[Any]) -> bool:
    """Whether arguments are known numbers, some of them computed from a shape."""
    found = False
    for leaf in leaves:
        if isinstance(leaf, Lengths):
            found = True
        # Beside lengths, numbers and names of dtypes are known too; anything else makes the result
        # a value.
        elif not isinstance(leaf, int | str | np.integer | DType | None):
            return False
    return found
