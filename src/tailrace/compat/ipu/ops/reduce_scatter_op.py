"""A reduction over replicas, of which each replica keeps its share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.replica_groups import Groups
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.originals.missing import missing_from
from tailrace.program.in_program import replica

_OPERATIONS = {
    # With the dtype: JAX would add int8 in int32, and return that.
    "ADD": lambda x: jnp.sum(x, 0, dtype=x.dtype),
    "MUL": lambda x: jnp.prod(x, 0, dtype=x.dtype),
    "MIN": lambda x: jnp.min(x, 0),
    "MAX": lambda x: jnp.max(x, 0),
    "LOGICAL_AND": lambda x: jnp.all(x, 0),
    "LOGICAL_OR": lambda x: jnp.any(x, 0),
    "SQUARE_ADD": lambda x: jnp.sum(x * x, 0, dtype=x.dtype),
    "MEAN": lambda x: jnp.mean(x, 0).astype(x.dtype),
}


def reduce_scatter(
    x: TensorLike, replication_factor: int, op: str = "COLLECTIVE_OP_ADD", name: str | None = None
) -> Any:
    """Reduce a value over the replicas of a group; each gets a share of the result.

    Args:
        x: a value of one dimension, or a list of them. It is padded with zeros to equal shares.
        replication_factor: how many neighbouring replicas form a group.
        op: "COLLECTIVE_OP_ADD", ..._MUL, _MIN, _MAX, _LOGICAL_AND, _LOGICAL_OR, _SQUARE_ADD, _MEAN;
            "COLLECTIVE_OP_LOCAL" takes the share of this replica's own value.
        name: without effect.

    Raises:
        IPUValueError: there is no such reduction, or a value has another number of dimensions.
        IPUTypeError: the factor is not an integer.
        InvalidArgumentError: it does not divide the number of replicas.

    >>> from tailrace.compat import ipu
    >>> def add(x):
    ...     return ipu.ops.reduce_scatter_op.reduce_scatter(x, replication_factor=1)
    >>> ipu.ipu_compiler.compile(add, [[1.0, 2.0]])()[0].tolist()  # one replica gets everything
    [1.0, 2.0]
    """
    del name
    kind = op.removeprefix("COLLECTIVE_OP_")
    if kind != "LOCAL" and kind not in _OPERATIONS:
        raise IPUValueError(
            f"{op} is not a valid reduction. Valid are COLLECTIVE_OP_LOCAL, "
            f"{', '.join(f'COLLECTIVE_OP_{each}' for each in _OPERATIONS)}."
        )
    groups = Groups.of(replication_factor, "replication_factor")

    def one(value: TensorLike) -> Any:
        value = as_array(value)
        if value.ndim != 1:
            raise IPUValueError(
                f"reduce_scatter takes values of one dimension. Received: {list(value.shape)}."
            )
        # Rounded up, and padded: the shares of all replicas have one shape.
        share = -(-value.size // groups.size)
        value = jnp.pad(value, (0, share * groups.size - value.size))
        whole = value if kind == "LOCAL" else _OPERATIONS[kind](groups.gather(value))
        return lax.dynamic_slice_in_dim(whole, (replica() % groups.size) * share, share)

    return jax.tree.map(one, x)


__getattr__, __dir__ = missing_from(__name__)
