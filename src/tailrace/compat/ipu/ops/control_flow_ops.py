"""The order of operations."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.originals.missing import missing_from


def barrier(
    tensors: TensorLike, insert_barrier_for_gradients: bool = False, name: str | None = None
) -> Any:
    """The tensors themselves; none of them can be used before all are computed.

    Args:
        tensors: a value, or a nest of them.
        insert_barrier_for_gradients: without effect: gradients have a barrier too.
        name: without effect.

    >>> from tailrace.compat import ipu
    >>> [float(x) for x in ipu.ops.control_flow_ops.barrier([1.0, 2.0])]
    [1.0, 2.0]
    """
    del insert_barrier_for_gradients, name
    return lax.optimization_barrier(jax.tree.map(as_array, tensors))


__getattr__, __dir__ = missing_from(__name__)
