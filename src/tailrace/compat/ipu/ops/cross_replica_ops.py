"""Reductions over replicas."""

from typing import Any

from tailrace.program import in_program as engine


def cross_replica_sum(x: Any, name: str | None = None) -> Any:
    """The sum of `x` over all replicas, on each of them."""
    del name
    return engine.cross_replica_sum(x)


def cross_replica_mean(x: Any, name: str | None = None) -> Any:
    """The mean of `x` over all replicas, on each of them."""
    del name
    return engine.cross_replica_mean(x)
