"""The groups of `poptorch.Options`: `opts.Training`, `opts.Precision`, `opts.Distributed`, ..."""

from __future__ import annotations

import os
from typing import Any

import torch

from tailrace.base.messages import note_once
from tailrace.compat.poptorch import enums
from tailrace.compat.poptorch.settings.containers import OptionsDict, noted
from tailrace.errors import OptionError
from tailrace.torch.errors import UsageError


class TrainingOptions(OptionsDict):
    """`options.Training`: gradient accumulation and loss scaling.

    >>> from tailrace.compat import poptorch
    >>> training = poptorch.Options().Training
    >>> training.gradientAccumulation(4).gradient_accumulation
    4
    """

    def __init__(self) -> None:
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post,
            automatic_loss_scaling=False,
        )

    def gradientAccumulation(self, gradient_accumulation: int) -> TrainingOptions:
        """How many microbatches make a step.

        Args:
            gradient_accumulation: the number.
        """
        return self.set(gradient_accumulation=gradient_accumulation)

    def accumulationAndReplicationReductionType(
        self, reduction_type: enums.ReductionType
    ) -> TrainingOptions:
        """Whether gradients are averaged or summed.

        Args:
            reduction_type: `ReductionType.Mean` or `ReductionType.Sum`.

        Raises:
            OptionError: it is neither Mean nor Sum.
        """
        kinds = enums.ReductionType
        if reduction_type not in (kinds.Mean, kinds.Sum):
            raise OptionError(
                "accumulationAndReplicationReductionType must be set to poptorch.ReductionType.Mean "
                f"or poptorch.ReductionType.Sum. Received: {reduction_type}"
            )
        return self.set(accumulation_and_replication_reduction_type=reduction_type)

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, strategy: enums.MeanReductionStrategy
    ) -> TrainingOptions:
        """When a mean is divided: `Running` never holds more than one gradient's worth.

        Args:
            strategy: a `MeanReductionStrategy`.

        Raises:
            OptionError: it is not a `MeanReductionStrategy`.
        """
        if not isinstance(strategy, enums.MeanReductionStrategy):
            raise OptionError(
                f"The strategy is a poptorch.MeanReductionStrategy. Received: {strategy!r}"
            )
        return self.set(meanAccumulationAndReplicationReductionStrategy=strategy)

    def setAutomaticLossScaling(self, enabled: bool) -> TrainingOptions:
        """Let the scale of the loss follow the gradients, starting at the optimizer's loss_scaling.

        It is doubled after each step, up to 32768, and halved where gradients come close to the
        largest number of their dtype. `finalLossScale` and `lossScaleUpdateFactor` can be anchored.

        Args:
            enabled: whether it does.
        """
        return self.set(automatic_loss_scaling=enabled)

    def setConvolutionDithering(self, enabled: bool) -> TrainingOptions:
        """IPU only: accepted, without effect.

        Args:
            enabled: without effect.
        """
        noted("setConvolutionDithering")
        return self


class PrecisionOptions(OptionsDict):
    """`options.Precision`: floating point exceptions; the rest is about the chip.

    >>> from tailrace.compat import poptorch
    >>> precision = poptorch.Options().Precision
    >>> precision.enableFloatingPointExceptions(True).floating_point_exceptions
    True
    """

    def __init__(self) -> None:
        super().__init__(floating_point_exceptions=False, partials_type=None)

    def enableFloatingPointExceptions(self, enabled: bool) -> PrecisionOptions:
        """Stop with an error at the first NaN or Inf in the loss, a gradient or an output.

        Args:
            enabled: whether to stop.

        Raises:
            UsageError: it is not a bool.
        """
        if not isinstance(enabled, bool):
            raise UsageError(f"enableFloatingPointExceptions takes a bool. Received: {enabled!r}")
        return self.set(floating_point_exceptions=enabled)

    def enableStochasticRounding(self, enabled: bool) -> PrecisionOptions:
        """IPU only: accepted, without effect.

        Args:
            enabled: without effect.
        """
        noted("enableStochasticRounding")
        return self

    def setPartialsType(self, dtype: torch.dtype) -> PrecisionOptions:
        """IPU only: accepted, without effect. Sums are computed in float32.

        Args:
            dtype: `torch.float` or `torch.half`.

        Raises:
            OptionError: it is neither `torch.float` nor `torch.half`.
        """
        if dtype not in (torch.float, torch.half):
            raise OptionError(f"partials are torch.float or torch.half. Received: {dtype}")
        noted("setPartialsType")
        return self.set(partials_type=dtype)

    def halfFloatCasting(self, *_: Any) -> PrecisionOptions:
        """Deprecated in the original, without effect."""
        note_once("halfFloatCasting is deprecated and has no effect.")
        return self

    def runningStatisticsAlwaysFloat(self, *_: Any) -> PrecisionOptions:
        """Deprecated in the original, without effect."""
        note_once("runningStatisticsAlwaysFloat is deprecated and has no effect.")
        return self


