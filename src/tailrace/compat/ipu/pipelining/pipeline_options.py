"""The arguments of a pipeline, and the rules they obey, with the original's words."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tailrace import pipeline as planning
from tailrace.base.messages import note_once
from tailrace.compat.ipu import config
from tailrace.compat.ipu.errors import (
    FailedPreconditionError,
    IPUNotImplementedError,
    IPUTypeError,
    IPUValueError,
    UnimplementedError,
)
from tailrace.compat.ipu.gradient_accumulation import GradientAccumulationReductionMethod
from tailrace.compat.ipu.ipu_infeed_queue import IPUInfeedQueue
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
from tailrace.compat.ipu.loops import NeedsNumber, as_count
from tailrace.compat.ipu.optimizers.gradient_accumulation_optimizer import check_sharding
from tailrace.errors import PlanError
from tailrace.jaxprs.internals import Tracer

_Method = GradientAccumulationReductionMethod


class PipelineSchedule(enum.Enum):
    """How the stages of a pipeline take turns.

    Grouped: forward and backward of different mini-batches in one timestep. Interleaved: one of the
    two at a time, with fewer activations stored. Sequential: one stage after the other.

    >>> from tailrace.compat import ipu
    >>> [schedule.name for schedule in ipu.pipelining_ops.PipelineSchedule]
    ['Grouped', 'Interleaved', 'Sequential']
    """

    Grouped = 0
    Interleaved = 1
    Sequential = 2

    @property
    def schedule(self) -> planning.PipelineSchedule:
        """The engine's word for it."""
        return planning.PipelineSchedule(self.name.lower())


class RecomputationMode(enum.Enum):
    """How activations are recomputed in the backward pass, if `IPUConfig.allow_recompute` is set.

    RecomputeThenBackpropagate: a stage recomputes all of its activations, then runs backwards; not with
    Sequential. RecomputeAndBackpropagateInterleaved: part by part, between recomputation checkpoints;
    not with Interleaved. Auto: interleaved for Sequential, before the backward pass for the others.

    >>> from tailrace.compat import ipu
    >>> ipu.pipelining_ops.RecomputationMode.Auto.value
    0
    """

    Auto = 0
    RecomputeThenBackpropagate = 1
    RecomputeAndBackpropagateInterleaved = 2


class PipelineStageOptions:
    """Options that the original passed on to its compiler for one stage; checked, and noted.

    Args:
        convolution_options: for convolutions.
        matmul_options: for matrix products.
        slice_options: for slices.

    Raises:
        IPUTypeError: an argument is not a dict.

    >>> from tailrace.compat import ipu
    >>> options = ipu.pipelining_ops.PipelineStageOptions(matmul_options={"partialsType": "half"})
    >>> options.matmul_options
    {'partialsType': 'half'}
    """

    def __init__(
        self,
        convolution_options: dict[str, str] | None = None,
        matmul_options: dict[str, str] | None = None,
        slice_options: dict[str, str] | None = None,
    ) -> None:
        given = {
            "convolution_options": convolution_options,
            "matmul_options": matmul_options,
            "slice_options": slice_options,
        }
        for name, value in given.items():
            if value is not None and not isinstance(value, dict):
                raise IPUTypeError(
                    f"PipelineStageOptions.{name} must be a dict. Received: {type(value).__name__}."
                )
            setattr(self, name, {} if value is None else value)


