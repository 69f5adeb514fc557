"""Values in another dtype: `tf.cast`, `tf.saturate_cast`, `tf.bitcast`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from keras import ops

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.tensorflow.dtypes import DType, as_dtype, narrowed
from tailrace.compat.tensorflow.operations.elementwise import tensor
from tailrace.compat.tensorflow.operations.table import operation


@operation("cast")
def cast(x: TensorLike, dtype: DTypeLike) -> Any:
    """The values in another dtype."""
    return ops.cast(tensor(x), narrowed(dtype))


@operation("saturate_cast")
def saturate_cast(value: TensorLike, dtype: DTypeLike) -> Any:
    """The values in another dtype; those outside of its range become its limits."""
    value, target = tensor(value), as_dtype(narrowed(dtype))
    source = as_dtype(value.dtype)
    if source.is_bool or target.is_bool:
        raise IPUValueError(
            f"tf.saturate_cast converts numbers, and a bool has no range. Received: {source!r} to "
            f"{target!r}. Use tf.cast."
        )
    if target.is_complex:
        return ops.cast(value, target.dtype)
    if source.is_complex:  # TensorFlow drops the imaginary part
        value = ops.real(value)
        source = as_dtype(value.dtype)
    # A NaN passes, and becomes what `tf.cast` makes of it.
    return ops.cast(ops.clip(value, *_limits_within(source, target)), target.dtype)


def _limits_within(source: DType, target: DType) -> list[Any]:
    """The smallest and the largest value of a dtype that are in the range of another."""
    kind, found = source.as_numpy_dtype, []
    for ours, theirs in ((source.min, target.min), (source.max, target.max)):
        # Python's numbers: it compares whole numbers with fractions exactly.
        ends = [end.item() if hasattr(end, "item") else end for end in (ours, theirs)]
        nearest = min(ends, key=abs)
        limit = kind(nearest)
        if abs(limit.item()) > abs(nearest):  # rounded up: 2**31 - 1 as float32 is 2**31
            limit = np.nextafter(limit, kind(0))
        found.append(limit)
    return found


@operation("bitcast")
def bitcast(input: TensorLike, type: DTypeLike) -> Any:
    """The bits read as another dtype; narrower or wider values make or take a last axis."""
    return jax.lax.bitcast_convert_type(tensor(input), narrowed(type))
