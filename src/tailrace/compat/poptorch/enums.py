"""The enumerations of the original, with its numbers."""

from __future__ import annotations

import enum

from tailrace.compat.originals.missing import missing_from


class OutputMode(enum.Enum):
    """Which values of a tensor a call returns. `AnchorMode` is an older name.

    Final: those of the last microbatch. All: those of every microbatch. Sum: their sum. EveryN: those
    of microbatches N-1, 2N-1, ... Default: All for inference, Final for training.

    >>> from tailrace.compat import poptorch
    >>> poptorch.Options().outputMode(poptorch.OutputMode.EveryN, 4).output_return_period
    4
    """

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


MODES = {
    OutputMode.Final: "final",
    OutputMode.EveryN: "every_n",
    OutputMode.All: "all",
    OutputMode.Sum: "sum",
    OutputMode.Default: "default",
}
"""What the modes are called natively."""


class ReductionType(enum.Enum):
    """How gradients of microbatches and replicas become one: Sum or Mean. NoReduction is refused.

    >>> from tailrace.compat import poptorch
    >>> training = poptorch.Options().Training
    >>> _ = training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    """

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(enum.Enum):
    """When a mean of gradients is divided: Running (as they come), Post (at the end) or PostAndLoss.

    >>> from tailrace.compat import poptorch
    >>> running = poptorch.MeanReductionStrategy.Running
    >>> training = poptorch.Options().Training
    >>> _ = training.setMeanAccumulationAndReplicationReductionStrategy(running)
    """

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(enum.Enum):
    """How a `DataLoader` reads.

    Sync: when it is asked. Async: ahead, in a thread. AsyncRebatched: ahead, with workers that deliver
    smaller batches.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> rows = torch.utils.data.TensorDataset(torch.arange(4))
    >>> mode = poptorch.DataLoaderMode.Async
    >>> loader = poptorch.DataLoader(poptorch.Options(), rows, batch_size=2, mode=mode)
    >>> [x.tolist() for (x,) in loader]
    [[0, 1], [2, 3]]
    """

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.Enum):
    """How the original's processes shared memory; without effect, there is no second process here.

    SharedMemory, FileSystem, Fork or ForkServer.

    >>> from tailrace.compat import poptorch
    >>> poptorch.SharingStrategy.ForkServer.value
    3
    """

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class ConnectionType(enum.Enum):
    """When the device is attached: Always or OnDemand, without effect. Never is refused.

    >>> from tailrace.compat import poptorch
    >>> options = poptorch.Options().connectionType(poptorch.ConnectionType.OnDemand)
    """

    Always = 0
    OnDemand = 1
    Never = 2


class SyncPattern(enum.Enum):
    """How IPUs synchronise: Full, SinglePipeline or ReplicaAndLadder; without effect.

    >>> from tailrace.compat import poptorch
    >>> options = poptorch.Options().syncPattern(poptorch.SyncPattern.Full)
    """

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class AutoStage(enum.Enum):
    """How blocks become stages.

    SameAsIpu: the blocks of one device are one stage. AutoIncrement: each new block is the next stage.

    >>> from tailrace.compat import poptorch
    >>> strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    """

    SameAsIpu = 0
    AutoIncrement = 1


class Liveness(enum.Enum):
    """Where tensors stay between phases of the IPU; without effect, they stay on the device.

    AlwaysLive, OffChipAfterFwd, OffChipAfterFwdNoOverlap or OffChipAfterEachPhase.

    >>> from tailrace.compat import poptorch
    >>> strategy = poptorch.SerialPhasedExecution("first", "second")
    >>> _ = strategy.setTensorsLiveness(poptorch.Liveness.AlwaysLive)
    """

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class CommGroupType(enum.Enum):
    """Which replicas form a group.

    All replicas hold the same parameters, and each has input of its own: `parameter.replicaGrouping`
    takes All, `Options.inputReplicaGrouping` takes NoGrouping, or groups of one.

    >>> from tailrace.compat import poptorch
    >>> none = poptorch.CommGroupType.NoGrouping
    >>> options = poptorch.Options().inputReplicaGrouping(1, none)
    """

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(enum.Enum):
    """From which replicas a parameter is read; without effect, all replicas hold the same.

    OnePerGroup or AllReplicas.

    >>> from tailrace.compat import poptorch
    >>> poptorch.VariableRetrievalMode.OnePerGroup.value
    0
    """

    OnePerGroup = 0
    AllReplicas = 2


class OverlapMode(enum.Enum):
    """How input and output overlap with computation on the IPU; without effect, they always overlap.

    NoOverlap, OverlapAccumulationLoop or OverlapDeviceIterationLoop.

    >>> from tailrace.compat import poptorch
    >>> poptorch.OverlapMode.NoOverlap.value
    'no_overlap'
    """

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class MatMulSerializationMode(enum.Enum):
    """How a matrix product is split on the IPU; without effect.

    InputChannels, ReducingDim, OutputChannels or Disabled.

    >>> from tailrace.compat import poptorch
    >>> poptorch.MatMulSerializationMode.Disabled.value
    'none'
    """

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class HalfFloatCastingBehavior(enum.Enum):
    """Deprecated in the original, without effect.

    FloatDowncastToHalf, HalfUpcastToFloat or Default.

    >>> from tailrace.compat import poptorch
    >>> poptorch.HalfFloatCastingBehavior.Default.value
    2
    """

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class MultiConvPlanType(enum.Enum):
    """How several convolutions are planned together on the IPU: Parallel or Serial; without effect.

    >>> from tailrace.compat import poptorch
    >>> poptorch.MultiConvPlanType.Serial.value
    'serial'
    """

    Parallel = "parallel"
    Serial = "serial"


__getattr__, __dir__ = missing_from(__name__)
