"""The original programming interface of TensorFlow for IPUs: `from tailrace.compat import ipu`.

It replaces `tensorflow.python.ipu`, submodules too. Everything here is a few lines
over the engine; docs/guides/originals_names.md has every name and what became of it.

In: functions that read and write variables, feeds, and options of the original. Out: device programs.

    config, settings, scopes      which devices a program gets; options that are checked and noted
    ipu_compiler, loops, graph    a function as a program: variables, gradients, loops
    pipelining, pipelining_ops    pipelines, on the engine of `trainer`
    ipu_strategy, strategy, keras Keras models, on `tailrace.keras`
    ops, optimizers, eager        operations and optimizers, by the modules they were in
    ipu_infeed_queue, ipu_outfeed_queue, dataset_benchmark   feeds, on those of `feeds`
    errors, utils, distributed    exceptions; seeds and questions; several processes

Rule: a module has the name of the original's. A name that is not here is refused with a sentence
(`originals/missing.py`). Errors are those of `errors`, in the original's words where it had any.
"""

from __future__ import annotations

from tailrace.compat.ipu import config as config
from tailrace.compat.ipu import dataset_benchmark as dataset_benchmark
from tailrace.compat.ipu import eager as eager
from tailrace.compat.ipu import errors as errors
from tailrace.compat.ipu import gradient_accumulation as gradient_accumulation
from tailrace.compat.ipu import ipu_compiler as ipu_compiler
from tailrace.compat.ipu import ipu_infeed_queue as ipu_infeed_queue
from tailrace.compat.ipu import ipu_outfeed_queue as ipu_outfeed_queue
from tailrace.compat.ipu import loops as loops
from tailrace.compat.ipu import ops as ops
from tailrace.compat.ipu import optimizers as optimizers
from tailrace.compat.ipu import pipelining_ops as pipelining_ops
from tailrace.compat.ipu import scopes as scopes
from tailrace.compat.ipu import utils as utils
from tailrace.compat.ipu.graph import variables as variables
from tailrace.compat.ipu.graph.gradients import GradientTape as GradientTape
from tailrace.compat.ipu.graph.named_variables import get_variable as get_variable
from tailrace.compat.ipu.graph.named_variables import variable_scope as variable_scope
from tailrace.compat.ipu.graph.variables import Variable as Variable
from tailrace.compat.originals.missing import missing_from

_OPERATIONS = (
    "all_to_all_op",
    "control_flow_ops",
    "cross_replica_ops",
    "embedding_ops",
    "functional_ops",
    "grad_util_ops",
    "internal_ops",
    "math_ops",
    "nn_ops",
    "rand_ops",
    "reduce_scatter_op",
    "replication_ops",
)
"""Modules of `ops` that have a name here too."""

_OPTIMIZERS = (
    "automatic_loss_scaling_optimizer",
    "cross_replica_optimizer",
    "gradient_accumulation_optimizer",
    "ipu_optimizer",
    "map_gradient_optimizer",
    "sharded_optimizer",
)

__getattr__, __dir__ = missing_from(
    __name__,
    {
        "distributed": f"{__name__}.distributed",
        "ipu_strategy": f"{__name__}.ipu_strategy",  # these two need Keras
        "keras": f"{__name__}.keras",
        "layers": f"{__name__}.keras.layers",
        "outlined_function": f"{__name__}.ops.functional_ops:outlined_function",
        **{name: f"{__name__}.ops.{name}" for name in _OPERATIONS},
        **{name: f"{__name__}.optimizers.{name}" for name in _OPTIMIZERS},
    },
)
