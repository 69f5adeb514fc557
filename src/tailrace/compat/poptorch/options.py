"""`poptorch.Options`, with the original's setters.

Long, and one thing: a class of many short methods, each described for the reference.
"""

from __future__ import annotations

import enum
import os
from typing import Any

import torch

from tailrace.base.messages import note_once
from tailrace.compat.originals.missing import missing_from
from tailrace.compat.poptorch import enums
from tailrace.compat.poptorch.ops import Attribute as Attribute
from tailrace.compat.poptorch.settings.containers import OptionsDict, noted
from tailrace.compat.poptorch.settings.locations import TensorLocationOptions

# What the original had in this module, and has a file of its own here.
from tailrace.compat.poptorch.settings.locations import (
    TensorLocationSettings as TensorLocationSettings,
)
from tailrace.compat.poptorch.settings.option_files import ConfigFileError as ConfigFileError
from tailrace.compat.poptorch.settings.option_files import (
    calling,
    named_setter,
    read_line,
    read_object,
    read_text,
)
from tailrace.compat.poptorch.settings.option_groups import (
    DistributedOptions,
    JitOptions,
    PopartOptions,
    PrecisionOptions,
    TrainingOptions,
)
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
from tailrace.compat.poptorch.settings.strategies import _Strategy
from tailrace.errors import OptionError
from tailrace.torch.calls.options import ModelOptions
from tailrace.torch.errors import CallError, UsageError


