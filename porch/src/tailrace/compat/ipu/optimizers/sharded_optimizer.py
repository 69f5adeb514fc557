"""An optimizer whose updates stood beside the operations they belong to."""

from __future__ import annotations

from typing import Any

from tailrace.compat.ipu.optimizers.ipu_optimizer import IpuOptimizer
from tailrace.compat.originals.missing import missing_from


class ShardedOptimizer(IpuOptimizer):
    """Placed updates beside the operations they belong to; here the compiler does."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, "ShardedOptimizer")


__getattr__, __dir__ = missing_from(__name__)
