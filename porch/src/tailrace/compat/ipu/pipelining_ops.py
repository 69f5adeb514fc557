"""Pipelines; the same module as `ops.pipelining_ops`."""

from tailrace.compat.ipu.ops.pipelining_ops import (
    GradientAccumulationReductionMethod as GradientAccumulationReductionMethod,
)
from tailrace.compat.ipu.ops.pipelining_ops import (
    OptimizerFunctionOutput as OptimizerFunctionOutput,
)
from tailrace.compat.ipu.ops.pipelining_ops import PipelineSchedule as PipelineSchedule
from tailrace.compat.ipu.ops.pipelining_ops import PipelineStageOptions as PipelineStageOptions
from tailrace.compat.ipu.ops.pipelining_ops import RecomputationMode as RecomputationMode
from tailrace.compat.ipu.ops.pipelining_ops import (
    get_current_iteration_counter as get_current_iteration_counter,
)
from tailrace.compat.ipu.ops.pipelining_ops import pipeline as pipeline
from tailrace.compat.ipu.ops.pipelining_ops import (
    recomputation_checkpoint as recomputation_checkpoint,
)
from tailrace.compat.originals.missing import missing_from

__getattr__, __dir__ = missing_from(__name__)