class Options(OptionsDict):
    """How a model runs; setters can be chained.

    A model or a loader that uses it freezes it. The environment's `POPTORCH_DEFAULT_OPTIONS` (JSON)
    sets defaults. Options about the chip are accepted and noted once in the log.

    Raises:
        FrozenOptions: an option is set after a model or a loader has used the options.
        UsageError: there is no such option, or a value has the wrong type.

    >>> from tailrace.compat import poptorch
    >>> options = poptorch.Options().deviceIterations(4).replicationFactor(2)
    >>> _ = options.Training.gradientAccumulation(8)
    >>> options.device_iterations, options.Training.gradient_accumulation
    (4, 8)
    """

    def __init__(self) -> None:
        super().__init__(
            device_iterations=1,
            replication_factor=1,
            input_group_size=1,
            output_mode=enums.OutputMode.Default,
            output_return_period=1,
            anchored_tensors={},
            execution_strategy=PipelinedExecution(),
            random_seed=None,
            broadcast_buffers=True,
            model_name="",
            updatable_named_buffers=[],
            relax_optimizer_checks=False,
            module_namescope_enabled=True,
            log_cycle_count=False,
            show_compilation_progress_bar=True,
        )
        # Not values: a group is frozen and copied with the options, and has setters of its own.
        for name, part in {
            "Training": TrainingOptions(),
            "Precision": PrecisionOptions(),
            "TensorLocations": TensorLocationOptions(),
            "Distributed": DistributedOptions(),
            "Jit": JitOptions(),
            "_Popart": PopartOptions(),
        }.items():
            object.__setattr__(self, name, part)
        # After the groups, whose options it may set too.
        if defaults := os.environ.get("POPTORCH_DEFAULT_OPTIONS"):
            self.from_json(defaults)
        for variable in ("POPTORCH_CACHE_DIR", "POPTORCH_LOG_LEVEL", "POPTORCH_IPU_MODEL"):
            if variable in os.environ:
                noted(f"The environment variable {variable}")

    Training: TrainingOptions
    Precision: PrecisionOptions
    TensorLocations: TensorLocationOptions
    Distributed: DistributedOptions
    Jit: JitOptions
    _Popart: PopartOptions

    # -- what counts here -----------------------------------------------------------------------

    def deviceIterations(self, device_iterations: int) -> Options:
        """How many steps, or batches, one call runs on the device.

        Args:
            device_iterations: the number.
        """
        return self.set(device_iterations=device_iterations)

    def replicationFactor(self, replication_factor: int) -> Options:
        """How many copies of the model run side by side.

        Args:
            replication_factor: the number.
        """
        return self.set(replication_factor=replication_factor)

    def inputReplicaGrouping(
        self, input_group_size: int, input_group_type: enums.CommGroupType
    ) -> Options:
        """Replicas that get the same input: groups of one only.

        Args:
            input_group_size: how many replicas form a group.
            input_group_type: a `CommGroupType`.

        Raises:
            OptionError: the groups do not divide the replicas, or share their input.
        """
        if input_group_type is enums.CommGroupType.NoGrouping:
            return self.set(input_group_size=1)
        if input_group_type is enums.CommGroupType.All:
            raise OptionError("CommGroupType.All cannot be used for input groups.")
        factor = self.replication_factor
        if input_group_size > factor or factor % input_group_size:
            raise OptionError(
                f"The size of a group divides the replicas, {factor}. Received: {input_group_size}"
            )
        if input_group_size != 1:
            raise OptionError(
                f"Each replica has input of its own here. Received: groups of {input_group_size}. "
                f"Repeat the rows in the input."
            )
        return self.set(input_group_size=1)

    def outputMode(
        self, output_mode: enums.OutputMode, output_return_period: int | None = None
    ) -> Options:
        """Which outputs a call returns.

        Args:
            output_mode: an `OutputMode`.
            output_return_period: N of `OutputMode.EveryN`.

        Raises:
            UsageError: it is not an `OutputMode`, or `EveryN` has no period.
        """
        _check_mode(output_mode, output_return_period)
        self.set(output_mode=output_mode)
        return self.set(output_return_period=output_return_period or 1)

    def anchorMode(
        self, anchor_mode: enums.OutputMode, anchor_return_period: int | None = None
    ) -> Options:
        """An older name of `outputMode`.

        Args:
            anchor_mode: an `OutputMode`.
            anchor_return_period: N of `OutputMode.EveryN`.

        Raises:
            UsageError: it is not an `OutputMode`, or `EveryN` has no period.
        """
        return self.outputMode(anchor_mode, anchor_return_period)

    def defaultOutputMode(self) -> bool:
        """Whether no output mode was chosen."""
        return self.output_mode is enums.OutputMode.Default

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: enums.OutputMode | None = None,
        output_return_period: int | None = None,
        *,
        anchor_mode: enums.OutputMode | None = None,
        anchor_return_period: int | None = None,
    ) -> None:
        """Return a tensor of the program after each call: `model.getAnchoredTensor(short_name)`.

        Args:
            short_name: the name for `getAnchoredTensor`.
            long_name: the name of the tensor; `model.getTensorNames()` lists all.
            output_mode: which values are returned; None: as for the outputs.
            output_return_period: N of `OutputMode.EveryN`.
            anchor_mode: an older name of `output_mode`.
            anchor_return_period: an older name of `output_return_period`.

        Raises:
            CallError: an argument is given under both of its names.
            UsageError: it is not an `OutputMode`, or `EveryN` has no period.
        """
        if output_mode is not None and anchor_mode is not None:
            raise CallError(
                "anchorTensor got output_mode and anchor_mode, which are the same. Give one of them."
            )
        if output_return_period is not None and anchor_return_period is not None:
            raise CallError(
                "anchorTensor got output_return_period and anchor_return_period, which are the same. "
                "Give one of them."
            )
        mode = anchor_mode if output_mode is None else output_mode
        period = anchor_return_period if output_return_period is None else output_return_period
        if mode is not None:
            # A missing period of an anchor is 1, unlike that of the outputs.
            _check_mode(mode, 1 if period is None else period)
        period = period if mode is enums.OutputMode.EveryN and period is not None else 1
        # Not refused when frozen, as in the original; a model has its own copy.
        self.anchored_tensors[short_name] = [long_name, mode is None, mode, period]

    def setExecutionStrategy(self, strategy: _Strategy) -> Options:
        """How blocks run.

        Args:
            strategy: a `PipelinedExecution`, `ShardedExecution`, `SerialPhasedExecution` or
                `ParallelPhasedExecution`.

        Raises:
            UsageError: it is not an execution strategy.
        """
        if not isinstance(strategy, _Strategy):
            raise UsageError(f"Unknown strategy {strategy!r}: use poptorch.PipelinedExecution, ...")
        # Past `set`, which requires the class of the previous value: strategies have several.
        self._check_not_frozen()
        self._values["execution_strategy"] = strategy
        return self

    def randomSeed(self, random_seed: int) -> Options:
        """The seed of random numbers; PyTorch's own generator is seeded too.

        Args:
            random_seed: the seed.
        """
        # So that what is drawn outside of the model is repeatable as well.
        torch.manual_seed(random_seed)
        return self.set(random_seed=random_seed)

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Options:
        """Without effect: buffers that change are averaged over replicas, once a step.

        Args:
            broadcast_buffers: kept.
        """
        return self.set(broadcast_buffers=broadcast_buffers)

    def modelName(self, name: str) -> Options:
        """What reports call the model.

        Args:
            name: the name.
        """
        return self.set(model_name=name)

    def updatableNamedBuffers(self, buffers: list[str]) -> Options:
        """Buffers that `copyNamedBuffersToDevice` copies.

        Args:
            buffers: their names.
        """
        return self.set(updatable_named_buffers=list(buffers))

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Options:
        """Without effect: unexpected attributes of optimizers are never reported.

        Args:
            relax: kept.
        """
        return self.set(relax_optimizer_checks=relax)

    def disableModuleNamescope(self) -> Options:
        """Without effect: names of operations keep the path of their module."""
        noted("disableModuleNamescope")
        return self.set(module_namescope_enabled=False)

    def showCompilationProgressBar(self, show: bool = True) -> Options:
        """Without effect: there is no progress bar.

        Args:
            show: kept.
        """
        return self.set(show_compilation_progress_bar=show)

    def logCycleCount(self, log_cycle_count: bool) -> Options:
        """IPU only: there are no cycles to count.

        Args:
            log_cycle_count: kept.
        """
        noted("logCycleCount")
        return self.set(log_cycle_count=log_cycle_count)

    # -- for the IPU only -----------------------------------------------------------------------

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Options:
        """IPU only: accepted, without effect.

        Args:
            auto_round_num_ipus: without effect.
        """
        noted("autoRoundNumIPUs")
        return self

    def setAvailableMemoryProportion(
        self, available_memory_proportion: dict[str, float]
    ) -> Options:
        """IPU only: accepted, without effect.

        Args:
            available_memory_proportion: a proportion for 'IPU0', ...

        Raises:
            UsageError: a key does not name a device, such as 'IPU0'.
        """
        for key in available_memory_proportion:
            if not key.startswith("IPU"):
                raise UsageError(
                    f"Available memory proportion is given for 'IPU0', ... not {key!r}"
                )
        noted("setAvailableMemoryProportion")
        return self

    def enableSyntheticData(self, enabled: bool) -> Options:
        """Without effect: a model computes on the data that it is given.

        Args:
            enabled: noted if True.
        """
        if enabled:
            note_once(
                "enableSyntheticData has no effect: a model computes on the tensors that it is given. "
                "For timings without a dataset, give it torch.randn tensors."
            )
        return self

    def enableProfiling(self, profile_dir: str | None = None) -> Options:
        """IPU only: accepted, without effect. Use `jax.profiler`, or `tr.trace`.

        Args:
            profile_dir: without effect.
        """
        noted("enableProfiling")
        return self

    def maxRepeatLogs(self, max_lines: int | None) -> Options:
        """About the original's log; without effect.

        Args:
            max_lines: without effect.
        """
        noted("maxRepeatLogs")
        return self

    def sourceLocationExcludes(self, excludes: list[str]) -> Options:
        """About the original's log; without effect.

        Args:
            excludes: without effect.
        """
        noted("sourceLocationExcludes")
        return self

    def appendToLocationExcludes(self, *excludes: str) -> Options:
        """About the original's log; without effect.

        Args:
            *excludes: without effect.
        """
        noted("appendToLocationExcludes")
        return self

    def connectionType(self, connection_type: enums.ConnectionType) -> Options:
        """IPU only: accepted, without effect; `Never` is refused.

        Args:
            connection_type: a `ConnectionType`.

        Raises:
            UsageError: it is not a `ConnectionType`.
            OptionError: it is `Never`: there is no offline device.
        """
        if not isinstance(connection_type, enums.ConnectionType):
            raise UsageError(f"Expected a poptorch.ConnectionType, got {connection_type!r}")
        if connection_type is enums.ConnectionType.Never:
            raise OptionError("There is no offline device: models run where they are compiled.")
        noted("connectionType")
        return self

    def syncPattern(self, sync_pattern: enums.SyncPattern) -> Options:
        """IPU only: accepted, without effect.

        Args:
            sync_pattern: a `SyncPattern`.

        Raises:
            UsageError: it is not a `SyncPattern`.
        """
        if not isinstance(sync_pattern, enums.SyncPattern):
            raise UsageError(f"Expected a poptorch.SyncPattern, got {sync_pattern!r}")
        noted("syncPattern")
        return self

    # -- files ----------------------------------------------------------------------------------

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Options:
        """Call setters from a file: one call a line, without `options.` in front, literals inside.

        The file is parsed, never executed.

        Args:
            filepath: the file.

        Raises:
            ConfigFileError: the file cannot be read, or a line is not a setter with literal arguments.
        """
        # Numbered before comments are left out: a message names a line of the file.
        for number, line in enumerate(read_text(filepath).splitlines(), 1):
            text = line.strip()
            if text and not text.startswith("#"):
                read_line(self, text, number, filepath)
        return self

    def from_json(self, text: str) -> Options:
        """Call setters from JSON: `{"Training.gradientAccumulation": 4}`.

        Args:
            text: an object of names and values; enums are written as `"OutputMode.All"`.

        Raises:
            ConfigFileError: the text cannot be read, or a name is not a setter.
        """
        for name, value in read_object(text).items():
            arguments = value if isinstance(value, list) else [value]
            with calling(name):
                named_setter(self, name)(*map(_enum_member, arguments))
        return self

    def toDict(self) -> dict[str, Any]:
        """All values by name.

        Raises:
            UsageError: no output mode is set.
        """
        if self.defaultOutputMode():
            raise UsageError("An output mode must be picked before serialisation")
        return dict(self._values)

    # -- for the native front end ---------------------------------------------------------------

    def native(self, training_model: bool = True) -> ModelOptions:
        """The same options as `tt.ModelOptions`.

        With floating point exceptions, the outputs of a model that does not train are checked on
        the host.

        Args:
            training_model: whether they are for a training model.
        """
        training, strategy = self.Training, self.execution_strategy
        kinds, means = enums.ReductionType, enums.MeanReductionStrategy
        reduction = "sum"
        if training.accumulation_and_replication_reduction_type is kinds.Mean:
            running = training.meanAccumulationAndReplicationReductionStrategy is means.Running
            reduction = "running_mean" if running else "mean"
        observe: list[Any] = []
        if self.Precision.floating_point_exceptions and training_model:
            from tailrace.taps.tap import stop_on_nonfinite

            # The nearest thing to a floating point exception: the first step with NaN or Inf stops
            # the call.
            observe = [stop_on_nonfinite()]
        location = self.TensorLocations.location_optimizer
        every = self.output_mode is enums.OutputMode.EveryN
        period = self.output_return_period if every else 1  # of other modes it is not looked at
        return ModelOptions(
            device_iterations=self.device_iterations,
            accumulation=training.gradient_accumulation,
            replicas=self.replication_factor,
            output_mode=enums.MODES[self.output_mode],
            output_return_period=period,
            reduction=reduction,
            # Not `not ...`: without a setting there is no key, and the state stays on the device.
            offload_optimizer_state=location.get("onChip") == 0,
            shard_optimizer_state=bool(location.get("useReplicatedTensorSharding")),
            seed=self.random_seed,
            execution=strategy.execution,
            stages=strategy.staging(),
            recompute="interleaved",
            observe=observe,
        )


