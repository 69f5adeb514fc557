"""The enumerations of the original, with its numbers."""

from __future__ import annotations

import enum

from tailrace.compat.originals.missing import missing_from


class OutputMode(enum.Enum):
    """Which values of a tensor a call returns."""

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
    """How gradients of microbatches and replicas become one."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(enum.Enum):
    """When a mean is divided."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(enum.Enum):
    """How a loader reads."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.Enum):
    """How processes share memory; there are none here."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class ConnectionType(enum.Enum):
    """When the device is attached."""

    Always = 0
    OnDemand = 1
    Never = 2


class SyncPattern(enum.Enum):
    """How IPUs synchronise."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class AutoStage(enum.Enum):
    """How blocks become stages."""

    SameAsIpu = 0
    AutoIncrement = 1


class Liveness(enum.Enum):
    """Where tensors stay between phases of the IPU."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class CommGroupType(enum.Enum):
    """Which replicas form a group."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(enum.Enum):
    """From which replicas a variable is read."""

    OnePerGroup = 0
    AllReplicas = 2


class OverlapMode(enum.Enum):
    """How input and output overlap with computation on the IPU."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class MatMulSerializationMode(enum.Enum):
    """How a product is split on the IPU."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class HalfFloatCastingBehavior(enum.Enum):
    """Deprecated in the original, without effect."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class MultiConvPlanType(enum.Enum):
    """How several convolutions are planned together on the IPU."""

    Parallel = "parallel"
    Serial = "serial"


__getattr__, __dir__ = missing_from(__name__)
