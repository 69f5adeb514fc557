"""Gradients averaged over replicas."""

from __future__ import annotations

from typing import Any

from tailrace.compat.arguments import GradientsAndVariables, VariableLike
from tailrace.compat.ipu.optimizers.ipu_optimizer import IpuOptimizer
from tailrace.compat.originals.missing import missing_from
from tailrace.program.in_program import cross_replica_mean


class CrossReplicaOptimizer(IpuOptimizer):
    """Gives the inner optimizer the mean of each gradient over all replicas.

    Args:
        opt: the optimizer inside: an optax transformation, a Keras optimizer, or an object with
            `apply_gradients(grads_and_vars)`.
        name: what it is called.

    Raises:
        IPUTypeError: `opt` is not an optimizer.
        FailedPreconditionError: it wraps an optimizer that must be the outermost.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> w = ipu.Variable(2.0, name="w")
    >>> optimizer = ipu.optimizers.CrossReplicaOptimizer(optax.sgd(0.25))
    >>> ipu.ipu_compiler.compile(lambda: optimizer.minimize(w * w))()
    >>> w.numpy().item()
    1.0
    """

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: VariableLike = None,
        name: str | None = None,
    ) -> Any:
        """Average, then apply; a gradient that is None stays None.

        Args:
            grads_and_vars: pairs of a gradient, or None, and its variable.
            global_step: without effect; `minimize` counts.
            name: what the operation is called.
        """
        # When gradients are applied, not when they are computed: accumulated ones are averaged once.
        averaged = [
            (None if grad is None else cross_replica_mean(grad), var)
            for grad, var in grads_and_vars
        ]
        return super().apply_gradients(averaged, global_step, name)


__getattr__, __dir__ = missing_from(__name__)
