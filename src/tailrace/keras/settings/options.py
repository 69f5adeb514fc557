"""The settings of a model: how its executions run, in addition to Keras' `compile`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax.numpy as jnp
import keras
import numpy as np

from tailrace.base.checks import member_named
from tailrace.base.messages import note_once
from tailrace.errors import OptionError, PlanError, ProgramError
from tailrace.keras.data.batch_counts import Counts, counted
from tailrace.keras.optimizers.wrappers import accumulation_of
from tailrace.keras.outfeed_layers import check_wrappers
from tailrace.keras.pipelines.assignment_classes import check_no_gaps
from tailrace.keras.pipelines.graph import has_flow
from tailrace.keras.pipelines.staged_forward import StagedCall, StagedFlow
from tailrace.keras.pipelines.stages import stages_of
from tailrace.keras.programs.variables import Layout
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.forward_only import ForwardPipeline
from tailrace.program.compiling.build import DEFAULT
from tailrace.program.step.accumulation import Accumulation, Reduction
from tailrace.taps.tap import Observe

_Kind = TypeVar("_Kind", Pipeline, ForwardPipeline)

_staged: contextvars.ContextVar[dict[int, Any]] = contextvars.ContextVar("tailrace_staged")
"""The staged forward passes of models being traced, by the id of the model."""


class MetricReduction(enum.StrEnum):
    """How the values of a metric on several replicas are combined.

    Only `MERGED` is exact: the value of one metric over the batches of all replicas. `NONE` is the
    value of the last replica, `LIST` has those of all. Strings are accepted; an unknown one is an
    `OptionError`.

    >>> import tailrace.keras as tk
    >>> tk.MetricReduction.parse("MEAN")
    <MetricReduction.MEAN: 'mean'>
    """

    MERGED = "merged"
    NONE = "none"
    LIST = "list"
    SUM = "sum"
    MEAN = "mean"

    @classmethod
    def parse(cls, value: enum.Enum | str) -> MetricReduction:
        """The member named `value`, in upper or lower case."""
        return cls(value.value if isinstance(value, enum.Enum) else value)

    @classmethod
    def _missing_(cls, value: object) -> MetricReduction:
        return member_named(cls, value, "A reduction of metrics")


def positive(name: str, value: object) -> int:
    """Check a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise OptionError(f"Expected {name} to be a positive integer, but got {value!r} instead.")
    return int(value)


@dataclasses.dataclass
class Options:
    """The options of a model's setters; saved with it."""

    gradient_accumulation_steps_per_replica: int = 1
    gradient_accumulation_reduction_method: str = "sum"
    gradient_accumulation_dtype: Any = None
    pipelining_gradient_accumulation_steps_per_replica: int | None = None
    pipelining_device_mapping: list[int] | None = None
    pipelining_accumulate_outfeed: bool = False
    pipelining_reduction_method: str = "sum"
    pipelining_accumulation_dtype: Any = None
    pipelining_schedule: str = "grouped"
    pipelining_recompute: bool = False
    asynchronous_callbacks: bool = False
    replicated_metric_reduction_method: str = "merged"
    prefetch: int = 1
    resident: bool | None = None
    offload_optimizer_state: bool | None = False
    shard_optimizer_state: bool = False
    offload_activations: bool = False
    pipeline_stage_assignment: list[Any] | None = None

    def saved(self) -> dict[str, Any]:
        """As plain values, for a file."""
        plain = dataclasses.asdict(self)
        for name in ("gradient_accumulation_dtype", "pipelining_accumulation_dtype"):
            if callable(plain[name]):
                note_once(
                    "A model was saved without the function that chooses dtypes of accumulators: a "
                    "loaded one has those of the variables."
                )
                plain[name] = None
            elif plain[name] is not None:
                plain[name] = str(jnp.dtype(plain[name]))  # by name: JSON has no dtypes
        return plain

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Options:
        """From the values in a file."""
        known = {field.name for field in dataclasses.fields(cls)}
        # A model that a later version saved may have options that this one does not know.
        return cls(**{name: value for name, value in plain.items() if name in known})


@dataclasses.dataclass
class Seen:
    """The loss of a step's forward pass, with its gradient."""

    loss: Any = None


