"""`pipeline`: a model cut into stages, each on its own device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.compat.ipu.errors import IPURuntimeError
from tailrace.compat.ipu.gradient_accumulation import (
    GradientAccumulationReductionMethod as GradientAccumulationReductionMethod,
)
from tailrace.compat.ipu.graph.operations import Operation
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.ipu.graph.update import Optimizer
from tailrace.compat.ipu.ipu_infeed_queue import IPUInfeedQueue
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedQueue
from tailrace.compat.ipu.pipelining import pipelines
from tailrace.compat.ipu.pipelining.optimizer_output import (
    OptimizerFunctionOutput as OptimizerFunctionOutput,
)
from tailrace.compat.ipu.pipelining.pipeline_options import PipelineOptions
from tailrace.compat.ipu.pipelining.pipeline_options import PipelineSchedule as PipelineSchedule
from tailrace.compat.ipu.pipelining.pipeline_options import (
    PipelineStageOptions as PipelineStageOptions,
)
from tailrace.compat.ipu.pipelining.pipeline_options import RecomputationMode as RecomputationMode
from tailrace.compat.originals.missing import missing_from
from tailrace.pipeline.lowering.forward_backward import (
    recomputation_checkpoint as engine_checkpoint,
)
from tailrace.program.in_program import microbatch


def pipeline(
    computational_stages: Sequence[Any],
    gradient_accumulation_count: TensorLike = None,
    gradient_accumulation_dtype: DTypeLike = None,
    gradient_accumulation_for_captured_grads: bool = True,
    repeat_count: int = 1,
    batch_serialization_iterations: int = 1,
    inputs: TensorLike = None,
    infeed_queue: IPUInfeedQueue | None = None,
    outfeed_queue: IPUOutfeedQueue | None = None,
    optimizer_function: Callable[..., Any] | None = None,
    device_mapping: Sequence[Any] | None = None,
    pipeline_schedule: PipelineSchedule | None = None,
    recomputation_mode: RecomputationMode | None = None,
    forward_propagation_stages_poplar_options: Sequence[PipelineStageOptions] | None = None,
    backward_propagation_stages_poplar_options: Sequence[PipelineStageOptions] | None = None,
    weight_update_poplar_options: dict[str, str] | None = None,
    offload_weight_update_variables: bool | None = None,
    replicated_optimizer_state_sharding: bool = False,
    offload_activations: bool | None = None,
    offload_gradient_accumulation_buffers: bool | None = None,
    replicated_weight_sharding: bool | None = None,
    offload_weights: bool | None = None,
    continuous_weight_updates: bool = False,
    outfeed_loss: bool = False,
    accumulate_outfeed: bool = False,
    accumulate_outfeed_dtype: DTypeLike = None,
    outfeed_mask: Sequence[bool] | None = None,
    reduction_method: GradientAccumulationReductionMethod
    | str = GradientAccumulationReductionMethod.SUM,
    name: str | None = None,
) -> Operation:
    """Run mini-batches through stages on several devices; with an optimizer, train.

    Call it in a function given to `ipu_compiler.compile`, alone or with `inputs`. All mini-batches of
    an execution use the same weights, so the schedule changes no result.

    Args:
        computational_stages: a function for each stage; a list of functions for concurrent ones.
        gradient_accumulation_count: how many mini-batches go through before the weights change.
        gradient_accumulation_dtype: the dtype of accumulators: None, a dtype, or a function of the
            variable.
        gradient_accumulation_for_captured_grads: about captured gradients; without effect.
        repeat_count: how many times the whole is run, each with its update.
        batch_serialization_iterations: mini-batches that a stage takes before the next one runs.
        inputs: values that are the same for every mini-batch of a call.
        infeed_queue: where the first stage takes an element from, for each mini-batch.
        outfeed_queue: where the outputs of the last stage (or the loss) go.
        optimizer_function: called with the outputs of the last stage; returns an
            `OptimizerFunctionOutput`.
        device_mapping: the device of each stage; None: one after the other.
        pipeline_schedule: a `PipelineSchedule`; None: Grouped.
        recomputation_mode: checked; activations are recomputed if the configuration allows it.
        forward_propagation_stages_poplar_options: checked, and noted.
        backward_propagation_stages_poplar_options: checked, and noted.
        weight_update_poplar_options: checked, and noted.
        offload_weight_update_variables: keep the optimizer's state in the host's memory between
            updates; None: where that pays.
        replicated_optimizer_state_sharding: let each replica keep a share of it.
        offload_activations: keep what forwards leave for backwards in the host's memory.
        offload_gradient_accumulation_buffers: noted.
        replicated_weight_sharding: noted.
        offload_weights: noted.
        continuous_weight_updates: refused, as in the original.
        outfeed_loss: send the loss out instead of the outputs.
        accumulate_outfeed: send out the sum over the mini-batches, once a run.
        accumulate_outfeed_dtype: the dtype of that sum: None, a dtype, or a function of the value.
        outfeed_mask: True for each output that is NOT sent out.
        reduction_method: SUM, MEAN or RUNNING_MEAN of the gradients; or its name.
        name: what it is called.

    Returns:
        An operation: it changes variables and sends values out.

    Raises:
        IPUValueError: an argument has a value it may not have.
        IPUTypeError: an argument has the wrong type.
        IPUNotImplementedError: `continuous_weight_updates`, or batch serialization with another
            schedule than Sequential.
        UnimplementedError: the schedule does not go with the recomputation mode.
        FailedPreconditionError: the stages, feeds or mini-batches do not fit together.

    >>> import numpy as np
    >>> import optax
    >>> from tailrace.compat import ipu
    >>> cfg = ipu.config.IPUConfig()
    >>> cfg.auto_select_ipus = 2
    >>> cfg.configure_ipu_system()
    >>> w = ipu.Variable(0.0, name="w")
    >>> infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.float32(1)] * 4)
    >>> outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    >>> def optimizer_function(loss):
    ...     return ipu.pipelining_ops.OptimizerFunctionOutput(optax.sgd(0.25), loss)
    >>> def training():
    ...     return ipu.pipelining_ops.pipeline(
    ...         [lambda x: w * x, lambda y: (y - 1) ** 2],
    ...         gradient_accumulation_count=4,
    ...         infeed_queue=infeed,
    ...         outfeed_queue=outfeed,
    ...         optimizer_function=optimizer_function,
    ...         reduction_method="mean",
    ...     )
    >>> _ = infeed.initializer
    >>> ipu.ipu_compiler.compile(training)()
    >>> outfeed.dequeue()[0].tolist(), w.numpy().item()
    ([1.0, 1.0, 1.0, 1.0], 0.5)
    >>> ipu.config.reset_ipu_configuration()
    """
    # The first statement: `locals()` is the arguments, and nothing else.
    options = PipelineOptions(**locals())
    options.check()
    return pipelines.add(options)


def recomputation_checkpoint(tensors: TensorLike, name: str | None = None) -> Any:
    """Mark values in a stage that are kept rather than recomputed; they are returned.

    It counts where recomputation and backward pass are interleaved; see `RecomputationMode`.

    Args:
        tensors: a value, or a nest of them.
        name: without effect.

    >>> from tailrace.compat import ipu
    >>> float(ipu.pipelining_ops.recomputation_checkpoint(2.0))  # outside a pipeline: the value
    2.0
    """
    del name
    return engine_checkpoint(tensors)


def get_current_iteration_counter() -> Any:
    """Which mini-batch of the current run of the pipeline this is, from 0.

    Raises:
        IPURuntimeError: it is called outside a pipeline.

    >>> from tailrace.compat import ipu
    >>> outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    >>> def numbered():
    ...     counter = ipu.pipelining_ops.get_current_iteration_counter
    ...     stages = [lambda: counter(), lambda number: number]
    ...     return ipu.pipelining_ops.pipeline(
    ...         stages, 4, outfeed_queue=outfeed, device_mapping=[0, 0]
    ...     )
    >>> ipu.ipu_compiler.compile(numbered)()
    >>> outfeed.dequeue().tolist()
    [0, 1, 2, 3]
    """
    scope = current()
    if scope is None:
        raise IPURuntimeError("get_current_iteration_counter() may only be used inside a pipeline.")
    return microbatch()


__getattr__, __dir__ = missing_from(__name__)

__all__ = [
    "GradientAccumulationReductionMethod",
    "Optimizer",
    "OptimizerFunctionOutput",
    "PipelineSchedule",
    "PipelineStageOptions",
    "RecomputationMode",
    "get_current_iteration_counter",
    "pipeline",
    "recomputation_checkpoint",
]