def check_options(options: object) -> None:
    """Refuse anything else where options are expected."""
    if not isinstance(options, Options):
        raise OptionError(
            f"Invalid type: 'options' is of type {type(options).__name__} (Expected poptorch.Options)"
        )


def _noting(name: str) -> Any:
    def setter(self: Options, *_: Any, **__: Any) -> Options:
        noted(name)
        return self

    setter.__name__ = name
    setter.__doc__ = "IPU only: accepted, without effect."
    return setter


for _name in (
    "useIpuModel",
    "useIpuId",
    "useOfflineIpuTarget",
    "enableExecutableCaching",
    "enableStableNorm",
    "logDir",
):
    setattr(Options, _name, _noting(_name))


def _check_mode(mode: object, period: int | None) -> None:
    if not isinstance(mode, enums.OutputMode):
        raise UsageError(f"Expected a poptorch.OutputMode, got {mode!r}")
    if mode is enums.OutputMode.EveryN and (not isinstance(period, int) or period < 1):
        raise UsageError(
            "EveryN anchor must have output_return_period set to valid positive integer"
        )


def _enum_member(value: object) -> Any:
    if isinstance(value, str) and "." in value:
        kind, _, member = value.partition(".")
        # Anything else stays a text: a setter that expects a member refuses it.
        found = getattr(enums, kind, None)
        if isinstance(found, enum.EnumMeta) and member in found.__members__:
            return found[member]
    return value


__getattr__, __dir__ = missing_from(__name__)
