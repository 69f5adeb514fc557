"""Rows of a table, by their numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.originals.missing import missing_from


def embedding_lookup(
    params: Tree,
    ids: TensorLike,
    serialization_factor: int = 1,
    indices_are_sorted: bool = False,
    name: str | None = None,
) -> Any:
    """The rows of `params` that `ids` names.

    Args:
        params: the table.
        ids: numbers of rows; one beyond the table gives a row of NaN, as `jnp.take` does.
        serialization_factor: in how many pieces the original looked them up; without effect.
        indices_are_sorted: whether they are in order.
        name: without effect.

    >>> import numpy as np
    >>> from tailrace.compat import ipu
    >>> table = np.arange(6, dtype=np.float32).reshape(3, 2)
    >>> ipu.ops.embedding_ops.embedding_lookup(table, np.array([2, 0])).tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    """
    # In how many pieces the chip looked rows up saved its memory; the rows are the same.
    del serialization_factor, name
    return jnp.take(as_array(params), as_array(ids), axis=0, indices_are_sorted=indices_are_sorted)


__getattr__, __dir__ = missing_from(__name__)
