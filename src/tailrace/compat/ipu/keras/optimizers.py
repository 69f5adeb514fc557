"""Optimizers around Keras' optimizers, for models that are trained by `fit`."""

from __future__ import annotations

from typing import Any

import tailrace.keras as _tk
from tailrace.base.array_like import DTypeLike
from tailrace.compat.arguments import OptimizerLike
from tailrace.compat.ipu.gradient_accumulation import GradientAccumulationReductionMethod
from tailrace.compat.ipu.optimizers.gradient_accumulation_optimizer import check_sharding
from tailrace.compat.originals.missing import missing_from


def GradientAccumulationOptimizer(
    opt: OptimizerLike,
    num_mini_batches: int,
    offload_weight_update_variables: bool | None = None,
    replicated_optimizer_state_sharding: bool = False,
    dtype: DTypeLike = None,
    reduction_method: GradientAccumulationReductionMethod
    | str = GradientAccumulationReductionMethod.SUM,
    name: str | None = None,
) -> Any:
    """`tk.GradientAccumulationOptimizer`, with the original's arguments.

    Args:
        opt: a Keras optimizer.
        num_mini_batches: how many batches of a replica make a step; with 1, `opt` itself.
        offload_weight_update_variables: noted; see `set_gradient_accumulation_options`.
        replicated_optimizer_state_sharding: noted, likewise.
        dtype: the dtype of accumulators: None, a dtype, or a function of the variable.
        reduction_method: SUM, MEAN or RUNNING_MEAN; or its name.
        name: the name of the wrapper.

    Raises:
        IPUValueError: there is no such reduction, or the state is sharded without being offloaded.

    >>> from tailrace.compat.ipu.keras import optimizers  # before Keras, which then runs on JAX
    >>> import keras
    >>> optimizer = optimizers.GradientAccumulationOptimizer(keras.optimizers.SGD(0.1), 4)
    >>> type(optimizer).__name__
    'GradientAccumulationOptimizer'
    """
    check_sharding(offload_weight_update_variables, replicated_optimizer_state_sharding)
    method = GradientAccumulationReductionMethod.parse_reduction_method(reduction_method)
    return _tk.GradientAccumulationOptimizer(
        opt, num_mini_batches, dtype=dtype, reduction_method=str(method.reduction), name=name
    )


__getattr__, __dir__ = missing_from(
    __name__,
    {
        "CrossReplicaOptimizer": "tailrace.keras:CrossReplicaOptimizer",
        "MapGradientOptimizer": "tailrace.keras:MapGradientOptimizer",
    },
)
