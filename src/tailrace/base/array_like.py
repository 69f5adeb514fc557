"""Names for what users give where an array, a dtype or a shape is expected.

To a type checker these are `Any`: arrays, tracers, variables and numbers have no common class. To a
reader they say what a parameter is. Trees of arrays are `tailrace.base.trees.Tree`.
"""

from typing import Any

TensorLike = Any
"""An array, a tracer, a variable, a number, or nested lists of numbers."""

DTypeLike = Any
"""A dtype of NumPy, JAX, Keras, TensorFlow or PyTorch, or its name."""

ShapeLike = Any
"""A sequence of sizes, or what can be converted to one."""

Index = Any
"""What an array is indexed by: a number, a slice, an array, or a tuple of them."""
