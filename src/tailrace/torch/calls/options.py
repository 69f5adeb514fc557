"""The options of a model, checked when they are given."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Any

from tailrace.base.checks import check_count, check_seed
from tailrace.errors import OptionError, PlanError
from tailrace.pipeline.lowering.forward_backward import RECOMPUTE
from tailrace.pipeline.schedule.schedules import PipelineSchedule
from tailrace.program.compiling.build import Build
from tailrace.program.step.accumulation import Accumulation, Reduction
from tailrace.taps.tap import MOST_BYTES
from tailrace.torch.calls.output_modes import OutputMode, Returned
from tailrace.torch.tracing.blocks import Staging
from tailrace.trainer.checks import check_fingerprint


class Execution(enum.StrEnum):
    """How blocks on several devices run: overlapped as a pipeline, or one device at a time."""

    PIPELINED = "pipelined"
    SHARDED = "sharded"


PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The options of `tt.training_model` and `tt.inference_model`.

    Attributes:
        device_iterations: the number of steps (training) or batches (inference) per call.
        accumulation: the number of microbatches per step, or a `tr.Accumulation`.
        replicas: the number of copies that run in parallel, each on a part of the batch.
        output_mode: which outputs a call returns: see `tt.OutputMode`.
        output_return_period: the period of "every_n".
        reduction: how gradients are reduced over microbatches and replicas: "mean", "sum" or
            "running_mean".
        precision: the precision of matrix products: "default", "high" or "highest".
        offload_optimizer_state: whether to keep optimizer state in host memory between updates.
        shard_optimizer_state: whether to shard it over replicas.
        offload_activations: whether to keep activations in host memory until the backward pass.
        seed: the seed of random numbers (dropout).
        execution: "pipelined" or "sharded", for a module with blocks on several devices.
        stages: how blocks form stages: by "device", one per block ("increment"), or a list with the
            names of the blocks of each stage.
        schedule: the schedule of a pipeline, see `tr.PipelineSchedule`; "auto": the fastest that the
            number of microbatches allows.
        recompute: whether a pipeline recomputes activations instead of keeping them.
        observe: taps; their records are in `model.records` after each call.
        observe_bytes: the most bytes that the records of one call may take on the device.
        run_dir: a directory for the history and records of all calls.
        fingerprint: whether to keep 8 bytes per group of tensors after each call, by which
            `model.replay` proves a past step.
        rewrites: rewrites of the program to switch off, such as `{"boundaries": False}`.
        compiler_options: options of XLA's compiler for the programs of this model, by their names in
            `XLA_FLAGS`.

    Raises:
        OptionError: an option has an invalid value.

    >>> import tailrace.torch as tt
    >>> tt.ModelOptions(device_iterations=4, accumulation=2).microbatches
    2
    """

    device_iterations: int = 1
    accumulation: Accumulation | int = 1
    replicas: int = 1
    output_mode: Any = OutputMode.DEFAULT
    output_return_period: int = 1
    reduction: Reduction | str | None = None
    precision: str | None = None
    offload_optimizer_state: bool = False
    shard_optimizer_state: bool = False
    offload_activations: bool = False
    seed: int | None = None
    execution: Execution | str = Execution.PIPELINED
    stages: Any = "device"
    schedule: Any = "auto"
    recompute: bool | str = False
    observe: Any = ()
    observe_bytes: int = MOST_BYTES
    run_dir: Any = None
    fingerprint: bool = False
    rewrites: Any = None
    compiler_options: Any = None
    build: Build = dataclasses.field(init=False)
    returned: Returned = dataclasses.field(init=False)
    staging: Staging = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # The class is frozen, so that options can be compared and shared; normalised values are set
        # past that.
        for name in ("device_iterations", "replicas"):
            value = check_count(name, getattr(self, name), at_least=1, error=OptionError)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "accumulation", Accumulation.of(self.accumulation))
        given = None if self.reduction is None else Reduction.parse(self.reduction)
        # Given apart, it overrides that of a `tr.Accumulation`.
        if given is not None:
            changed = dataclasses.replace(self.accumulation, reduction=given)  # type: ignore[type-var]
            object.__setattr__(self, "accumulation", changed)
        object.__setattr__(
            self, "returned", Returned.of(self.output_mode, self.output_return_period)
        )
        period, more = self.output_return_period, ": of how many values one is returned"
        check_count("output_return_period", period, at_least=1, error=OptionError, more=more)
        self._check_pipeline()
        check_fingerprint(self.fingerprint)
        object.__setattr__(self, "build", Build.of(self.rewrites, self.compiler_options))
        if not isinstance(self.run_dir, str | os.PathLike | None):
            raise OptionError(
                f"run_dir is the path of a directory, or None. Received: run_dir={self.run_dir!r}."
            )
        if self.precision is not None and self.precision not in PRECISIONS:
            raise OptionError(
                f"precision is one of {', '.join(map(repr, PRECISIONS))}. "
                f"Received: precision={self.precision!r}."
            )
        if self.seed is not None:
            object.__setattr__(self, "seed", check_seed(self.seed))
        stages = self.stages
        if isinstance(stages, str) and stages not in ("device", "increment"):
            raise OptionError(
                f"stages is 'device', 'increment' or a list with the names of the blocks of each "
                f"stage. Received: stages={stages!r}."
            )
        staging = stages if isinstance(stages, Staging) else Staging(stages)
        object.__setattr__(self, "staging", staging)
        try:
            object.__setattr__(self, "execution", Execution(self.execution))
        except ValueError:
            raise OptionError(
                f"execution is 'pipelined' or 'sharded'. Received: execution={self.execution!r}."
            ) from None

    def _check_pipeline(self) -> None:
        """Check the options of pipelines, even without one: errors should not wait for it."""
        if self.schedule not in ("auto", *PipelineSchedule):
            try:
                PipelineSchedule(self.schedule)
            except PlanError:
                names = ", ".join(repr(str(one)) for one in PipelineSchedule)
                raise OptionError(
                    f"schedule is 'auto', {names}. Received: schedule={self.schedule!r}."
                ) from None
        if self.recompute not in RECOMPUTE:
            raise OptionError(
                f"recompute is False, True, 'then' or 'interleaved'. "
                f"Received: recompute={self.recompute!r}."
            )

    @property
    def microbatches(self) -> int:
        """The number of microbatches per step."""
        return self.accumulation.microbatches  # type: ignore[union-attr]

    @property
    def pieces(self) -> int:
        """The number of microbatches per call."""
        return self.device_iterations * self.microbatches * self.replicas

    def resolved_mode(self, default: OutputMode) -> Returned:
        """The mode of outputs, with its default filled in."""
        found: Returned = self.returned.resolved(Returned(default))
        found.check(self.device_iterations)
        return found
