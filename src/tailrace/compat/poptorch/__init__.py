"""Programs written for PopTorch run with this import instead.

    from tailrace.compat import poptorch

Models, options, loaders, optimizers, blocks and anchors have the original's names. What only the IPU
had is accepted, with one log message.

In: modules, tensors, and options with the original's names. Out: models of `tailrace.torch`.

    executor, loader, optim, ops   the classes of `tailrace.torch` under other names and arguments
    options, settings, enums       options as the original checks them, translated once
    names                          names of tensors, in both directions
    arg_parsers, compile_hooks     the user's classes as arguments; functions to call when compiling
    process_shares, profiling      the rows of one of several processes; tracepoints, without effect

Rule: it translates and checks; nothing is computed here. Errors are those of `errors`.
"""

from tailrace.compat.originals.missing import missing_from
from tailrace.compat.poptorch import enums as enums
from tailrace.compat.poptorch import ops as ops
from tailrace.compat.poptorch import optim as optim
from tailrace.compat.poptorch import options as options
from tailrace.compat.poptorch import profiling as profiling
from tailrace.compat.poptorch.arg_parsers import ICustomArgParser as ICustomArgParser
from tailrace.compat.poptorch.arg_parsers import registerCustomArgParser as registerCustomArgParser
from tailrace.compat.poptorch.compile_hooks import (
    registerPostCompileHook as registerPostCompileHook,
)
from tailrace.compat.poptorch.compile_hooks import registerPreCompileHook as registerPreCompileHook
from tailrace.compat.poptorch.enums import AutoStage as AutoStage
from tailrace.compat.poptorch.enums import CommGroupType as CommGroupType
from tailrace.compat.poptorch.enums import ConnectionType as ConnectionType
from tailrace.compat.poptorch.enums import DataLoaderMode as DataLoaderMode
from tailrace.compat.poptorch.enums import HalfFloatCastingBehavior as HalfFloatCastingBehavior
from tailrace.compat.poptorch.enums import Liveness as Liveness
from tailrace.compat.poptorch.enums import MatMulSerializationMode as MatMulSerializationMode
from tailrace.compat.poptorch.enums import MeanReductionStrategy as MeanReductionStrategy
from tailrace.compat.poptorch.enums import MultiConvPlanType as MultiConvPlanType
from tailrace.compat.poptorch.enums import OutputMode as AnchorMode  # noqa: F401
from tailrace.compat.poptorch.enums import OutputMode as OutputMode
from tailrace.compat.poptorch.enums import OverlapMode as OverlapMode
from tailrace.compat.poptorch.enums import ReductionType as ReductionType
from tailrace.compat.poptorch.enums import SharingStrategy as SharingStrategy
from tailrace.compat.poptorch.enums import SyncPattern as SyncPattern
from tailrace.compat.poptorch.enums import VariableRetrievalMode as VariableRetrievalMode
from tailrace.compat.poptorch.errors import Error as Error
from tailrace.compat.poptorch.errors import RecoverableError as RecoverableError
from tailrace.compat.poptorch.errors import UnrecoverableError as UnrecoverableError
from tailrace.compat.poptorch.executor import PoplarExecutor as PoplarExecutor
from tailrace.compat.poptorch.executor import inferenceModel as inferenceModel
from tailrace.compat.poptorch.executor import load as load
from tailrace.compat.poptorch.executor import trainingModel as trainingModel
from tailrace.compat.poptorch.loader import AsynchronousDataAccessor as AsynchronousDataAccessor
from tailrace.compat.poptorch.loader import DataLoader as DataLoader
from tailrace.compat.poptorch.ops import CPU as CPU
from tailrace.compat.poptorch.ops import Attribute as Attribute
from tailrace.compat.poptorch.ops import BeginBlock as BeginBlock
from tailrace.compat.poptorch.ops import Block as Block
from tailrace.compat.poptorch.ops import BlockFunction as BlockFunction
from tailrace.compat.poptorch.ops import MultiConv as MultiConv
from tailrace.compat.poptorch.ops import NameScope as NameScope
from tailrace.compat.poptorch.ops import cond as cond
from tailrace.compat.poptorch.ops import ctc_beam_search_decoder as ctc_beam_search_decoder
from tailrace.compat.poptorch.ops import custom_op as custom_op
from tailrace.compat.poptorch.ops import dynamic_slice as dynamic_slice
from tailrace.compat.poptorch.ops import dynamic_update as dynamic_update
from tailrace.compat.poptorch.ops import for_loop as for_loop
from tailrace.compat.poptorch.ops import ipu_print_tensor as ipu_print_tensor
from tailrace.compat.poptorch.ops import ipuHardwareIsAvailable as ipuHardwareIsAvailable
from tailrace.compat.poptorch.ops import ipuHardwareVersion as ipuHardwareVersion
from tailrace.compat.poptorch.ops import isRunningOnIpu as isRunningOnIpu
from tailrace.compat.poptorch.ops import module_repr as module_repr
from tailrace.compat.poptorch.ops import nop as nop
from tailrace.compat.poptorch.ops import recomputationCheckpoint as recomputationCheckpoint
from tailrace.compat.poptorch.ops import removeBlocks as removeBlocks
from tailrace.compat.poptorch.ops import serializedMatMul as serializedMatMul
from tailrace.compat.poptorch.ops import set_available_memory as set_available_memory
from tailrace.compat.poptorch.ops import set_overlap_for_input as set_overlap_for_input
from tailrace.compat.poptorch.ops import set_overlap_for_output as set_overlap_for_output
from tailrace.compat.poptorch.ops import setLogLevel as setLogLevel
from tailrace.compat.poptorch.options import Options as Options
from tailrace.compat.poptorch.settings.locations import (
    TensorLocationSettings as TensorLocationSettings,
)
from tailrace.compat.poptorch.settings.option_files import ConfigFileError as ConfigFileError
from tailrace.compat.poptorch.settings.strategies import (
    ParallelPhasedExecution as ParallelPhasedExecution,
)
from tailrace.compat.poptorch.settings.strategies import Phase as Phase
from tailrace.compat.poptorch.settings.strategies import PipelinedExecution as PipelinedExecution
from tailrace.compat.poptorch.settings.strategies import (
    SerialPhasedExecution as SerialPhasedExecution,
)
from tailrace.compat.poptorch.settings.strategies import ShardedExecution as ShardedExecution
from tailrace.compat.poptorch.settings.strategies import Stage as Stage
from tailrace.torch.tracing.losses import identity_loss as identity_loss

__getattr__, __dir__ = missing_from(__name__)
