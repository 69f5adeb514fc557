"""Gradients averaged over replicas."""

from __future__ import annotations

from typing import Any

from tailrace.compat.arguments import GradientsAndVariables, VariableLike
from tailrace.compat.ipu.optimizers.ipu_optimizer import IpuOptimizer
from tailrace.compat.originals.missing import missing_from
from tailrace.program.in_program import cross_replica_mean


class CrossReplicaOptimizer(IpuOptimizer):
    """Gives the inner optimizer the mean of each gradient over all replicas."""

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: VariableLike = None,
        name: str | None = None,
    ) -> Any:
        """Average, then apply; a gradient that is None stays None."""
        averaged = [
            (None if grad is None else cross_replica_mean(grad), var)
            for grad, var in grads_and_vars
        ]
        return super().apply_gradients(averaged, global_step, name)


__getattr__, __dir__ = missing_from(__name__)
