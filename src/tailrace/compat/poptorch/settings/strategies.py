"""How blocks run: strategies, stages and phases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tailrace.compat.poptorch.enums import AutoStage, Liveness
from tailrace.compat.poptorch.settings.containers import noted
from tailrace.torch.errors import UsageError
from tailrace.torch.tracing.blocks import Staging


class Stage:
    """Blocks that run together on one device.

    Args:
        *block_ids: the names of the blocks.

    Raises:
        UsageError: it has no blocks, or one is not named by a string.

    >>> from tailrace.compat import poptorch
    >>> stage = poptorch.Stage("embedding", "encoder").ipu(1)
    >>> stage.blocks, stage.ipu_id
    (['embedding', 'encoder'], 1)
    """

    def __init__(self, *block_ids: str) -> None:
        if not block_ids or not all(isinstance(name, str) for name in block_ids):
            raise UsageError(f"A stage is made of names of blocks. Received: {block_ids!r}")
        self.blocks = list(block_ids)
        self.ipu_id: int | None = None

    def ipu(self, ipu: int) -> Stage:
        """Say which device it runs on.

        Args:
            ipu: the number of the device.
        """
        self.ipu_id = ipu
        return self


StageLike = Stage | str | Iterable[str]
"""A stage, the name of its only block, or the names of its blocks."""


class Phase:
    """Stages that run at the same time, in a phased execution.

    Args:
        *arg: stages, or names of blocks.

    Raises:
        UsageError: a stage is not made of names of blocks.

    >>> from tailrace.compat import poptorch
    >>> phase = poptorch.Phase("left", "right")
    >>> phase.ipus(0, 1)
    >>> phase.stage(1).ipu_id
    1
    """

    def __init__(self, *arg: StageLike) -> None:
        self.stages = [_stage(one) for one in arg]

    def ipus(self, *ipus: int) -> None:
        """Say which devices the stages run on.

        Args:
            *ipus: the number of a device for each stage.

        Raises:
            UsageError: there are more or fewer devices than stages.
        """
        if len(ipus) != len(self.stages):
            raise UsageError(
                f"A phase of {len(self.stages)} stages takes as many devices. Received: {len(ipus)}"
            )
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)

    def stage(self, index: int) -> Stage:
        """One of the stages.

        Args:
            index: its number.
        """
        return self.stages[index]


class _Strategy:
    execution = "pipelined"

    def __init__(self, *args: Any) -> None:
        self._auto = AutoStage.SameAsIpu
        self._stages: list[Stage] = []
        if len(args) == 1 and isinstance(args[0], AutoStage):
            self._auto = args[0]
        else:
            self._stages = [_stage(one) for one in args]
        self.staging()  # what is wrong with the stages is said here, not when a model compiles

    def stage(self, block_id: str) -> Stage:
        """The stage that a block belongs to.

        Args:
            block_id: the name of the block.

        Raises:
            UsageError: there is no such block.
        """
        for stage in self._stages:
            if block_id in stage.blocks:
                return stage
        raise UsageError(f"Unknown Block {block_id!r}")

    def staging(self) -> Staging:
        """The same, for the native front end."""
        if self._stages:
            devices = {n: s.ipu_id for n, s in enumerate(self._stages) if s.ipu_id is not None}
            return Staging([stage.blocks for stage in self._stages], devices)
        # Without stages the blocks of the model decide, when it is traced.
        return Staging("device" if self._auto is AutoStage.SameAsIpu else "increment")


class PipelinedExecution(_Strategy):
    """Stages overlap: while one works on a microbatch, the next works on the one before.

    Args:
        *args: an `AutoStage`; or the stages, each a `Stage`, the name of a block or a list of names.

    Raises:
        UsageError: a stage is not made of names of blocks.

    >>> from tailrace.compat import poptorch
    >>> strategy = poptorch.PipelinedExecution("first", poptorch.Stage("second").ipu(0))
    >>> strategy.stage("second").ipu_id
    0
    >>> options = poptorch.Options().setExecutionStrategy(strategy)
    """


class ShardedExecution(_Strategy):
    """One device computes at a time.

    Args:
        *args: as for `PipelinedExecution`.

    Raises:
        UsageError: a stage is not made of names of blocks.

    >>> from tailrace.compat import poptorch
    >>> strategy = poptorch.ShardedExecution(poptorch.AutoStage.AutoIncrement)
    >>> options = poptorch.Options().setExecutionStrategy(strategy)
    """

    execution = "sharded"


class _Phased(_Strategy):
    execution = "sharded"

    def __init__(self, *phases: Any) -> None:
        if not phases:
            raise UsageError("At least one phase is required")
        self.phases = [one if isinstance(one, Phase) else _phase(one) for one in phases]
        noted(f"{type(self).__name__} keeps tensors off the chip between phases, which")
        # Stages of one phase ran side by side; one after the other the results are the same.
        super().__init__(*(stage for phase in self.phases for stage in phase.stages))

    def phase(self, index: int) -> Phase:
        """One of the phases.

        Args:
            index: its number.
        """
        return self.phases[index]

    def useSeparateBackwardPhase(self, use: bool = True) -> _Phased:
        """IPU only: accepted, without effect.

        Args:
            use: without effect.
        """
        return self


class ParallelPhasedExecution(_Phased):
    """Phases of the IPU; here the stages run one device at a time, with the same results.

    Args:
        *phases: phases, each a `Phase`, a stage, or a list of stages.

    Raises:
        UsageError: there is no phase.

    >>> from tailrace.compat import poptorch
    >>> strategy = poptorch.ParallelPhasedExecution([poptorch.Stage("a"), poptorch.Stage("b")])
    >>> len(strategy.phase(0).stages)
    2
    """

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> ParallelPhasedExecution:
        """IPU only: accepted, without effect.

        Args:
            off_chip: without effect.
        """
        return self


class SerialPhasedExecution(_Phased):
    """Phases of the IPU; here the stages run one device at a time, with the same results.

    Args:
        *phases: phases, each a `Phase`, a stage, or a list of stages.

    Raises:
        UsageError: there is no phase.

    >>> from tailrace.compat import poptorch
    >>> strategy = poptorch.SerialPhasedExecution("first", "second")
    >>> len(strategy.phases)
    2
    """

    def setTensorsLiveness(self, liveness: Liveness) -> SerialPhasedExecution:
        """IPU only: accepted, without effect.

        Args:
            liveness: a `Liveness`.

        Raises:
            UsageError: it is not a `Liveness`.
        """
        if not isinstance(liveness, Liveness):
            raise UsageError(f"liveness is a poptorch.Liveness. Received: {liveness!r}")
        return self


def _stage(value: StageLike) -> Stage:
    if isinstance(value, Stage):
        return value
    return Stage(value) if isinstance(value, str) else Stage(*value)


def _phase(value: Stage | str | Iterable[StageLike]) -> Phase:
    if isinstance(value, str | Stage):
        return Phase(value)
    return Phase(*value)
