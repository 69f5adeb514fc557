"""Products and sums that the original computed piece by piece."""

from __future__ import annotations

from typing import Any

import jax

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.originals.missing import missing_from

_DIMENSIONS = ("a_columns", "a_rows_b_columns", "b_rows")


def serialized_matmul(
    a: TensorLike,
    b: TensorLike,
    serialization_factor: int,
    serialization_dimension: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    name: str | None = None,
) -> Any:
    """The product of two matrices, or of batches of them.

    The original computed it piece by piece to save the chip's memory; here it is computed at once.

    Args:
        a: the left one.
        b: the right one.
        serialization_factor: in how many pieces the original computed it; without effect.
        serialization_dimension: along which dimension: "a_columns", "a_rows_b_columns" or "b_rows";
            checked, without effect.
        transpose_a: take the transpose of `a`.
        transpose_b: take the transpose of `b`.
        name: without effect.

    Raises:
        IPUValueError: there is no such dimension.

    >>> import numpy as np
    >>> from tailrace.compat import ipu
    >>> a, b = np.ones((2, 3), np.float32), np.ones((3, 1), np.float32)
    >>> ipu.ops.math_ops.serialized_matmul(a, b, 3, "a_columns").tolist()
    [[3.0], [3.0]]
    """
    del serialization_factor, name
    if serialization_dimension not in _DIMENSIONS:
        raise IPUValueError(
            f"serialization_dimension is one of {', '.join(_DIMENSIONS)}. "
            f"Received: {serialization_dimension!r}."
        )
    a, b = as_array(a), as_array(b)
    return (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)


def segment_sum(
    data: TensorLike, segment_ids: TensorLike, num_segments: int, name: str | None = None
) -> Any:
    """The sums of the rows of each segment.

    Args:
        data: the rows.
        segment_ids: for each row, the number of its segment, in ascending order.
        num_segments: how many segments there are.
        name: without effect.

    >>> import numpy as np
    >>> from tailrace.compat import ipu
    >>> rows = np.array([1, 2, 4], np.float32)
    >>> ipu.ops.math_ops.segment_sum(rows, np.array([0, 0, 1]), num_segments=2).tolist()
    [3.0, 4.0]
    """
    del name
    return jax.ops.segment_sum(
        as_array(data), as_array(segment_ids), num_segments, indices_are_sorted=True
    )


__getattr__, __dir__ = missing_from(__name__)
