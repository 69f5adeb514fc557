"""The public names, for type checkers; `__init__.py` loads them on first use."""

from tailrace import data as data
from tailrace import errors as errors
from tailrace._version import __version__ as __version__
from tailrace.base.spans.span import counter as counter
from tailrace.data.batches import batches as batches
from tailrace.devices.devices import configure as configure
from tailrace.devices.processes import distributed as distributed
from tailrace.errors import DeviceError as DeviceError
from tailrace.errors import TailraceError as TailraceError
from tailrace.feeds.benchmark.measure import dataset_benchmark as dataset_benchmark
from tailrace.feeds.benchmark.measure import infeed_benchmark as infeed_benchmark
from tailrace.feeds.infeed import InfeedQueue as InfeedQueue
from tailrace.feeds.outfeed import OutfeedMode as OutfeedMode
from tailrace.feeds.outfeed import OutfeedQueue as OutfeedQueue
from tailrace.pipeline.balance import Balance as Balance
from tailrace.pipeline.balance import balance as balance
from tailrace.pipeline.boundary import stage_boundary as stage_boundary
from tailrace.pipeline.lowering.forward_backward import (
    recomputation_checkpoint as recomputation_checkpoint,
)
from tailrace.pipeline.pipeline import Pipeline as Pipeline
from tailrace.pipeline.schedule.plan import plan as plan
from tailrace.pipeline.schedule.schedules import PipelineSchedule as PipelineSchedule
from tailrace.pipeline.schedule.what_if import what_if as what_if
from tailrace.profiling.timeline.trace import trace as trace
from tailrace.program import optimizers as optimizers
from tailrace.program.compile import Program as Program
from tailrace.program.compile import compile as compile
from tailrace.program.in_program import cross_replica_mean as cross_replica_mean
from tailrace.program.in_program import cross_replica_sum as cross_replica_sum
from tailrace.program.in_program import key as key
from tailrace.program.in_program import microbatch as microbatch
from tailrace.program.in_program import replica as replica
from tailrace.program.in_program import step as step
from tailrace.program.in_program import training as training
from tailrace.program.loops import repeat as repeat
from tailrace.program.loops import while_loop as while_loop
from tailrace.program.observe import observe as observe
from tailrace.program.step.accumulation import Accumulation as Accumulation
from tailrace.program.step.accumulation import Reduction as Reduction
from tailrace.program.step.loss_scale import LossScale as LossScale
from tailrace.records.filtered_outfeed import MaybeOutfeedQueue as MaybeOutfeedQueue
from tailrace.records.history import History as History
from tailrace.records.print_tensor import print_tensor as print_tensor
from tailrace.records.records import Records as Records
from tailrace.runs.diff.run_diff import diff as diff
from tailrace.runs.reader import open_run as open_run
from tailrace.taps.tap import Tap as Tap
from tailrace.taps.tap import every as every
from tailrace.taps.tap import stop_on_nonfinite as stop_on_nonfinite
from tailrace.trainer import callbacks as callbacks
from tailrace.trainer.callbacks.callback import Callback as Callback
from tailrace.trainer.callbacks.on_spike import on_spike as on_spike
from tailrace.trainer.checkpoints.checkpoint import Checkpoint as Checkpoint
from tailrace.trainer.trainer import Trainer as Trainer
from tailrace.trainer.verify import verify as verify
