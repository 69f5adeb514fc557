"""An optimizer whose updates were placed next to their operations."""

from __future__ import annotations

from tailrace.compat.arguments import OptimizerLike
from tailrace.compat.ipu.optimizers.ipu_optimizer import IpuOptimizer
from tailrace.compat.originals.missing import missing_from


class ShardedOptimizer(IpuOptimizer):
    """Forwards everything to the optimizer inside.

    The original placed updates next to their operations; here the compiler does.

    Args:
        optimizer: the optimizer inside.

    Raises:
        IPUTypeError: it is not an optimizer.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> ipu.optimizers.ShardedOptimizer(optax.sgd(0.25)).get_name()
    'ShardedOptimizer'
    """

    def __init__(self, optimizer: OptimizerLike) -> None:
        super().__init__(optimizer, "ShardedOptimizer")


__getattr__, __dir__ = missing_from(__name__)