class Settings:
    """Everything Tailrace knows about one model; `model.tailrace`."""

    def __init__(self, model: keras.Model, replicas: int = 1) -> None:
        self.model = model
        self.replicas = replicas
        self.options = Options()
        self.observe: Observe = ()
        self.run_dir: Any = None
        self.fingerprint = False
        self.build = DEFAULT
        """How programs are rewritten and compiled."""
        self.seen: Seen | None = None
        self.layout: Layout | None = None
        self.assignment: list[Any] | None = None
        """The stage assignment as it was set, as objects."""
        self.ignores_notes = False
        """Whether the stages given at layer calls were reset."""

    # -- rules, which compatibility layers make stricter -------------------------------------------

    def counts(
        self, steps: int | None, size: int | None, execution: int, epochs: int = 1
    ) -> Counts:
        """The numbers of batches of an epoch and an execution; see `counted`."""
        del epochs
        return counted(steps, size, execution, self.replicas)

    def saved(self) -> dict[str, Any]:
        """The settings to save with the model."""
        return {"replicas": self.replicas, "options": self.options.saved()}

    def own_optimizer(self, optimizer: keras.optimizers.Optimizer | str | None) -> Any:
        """The optimizer to pass to Keras for the one given to `compile`; or refuse it."""
        return optimizer

    def check_compiled(self, run_eagerly: bool, jit_compile: bool) -> None:
        """Refuse unsupported arguments of `compile`."""

    def check_keras_loop(self, reason: str) -> None:
        """Refuse settings that Keras' loop would silently ignore."""
        wrong = [*self.for_engine(), *(["fingerprint=True"] if self.fingerprint else [])]
        if wrong:
            raise ProgramError(
                f"The model {self.model.name!r} has {reason}: Keras' own loop runs it, not a "
                f"program on the device, so it does not go with {wrong[0]}. Leave one of them out."
            )

    def for_engine(self) -> list[str]:
        """What is set that only the engine's own step can do."""
        # In this order: a message names the first that is set.
        found = {
            "replicas": self.replicas > 1,
            "gradient accumulation by Tailrace": self.microbatches > 1,
            "a pipeline": self.is_pipelined,
            "observe=": bool(self.observe),
            "run_dir=": self.run_dir is not None,
        }
        return [what for what, is_set in found.items() if is_set]

    # -- one step -------------------------------------------------------------------------------

    @property
    def is_pipelined(self) -> bool:
        """Whether the model is cut into stages."""
        return self.stages is not None

    @property
    def stages(self) -> list[Any] | None:
        """The stage of each layer call; None without a pipeline."""
        return stages_of(self.model)

    @property
    def accumulation(self) -> Accumulation:
        """How microbatches are accumulated."""
        options = self.options
        if self.is_pipelined:
            return Accumulation(1)  # the pipeline says how many
        asked = accumulation_of(getattr(self.model, "optimizer", None))
        if asked is not None:
            if options.gradient_accumulation_steps_per_replica > 1:
                raise OptionError(
                    "Gradients are accumulated once: by a GradientAccumulationOptimizer, or by "
                    "set_gradient_accumulation_options. Both are set. Leave one of them out."
                )
            return asked
        return Accumulation(
            options.gradient_accumulation_steps_per_replica,
            dtype=options.gradient_accumulation_dtype,
            reduction=Reduction.parse(options.gradient_accumulation_reduction_method),
        )

    @property
    def microbatches(self) -> int:
        """The number of batches of a replica per step."""
        if self.is_pipelined:
            return self.options.pipelining_gradient_accumulation_steps_per_replica or 1
        return self.accumulation.microbatches

    def loss_function(
        self,
        loss: Callable[..., Any],
        choosing: Callable[[Accumulation], Accumulation] = lambda accumulation: accumulation,
    ) -> Any:
        """The loss function for the engine: the loss, or a pipeline of it.

        Args:
            loss: the loss.
            choosing: lets a function of the variable choose the dtypes of accumulators.
        """
        return self._pipeline(Pipeline, loss, choosing) if self.is_pipelined else loss

    def forward_pipeline(self) -> ForwardPipeline | None:
        """The forward-only pipeline; None without stages."""
        stages = self.stages
        if stages is None:
            return None
        check_no_gaps(stages)
        return self._pipeline(ForwardPipeline, self.model)

    def _pipeline(
        self,
        kind: Callable[..., _Kind],
        function: Callable[..., Any],
        choosing: Callable[[Accumulation], Accumulation] = lambda accumulation: accumulation,
    ) -> _Kind:
        options = self.options
        accumulation = Accumulation(
            self.microbatches,
            dtype=options.pipelining_accumulation_dtype,
            reduction=Reduction.parse(options.pipelining_reduction_method),
        )
        return kind(
            function,
            accumulation=choosing(accumulation),
            schedule=options.pipelining_schedule,
            device_mapping=options.pipelining_device_mapping,
            recompute=options.pipelining_recompute,
        )

    def check_pipeline(self) -> None:
        """Refuse a pipeline that cannot run, before anything is traced."""
        stages = self.stages
        if stages is None:
            return
        count = check_no_gaps(stages)
        if self.options.pipelining_gradient_accumulation_steps_per_replica is None:
            raise OptionError(
                "The model is pipelined, however gradient_accumulation_steps_per_replica has not "
                "been set through set_pipelining_options(). It says how many batches go through the "
                "stages before the weights are updated."
            )
        if accumulation_of(getattr(self.model, "optimizer", None)) is not None:
            raise OptionError(
                "A pipeline accumulates gradients itself: a GradientAccumulationOptimizer would do "
                "it again. Give the bare optimizer, and set_pipelining_options("
                "gradient_accumulation_steps_per_replica=...)."
            )
        check_wrappers(self.model.optimizer)
        try:
            # Plans are plain data: the schedule's rules about counts are checked here, before Keras
            # reads any batch.
            self._pipeline(Pipeline, self.model).plan((1,) * count)
        except PlanError as error:
            self.staged()  # first, because it reports stages in a wrong order
            # Errors of a pipeline use its name of the option; translate it to the name used here.
            named = "gradient_accumulation_steps_per_replica="
            raise PlanError(str(error).replace("accumulation=", named)) from None
        self._note_unused()

    def _note_unused(self) -> None:
        """Log which options for models without stages a pipeline ignores."""
        options = self.options
        unused = {
            "gradient_accumulation_steps_per_replica": (
                options.gradient_accumulation_steps_per_replica,
                (1, options.pipelining_gradient_accumulation_steps_per_replica),
            ),
            "gradient_accumulation_reduction_method": (
                options.gradient_accumulation_reduction_method,
                ("sum", options.pipelining_reduction_method),
            ),
            "dtype": (options.gradient_accumulation_dtype, (None,)),
        }
        # A value that the pipeline has too, or the default, is not worth a word.
        given = [f"{n}={v!r}" for n, (v, same) in unused.items() if v not in same]
        if given:
            note_once(
                f"set_gradient_accumulation_options({', '.join(given)}) is for models without stages "
                f"and has no effect on the pipelined model {self.model.name!r}: a pipeline accumulates "
                f"as set_pipelining_options says, gradient_accumulation_steps_per_replica="
                f"{options.pipelining_gradient_accumulation_steps_per_replica} and "
                f"gradient_accumulation_reduction_method={options.pipelining_reduction_method!r}."
            )

    def staged(self) -> Any:
        """The forward pass of the model, stage by stage; None without a pipeline."""
        stages = self.stages
        if stages is None:
            return None
        # Anew for each trace: layers may have been added or assigned since the last one.
        return (
            StagedFlow(self.model, stages)
            if has_flow(self.model)
            else StagedCall(self.model, stages)
        )

    @contextlib.contextmanager
    def differentiating(self, layout: Layout) -> Iterator[Seen]:
        """A context in which an evaluation step is traced as a training step."""
        # Put back, not cleared: contexts may be nested.
        before = self.seen, self.layout
        self.seen, self.layout = Seen(), layout
        try:
            with self.in_stages():
                yield self.seen
        finally:
            self.seen, self.layout = before

    @contextlib.contextmanager
    def in_stages(self) -> Iterator[None]:
        """A context in which calls of the model run stage by stage, if it has stages."""
        staged = self.staged()
        if staged is None:
            yield
            return
        model, whole = self.model, self.model.call

        def call(*args: Any, **kwargs: Any) -> Any:
            # Another thread may call the model meanwhile, without stages.
            return _staged.get({}).get(id(model), whole)(*args, **kwargs)

        model.__dict__["call"] = call  # overrides that of its class while traced
        token = _staged.set({**_staged.get({}), id(model): staged})
        try:
            yield
        finally:
            _staged.reset(token)
            del model.__dict__["call"]

    @property
    def merges_metrics(self) -> bool:
        """Whether metrics are merged over the batches of all replicas."""
        method = MetricReduction.parse(self.options.replicated_metric_reduction_method)
        return method is MetricReduction.MERGED

    def metric_reduction(self, values: np.ndarray) -> Any:
        """Combine the values of all replicas, for the logs of a batch."""
        method = MetricReduction.parse(self.options.replicated_metric_reduction_method)
        if method is MetricReduction.NONE:
            return values[-1]
        if method is MetricReduction.LIST:
            return values
        return values.sum(0) if method is MetricReduction.SUM else values.mean(0)
