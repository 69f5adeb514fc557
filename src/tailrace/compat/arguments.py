"""Names for what programs give where an optimizer, a variable, a dataset, axes or a seed is expected.

To a type checker most of these are `Any`: what the originals take has no common class. To a reader they
say what a parameter is. Arrays, dtypes and shapes are named in `tailrace.base.array_like`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

Axes = int | Sequence[int] | None
"""One axis, several, or None for all of them."""

VariableLike = Any
"""A variable of Keras, or one made by `ipu.Variable` or `tf.Variable`."""

OptimizerLike = Any
"""An optax transformation, a Keras optimizer, or an object with `apply_gradients(grads_and_vars)`."""

GradientsAndVariables = Iterable[tuple[Any, VariableLike]]
"""Pairs of a gradient, or None, and its variable."""

DatasetLike = Any
"""A `tf.data.Dataset`, a PyTorch loader, or anything `tr.InfeedQueue` takes."""

SeedLike = Any
"""An int, a sequence or an array of ints, a generator of Keras, or None for the next seed."""

InitializerLike = Any
"""The name of an initializer of Keras, or a function of shape and dtype; None for the usual one."""

SessionLike = Any
"""A `tf.compat.v1.Session`; None for the one around."""
