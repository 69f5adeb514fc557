"""Optimizers around optimizers: over replicas, over mini-batches, with mapped gradients.

Each takes an optax transformation, a Keras optimizer, or one with the interface of the original.

In: (gradient, variable) pairs, inside a program. Out: the same to the optimizer inside, and
assignments.
Rule: a wrapper changes gradients, or when they are applied; only the innermost optimizer changes
weights.
"""

from tailrace.compat.ipu.gradient_accumulation import (
    GradientAccumulationReductionMethod as GradientAccumulationReductionMethod,
)
from tailrace.compat.ipu.graph.update import Optimizer as Optimizer
from tailrace.compat.ipu.optimizers.cross_replica_optimizer import (
    CrossReplicaOptimizer as CrossReplicaOptimizer,
)
from tailrace.compat.ipu.optimizers.gradient_accumulation_optimizer import (
    CrossReplicaGradientAccumulationOptimizer as CrossReplicaGradientAccumulationOptimizer,
)
from tailrace.compat.ipu.optimizers.gradient_accumulation_optimizer import (
    CrossReplicaGradientAccumulationOptimizerV2 as CrossReplicaGradientAccumulationOptimizerV2,
)
from tailrace.compat.ipu.optimizers.gradient_accumulation_optimizer import (
    GradientAccumulationOptimizer as GradientAccumulationOptimizer,
)
from tailrace.compat.ipu.optimizers.gradient_accumulation_optimizer import (
    GradientAccumulationOptimizerV2 as GradientAccumulationOptimizerV2,
)
from tailrace.compat.ipu.optimizers.ipu_optimizer import (
    IpuOptimizer as IpuOptimizer,
)
from tailrace.compat.ipu.optimizers.map_gradient_optimizer import (
    MapGradientOptimizer as MapGradientOptimizer,
)
from tailrace.compat.ipu.optimizers.sharded_optimizer import (
    ShardedOptimizer as ShardedOptimizer,
)
from tailrace.compat.originals.missing import missing_from

_HOME = "tailrace.compat.ipu.optimizers.automatic_loss_scaling_optimizer"

__getattr__, __dir__ = missing_from(
    __name__,
    {
        "ALSGradientAccumulationOptimizer": f"{_HOME}:ALSGradientAccumulationOptimizer",
        "ALSOptimizer": f"{_HOME}:ALSOptimizer",
        "automatic_loss_scaling_optimizer": _HOME,
    },
)