@dataclasses.dataclass
class PipelineOptions:
    """The arguments of `pipeline`, by their names there; see it for their meaning."""

    computational_stages: Any
    gradient_accumulation_count: Any
    gradient_accumulation_dtype: Any
    gradient_accumulation_for_captured_grads: bool
    repeat_count: int
    batch_serialization_iterations: int
    inputs: Any
    infeed_queue: IPUInfeedQueue | None
    outfeed_queue: IPUOutfeedQueue | None
    optimizer_function: Callable[..., Any] | None
    device_mapping: Any
    pipeline_schedule: Any
    recomputation_mode: Any
    forward_propagation_stages_poplar_options: Any
    backward_propagation_stages_poplar_options: Any
    weight_update_poplar_options: Any
    offload_weight_update_variables: bool | None
    replicated_optimizer_state_sharding: bool
    offload_activations: bool | None
    offload_gradient_accumulation_buffers: bool | None
    replicated_weight_sharding: bool | None
    offload_weights: bool | None
    continuous_weight_updates: bool
    outfeed_loss: bool
    accumulate_outfeed: bool
    accumulate_outfeed_dtype: Any
    outfeed_mask: Sequence[bool] | None
    reduction_method: Any
    name: str | None

    @property
    def training(self) -> bool:
        """Whether there is an optimizer."""
        return self.optimizer_function is not None

    @property
    def stages(self) -> int:
        """How many stages; a group of concurrent ones counts as one."""
        return len(self.computational_stages)

    @property
    def mini_batches(self) -> int:
        """How many mini-batches one execution takes, before the weights change."""
        return int(self.gradient_accumulation_count) * self.batch_serialization_iterations

    @property
    def shards(self) -> int:
        """How many devices one copy of the pipeline takes."""
        flat = [d for entry in self.device_mapping for d in np.atleast_1d(entry)]
        return config.shards_of(int(max(flat)))

    @property
    def recompute(self) -> bool | str:
        """How activations are computed again, in the engine's words; False if they are not."""
        if not (self.training and config.current().allow_recompute):
            return False
        interleaved = RecomputationMode.RecomputeAndBackpropagateInterleaved
        # Auto, as in the original: interleaved for Sequential, recomputed before for the others.
        if self.recomputation_mode is RecomputationMode.Auto:
            sequential = self.pipeline_schedule is PipelineSchedule.Sequential
            return "interleaved" if sequential else "then"
        return "interleaved" if self.recomputation_mode is interleaved else "then"

    # -- rules ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Fill in defaults and check the options, in the order of the original."""
        # Of several mistakes programs expect the original's message about the first.
        self._check_counts()
        self._check_schedule()
        self._check_stages()
        self._check_feeds()
        self._check_stage_options()
        check_sharding(
            self.offload_weight_update_variables,
            self.replicated_optimizer_state_sharding,
            honoured=self.training,
        )
        self._check_plan()
        self._note_what_is_about_memory()

    def _check_counts(self) -> None:
        if self.gradient_accumulation_count is None:
            raise IPUValueError("gradient_accumulation_count must be specified.")
        for name in (
            "gradient_accumulation_count",
            "repeat_count",
            "batch_serialization_iterations",
        ):
            # An input of the program becomes a known number when it is compiled for it (`NeedsNumber`).
            count = as_count(getattr(self, name))
            if isinstance(count, Tracer):
                raise NeedsNumber(
                    f"{name} of a pipeline must be known when the program is compiled. Give an "
                    f"integer, or make it an input of the program."
                )
            setattr(self, name, count)
        count = self.gradient_accumulation_count
        if not -1 < count < 2**31:
            raise IPUValueError(
                f"gradient_accumulation_count must be >= 0 and fit into an int32. Received: {count}."
            )
        if self.training:
            # Not for inference, where the original does not look at it.
            self.reduction_method = _Method.parse_reduction_method(self.reduction_method)
            if self.batch_serialization_iterations != 1 and self.reduction_method != _Method.SUM:
                raise IPUValueError(
                    "Batch serialization (batch_serialization_iterations > 1) goes with "
                    "reduction_method SUM only."
                )
        if self.batch_serialization_iterations < 1:
            raise IPUValueError("batch_serialization_iterations must be at least 1.")
        if self.repeat_count < 1:
            raise IPUValueError(f"repeat_count must be at least 1. Received: {self.repeat_count}.")
        if self.continuous_weight_updates:
            raise IPUNotImplementedError("Continuous weight updates are currently not supported.")
        given = self.inputs
        self.inputs = [] if given is None else list(given) if _is_list(given) else [given]

    def _check_schedule(self) -> None:
        serialised = self.batch_serialization_iterations > 1
        if self.pipeline_schedule is None:
            # Batch serialization goes with Sequential only, so that is its default.
            self.pipeline_schedule = PipelineSchedule["Sequential" if serialised else "Grouped"]
        if not isinstance(self.pipeline_schedule, PipelineSchedule):
            raise IPUTypeError(
                f"The given pipeline_schedule is not a member of the PipelineSchedule enumeration. "
                f"Received: {self.pipeline_schedule!r}."
            )
        if serialised and self.pipeline_schedule is not PipelineSchedule.Sequential:
            raise IPUNotImplementedError(
                "Batch serialization is only supported with the Sequential schedule."
            )
        if self.recomputation_mode is None:
            self.recomputation_mode = RecomputationMode.Auto
        if not isinstance(self.recomputation_mode, RecomputationMode):
            raise IPUTypeError(
                f"The given recomputation_mode is not a member of the RecomputationMode enumeration. "
                f"Received: {self.recomputation_mode!r}."
            )
        never = {
            PipelineSchedule.Sequential: RecomputationMode.RecomputeThenBackpropagate,
            PipelineSchedule.Interleaved: RecomputationMode.RecomputeAndBackpropagateInterleaved,
        }
        if self.recomputation_mode is never.get(self.pipeline_schedule):
            raise UnimplementedError(
                f"Pipeline schedule {self.pipeline_schedule.name} does not support "
                f"'{self.recomputation_mode.name}' recomputation mode."
            )

    def _check_stages(self) -> None:
        if not _is_list(self.computational_stages):
            raise IPUTypeError("computational_stages argument needs to be a list or a tuple.")
        if self.stages < 2:
            raise IPUValueError("Pipeline requires at least two computational stages.")
        serialised = self.batch_serialization_iterations > 1
        if self.device_mapping is None:
            self.device_mapping = self._default_mapping(serialised)
        if not _is_list(self.device_mapping):
            raise IPUTypeError("device_mapping argument needs to be a list or a tuple.")
        if len(self.device_mapping) != self.stages:
            raise IPUValueError(
                f"Each stage must be mapped to an IPU: {len(self.device_mapping)} mappings != "
                f"{self.stages} stages"
            )
        for stage, devices in zip(self.computational_stages, self.device_mapping, strict=True):
            self._check_group(stage, devices)
        # As text: entries may be lists, which cannot be in a set.
        if serialised and len({str(entry) for entry in self.device_mapping}) > 1:
            raise IPUNotImplementedError(
                "When using batch serialization, all the pipeline stages need to be mapped to a "
                "single IPU."
            )

    def _default_mapping(self, serialised: bool) -> list[Any]:
        mapping: list[Any] = []
        first = 0
        for stage in self.computational_stages:
            size = len(stage) if _is_list(stage) else 1
            numbers = [0] * size if serialised else list(range(first, first + size))
            mapping.append(numbers if _is_list(stage) else numbers[0])
            first += size
        return mapping

    def _check_group(self, stage: Any, devices: Any) -> None:
        if not _is_list(stage):
            if not callable(stage):
                raise IPUTypeError(f"A stage is a function. Received: {stage!r}.")
            # The original's word for all devices of a copy; its compiler placed each operation.
            if devices == -1:
                raise IPUNotImplementedError(
                    "device_mapping -1 spreads the operations of a stage over all devices of one "
                    "chip family; here a stage lives on one device. Give its number."
                )
            return
        if any(_is_list(each) for each in stage):
            raise IPUNotImplementedError("Nested lists of concurrent stages are not supported.")
        if not _is_list(devices) or len(devices) != len(stage):
            raise IPUValueError(
                f"Concurrent stages need a list of as many devices. {len(stage)} stages are mapped "
                f"to {devices!r}."
            )

    def _check_feeds(self) -> None:
        if self.infeed_queue is not None and not isinstance(self.infeed_queue, IPUInfeedQueue):
            raise IPUTypeError("infeed_queue is not an instance of ipu_infeed_queue.IPUInfeedQueue")
        out = self.outfeed_queue
        if out is not None and not isinstance(out, IPUOutfeedQueue):
            raise IPUTypeError(
                "outfeed_queue is not an instance of ipu_outfeed_queue.IPUOutfeedQueue"
            )
        if self.outfeed_mask is not None and not self.training:
            raise IPUValueError("An optimizer_function must be provided when outfeed_mask is set.")
        if self.outfeed_loss:
            if not self.training:
                raise IPUValueError(
                    "An optimizer_function must be provided when outfeed_loss is True."
                )
            if out is None:
                raise IPUValueError("An outfeed_queue must be provided when outfeed_loss is True.")
            if self.outfeed_mask is not None:
                raise IPUValueError("Only one of `outfeed_loss` and `outfeed_mask` can be set.")
        if self.accumulate_outfeed:
            if out is None:
                raise IPUValueError(
                    "An outfeed_queue must be provided when accumulate_outfeed is True."
                )
            if out.outfeed_mode is not IPUOutfeedMode.ALL:
                raise IPUValueError("To accumulate the outfeed, it must be in IPUOutfeedMode ALL.")

    def _check_stage_options(self) -> None:
        lists = ["forward_propagation_stages_poplar_options"]
        if self.training:
            lists.append("backward_propagation_stages_poplar_options")
        for name in lists:
            given = getattr(self, name)
            if given is None:
                continue
            if not _is_list(given):
                raise IPUTypeError(f"{name} must be a list or a tuple of PipelineStageOptions.")
            if len(given) != self.stages:
                raise IPUValueError(
                    f"The number of stages and the length of {name} need to be the same: "
                    f"{self.stages} != {len(given)}."
                )
            if any(not isinstance(each, PipelineStageOptions) for each in given):
                raise IPUTypeError(f"{name} must be a list of PipelineStageOptions.")
        update = self.weight_update_poplar_options
        if update is not None and not isinstance(update, PipelineStageOptions):
            raise IPUTypeError(
                "Expected weight_update_poplar_options to be of type PipelineStageOptions"
            )

    def _check_plan(self) -> None:
        """The schedule's own rules about the count, which the plan knows."""
        schedule = self.pipeline_schedule.schedule
        # Of groups of concurrent stages each member has a device.
        flat = [d for entry in self.device_mapping for d in np.atleast_1d(entry)]
        interleaved = self.pipeline_schedule is PipelineSchedule.Interleaved
        if self.training and interleaved and len(set(flat)) != len(flat):
            raise IPUNotImplementedError(
                "The pipelining schedule 'Interleaved' does not currently support multiple "
                "pipeline stages on the same device for training graphs."
            )
        # Made and dropped: its rules are asked here, and the engine plans again from the traced stages.
        try:
            planning.plan(
                self.computational_stages,
                int(self.gradient_accumulation_count),
                schedule,
                self.device_mapping,
                self.training,
            )
        except PlanError as error:
            raise FailedPreconditionError(str(error)) from error

    def _note_what_is_about_memory(self) -> None:
        about_memory = (
            *(() if self.training else ("offload_activations",)),
            "offload_gradient_accumulation_buffers",
            "replicated_weight_sharding",
            "offload_weights",
        )
        # Where things are kept; no result depends on it.
        for name in about_memory:
            if getattr(self, name):
                note_once(f"pipeline({name}=True) is about memory and changes nothing here.")
        if not self.gradient_accumulation_for_captured_grads:
            note_once(
                "pipeline(gradient_accumulation_for_captured_grads=False) is about captured gradients, "
                "which pipelines do not have here; nothing changes."
            )
        for name in (
            "forward_propagation_stages_poplar_options",
            "backward_propagation_stages_poplar_options",
            "weight_update_poplar_options",
        ):
            if getattr(self, name) is not None:
                note_once(f"pipeline({name}=...) is for the original's compiler; nothing changes.")


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)
