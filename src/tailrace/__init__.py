"""Training that stays on the device: fed by an infeed, read through an outfeed, open to view.

>>> import tailrace as tr
"""

from tailrace import _jax as _jax
from tailrace import data as data
from tailrace import devices as _devices
from tailrace import distributed as distributed
from tailrace import errors as errors
from tailrace._version import __version__ as __version__
from tailrace.data.batches import batches as batches
from tailrace.data.benchmark import dataset_benchmark as dataset_benchmark
from tailrace.data.benchmark import infeed_benchmark as infeed_benchmark
from tailrace.devices import configure as configure
from tailrace.errors import DeviceError as DeviceError
from tailrace.errors import TailraceError as TailraceError
from tailrace.feeds.infeed import InfeedQueue as InfeedQueue
from tailrace.feeds.outfeed import OutfeedMode as OutfeedMode
from tailrace.feeds.outfeed import OutfeedQueue as OutfeedQueue
from tailrace.observe.filters import MaybeOutfeedQueue as MaybeOutfeedQueue
from tailrace.observe.prints import print_tensor as print_tensor
from tailrace.observe.records import Records as Records
from tailrace.pipeline import PipelineSchedule as PipelineSchedule
from tailrace.pipeline import plan as plan
from tailrace.pipeline import what_if as what_if
from tailrace.pipeline.balance import Balance as Balance
from tailrace.pipeline.balance import balance as balance
from tailrace.pipeline.boundary import stage_boundary as stage_boundary
from tailrace.pipeline.halves import recomputation_checkpoint as recomputation_checkpoint
from tailrace.pipeline.pipeline import Pipeline as Pipeline
from tailrace.program import optimizers as optimizers
from tailrace.program.accumulation import Accumulation as Accumulation
from tailrace.program.accumulation import Reduction as Reduction
from tailrace.program.inside import cross_replica_mean as cross_replica_mean
from tailrace.program.inside import cross_replica_sum as cross_replica_sum
from tailrace.program.inside import key as key
from tailrace.program.inside import microbatch as microbatch
from tailrace.program.inside import replica as replica
from tailrace.program.inside import step as step
from tailrace.program.loops import repeat as repeat
from tailrace.program.loops import while_loop as while_loop
from tailrace.program.observed import observe as observe
from tailrace.program.program import Program as Program
from tailrace.program.program import compile as compile
from tailrace.runs.diff import diff as diff
from tailrace.runs.reader import open_run as open_run
from tailrace.tensors.taps import Tap as Tap
from tailrace.tensors.taps import every as every
from tailrace.tensors.taps import stop_on_nonfinite as stop_on_nonfinite
from tailrace.training.callbacks import Callback as Callback
from tailrace.training.history import History as History
from tailrace.training.trainer import Trainer as Trainer
from tailrace.training.verify import verify as verify

_jax.refuse_scan3()
_devices.apply_environment()