class DistributedOptions(OptionsDict):
    """`options.Distributed`: which process this is, of how many.

    Loaders divide their dataset by it, and each process may run its own inference model. A training
    model runs in one process.

    >>> from tailrace.compat import poptorch
    >>> distributed = poptorch.Options().Distributed.configureProcessId(1, 4)
    >>> distributed.processId, distributed.numProcesses
    (1, 4)
    """

    def __init__(self) -> None:
        super().__init__(process_id=0, num_processes=1)
        # Set by Open MPI; read at once, so that loaders know their share.
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    @property
    def processId(self) -> int:
        """The number of this process."""
        return self._values["process_id"]

    @property
    def numProcesses(self) -> int:
        """How many there are."""
        return self._values["num_processes"]

    def disable(self) -> DistributedOptions:
        """One process."""
        return self.set(process_id=0, num_processes=1)

    def configureProcessId(self, process_id: int, num_processes: int) -> DistributedOptions:
        """Say which process this is, from 0, of how many.

        Args:
            process_id: the number of this process.
            num_processes: how many there are.

        Raises:
            OptionError: there is no such process among that many.
        """
        if not 0 <= process_id < num_processes:
            raise OptionError(
                f"Processes are numbered from 0. Received: process {process_id} of {num_processes}."
            )
        return self.set(process_id=process_id, num_processes=num_processes)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> DistributedOptions:
        """Which environment variables the counts are read from.

        Args:
            var_num_processes: the variable with the number of processes.
            var_process_id: the variable with the number of this process.

        Raises:
            OptionError: there is no such process among that many.
        """
        count = int(os.environ.get(var_num_processes, "1"))
        return self.configureProcessId(int(os.environ.get(var_process_id, "0")), count)


class JitOptions:
    """`options.Jit`: how the original traced; forward passes are traced in one way here.

    >>> from tailrace.compat import poptorch
    >>> _ = poptorch.Options().Jit.traceModel(True)
    """

    def traceModel(self, trace_model: bool) -> JitOptions:
        """Without effect.

        Args:
            trace_model: without effect.
        """
        noted("Jit.traceModel")
        return self


class PopartOptions:
    """`options._Popart`: settings of the original's compiler, accepted without effect.

    >>> from tailrace.compat import poptorch
    >>> _ = poptorch.Options()._Popart.set("autoRecomputation", 3)
    """

    def set(self, key: str, value: object) -> PopartOptions:
        """A setting of the original's compiler; without effect.

        Args:
            key: its name.
            value: its value.
        """
        noted(f"_Popart.set({key!r})")
        return self

    def setEngineOptions(self, engine_options: dict[str, str]) -> PopartOptions:
        """Settings of the original's engine; without effect.

        Args:
            engine_options: values by name.
        """
        noted("_Popart.setEngineOptions")
        return self

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> PopartOptions:
        """Settings of the original's compiler; without effect.

        Args:
            patterns: which are enabled.
            level: the level of the others.
        """
        noted("_Popart.setPatterns")
        return self
