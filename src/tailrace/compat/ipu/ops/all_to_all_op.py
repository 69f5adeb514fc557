"""Values of all replicas, gathered on each of them, or exchanged."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.errors import InvalidArgumentError
from tailrace.compat.ipu.graph.replica_groups import Groups
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.originals.missing import missing_from
from tailrace.program.in_program import replica


def all_gather(x: TensorLike, replication_factor: int, name: str | None = None) -> Any:
    """The values that the replicas of a group have, along a new first dimension.

    Args:
        x: the value, or a list of them.
        replication_factor: how many neighbouring replicas form a group.
        name: without effect.

    Raises:
        IPUTypeError: the factor is not an integer.
        InvalidArgumentError: it does not divide the number of replicas.

    >>> from tailrace.compat import ipu
    >>> cfg = ipu.config.IPUConfig()
    >>> cfg.auto_select_ipus = 2
    >>> cfg.configure_ipu_system()
    >>> outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    >>> def numbers():
    ...     index = ipu.ops.replication_ops.replication_index()
    ...     outfeed.enqueue(ipu.ops.all_to_all_op.all_gather(index, replication_factor=2))
    >>> ipu.ipu_compiler.compile(numbers)()
    >>> outfeed.dequeue().tolist()  # one pass, two replicas, the numbers of both
    [[[0, 1], [0, 1]]]
    >>> ipu.config.reset_ipu_configuration()
    """
    del name
    groups = Groups.of(replication_factor, "replication_factor")
    return jax.tree.map(lambda value: groups.gather(as_array(value)), x)


def all_to_all(
    x: TensorLike,
    split_dimension: int,
    concat_dimension: int,
    replication_factor: int,
    name: str | None = None,
) -> Any:
    """Replica r gets the r-th part of the value of each replica.

    Args:
        x: the value.
        split_dimension: the dimension that is cut into as many parts as there are replicas.
        concat_dimension: the dimension along which the parts of all replicas are put together.
        replication_factor: how many replicas there are.
        name: without effect.

    Raises:
        IPUTypeError: the factor is not an integer.
        InvalidArgumentError: the dimension cannot be cut into as many parts as there are
            replicas.

    >>> from tailrace.compat import ipu
    >>> def swap(x):
    ...     return ipu.ops.all_to_all_op.all_to_all(x, 0, 0, replication_factor=1)
    >>> ipu.ipu_compiler.compile(swap, [[1.0, 2.0]])()[0].tolist()  # one replica keeps its own
    [1.0, 2.0]
    """
    del name
    x = as_array(x)
    if x.shape[split_dimension] % replication_factor:
        raise InvalidArgumentError(
            f"all_to_all cuts dimension {split_dimension}, of size {x.shape[split_dimension]}, into "
            f"{replication_factor} equal parts. Give a size that it divides."
        )
    # By way of a gather: a sum over replicas is the one exchange that programs have
    # (`replica_groups`).
    everything = Groups.of(replication_factor, "replication_factor").gather(x)
    size = x.shape[split_dimension] // replication_factor
    # The gather has put a dimension of replicas in front.
    mine = lax.dynamic_slice_in_dim(
        everything, (replica() % replication_factor) * size, size, split_dimension + 1
    )
    return jnp.concatenate(list(mine), axis=concat_dimension)


__getattr__, __dir__ = missing_from(__name__)
