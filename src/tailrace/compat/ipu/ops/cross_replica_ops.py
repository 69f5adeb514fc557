"""Reductions over replicas: over all of them, or within groups of neighbours."""

from __future__ import annotations

from typing import Any

import jax

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.graph.replica_groups import Groups
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.originals.missing import missing_from
from tailrace.jaxprs.marks import Tag, mark
from tailrace.program import in_program as engine


def cross_replica_sum(
    x: TensorLike, replica_group_size: int | None = None, name: str | None = None
) -> Any:
    """The sum of `x` over replicas, on each of them.

    Args:
        x: the value.
        replica_group_size: how many neighbouring replicas are summed: with 2 of 4, replicas 0 and 1
            get their sum, and 2 and 3 theirs. None: all.
        name: without effect.

    Raises:
        IPUTypeError: the size is not an integer.
        InvalidArgumentError: it does not divide the number of replicas.

    >>> from tailrace.compat import ipu
    >>> cfg = ipu.config.IPUConfig()
    >>> cfg.auto_select_ipus = 2
    >>> cfg.configure_ipu_system()
    >>> total = ipu.ipu_compiler.compile(ipu.ops.cross_replica_ops.cross_replica_sum, [3.0])
    >>> total()[0].item()
    6.0
    >>> ipu.config.reset_ipu_configuration()
    """
    del name
    if replica_group_size is None:
        return engine.cross_replica_sum(as_array(x))
    return Groups.of(replica_group_size, "replica_group_size").sum(as_array(x))


def cross_replica_mean(
    x: TensorLike, replica_group_size: int | None = None, name: str | None = None
) -> Any:
    """The mean of `x` over replicas, on each of them.

    Args:
        x: the value.
        replica_group_size: how many neighbouring replicas are averaged; None: all.
        name: without effect.

    Raises:
        IPUTypeError: the size is not an integer.
        InvalidArgumentError: it does not divide the number of replicas.

    >>> from tailrace.compat import ipu
    >>> mean = ipu.ipu_compiler.compile(ipu.ops.cross_replica_ops.cross_replica_mean, [3.0])
    >>> mean()[0].item()
    3.0
    """
    del name
    if replica_group_size is None:
        return engine.cross_replica_mean(as_array(x))
    return Groups.of(replica_group_size, "replica_group_size").mean(as_array(x))


def assume_equal_across_replicas(tensors: TensorLike, inplace: bool = False) -> Any:
    """The tensors themselves, declared to be equal on all replicas.

    Args:
        tensors: a value, or a nest of them. That they are equal is not checked.
        inplace: without effect.

    >>> from tailrace.compat import ipu
    >>> same = ipu.ops.cross_replica_ops.assume_equal_across_replicas
    >>> ipu.ipu_compiler.compile(lambda x: same(x), [3.0])()[0].item()
    3.0
    """
    del inplace
    # A mark: the engine would otherwise refuse to return a value that differs between replicas.
    return jax.tree.map(lambda x: mark(as_array(x), Tag("equal at the end")), tensors)


__getattr__, __dir__ = missing_from(__name__)
