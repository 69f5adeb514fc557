"""The setters of a model: accumulation, pipelining, feeds, replicas, callbacks.

Later calls merge: options that are not given keep their values.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from tailrace.base.array_like import DTypeLike
from tailrace.base.checks import member_named
from tailrace.base.messages import note_once
from tailrace.errors import OptionError
from tailrace.keras.settings.options import MetricReduction, Options, Settings, positive
from tailrace.pipeline.schedule.plan import PipelineSchedule
from tailrace.program.step.accumulation import Reduction, check_choice

_INSTEAD = {
    "gradient_accumulation_count": "gradient_accumulation_steps_per_replica",
    "repeat_count": None,
    "device_mapping": "device_mapping",
    "accumulate_outfeed": "accumulate_outfeed",
}
_BY_KERAS = (
    "computational_stages",
    "repeat_count",
    "inputs",
    "infeed_queue",
    "outfeed_queue",
    "optimizer_function",
)
_NOT_WITH_KERAS = ("outfeed_loss", "outfeed_mask", "batch_serialization_iterations")
_REMOVED = ("experimental_normalize_gradients",)
_MEMORY = {
    "offload_weight_update_variables": "offload_optimizer_state",
    "replicated_optimizer_state_sharding": "shard_optimizer_state",
    "offload_activations": "offload_activations",
}
"""Options about memory, under the original's names and those of `tr.Trainer`."""

_CHIP_ONLY = (
    "offload_gradient_accumulation_buffers",
    "replicated_weight_sharding",
    "offload_weights",
    "continuous_weight_updates",
    "forward_propagation_stages_poplar_options",
    "backward_propagation_stages_poplar_options",
    "weight_update_poplar_options",
    "use_io_tiles",
    "num_io_tiles",
    "gradient_accumulation_for_captured_grads",
)
"""Options of the original chip only: accepted and logged once, without effect on results."""


class Setters:
    """The options of a model, one method each."""

    settings: Settings

    def forget_programs(self) -> None:
        """Drop the device programs; they are built again when needed."""
        raise NotImplementedError

    @property
    def _options(self) -> Options:
        return self.settings.options

    def set_gradient_accumulation_options(
        self,
        gradient_accumulation_steps_per_replica: int | None = None,
        gradient_accumulation_reduction_method: enum.Enum | str | None = None,
        use_v2_gradient_accumulation_optimizer: bool | None = None,
        dtype: DTypeLike = None,
        **optimizer_kwargs: Any,
    ) -> None:
        """Set gradient accumulation, for a model without stages.

        Args:
            gradient_accumulation_steps_per_replica: the number of batches of a replica per step.
            gradient_accumulation_reduction_method: "sum" (the default), "mean" or "running_mean".
            use_v2_gradient_accumulation_optimizer: accepted; there is only one way to accumulate.
            dtype: the dtype of the accumulators, a function of the variable that returns one, or None
                for that of each variable.
            **optimizer_kwargs: `offload_weight_update_variables` (None: where it pays),
                `replicated_optimizer_state_sharding` and `offload_activations`, as the options of
                `tr.Trainer`; other options of the original chip are logged and have no effect.

        Raises:
            OptionError: a value is of the wrong kind, or an option is unknown.
        """
        options = self._options
        if use_v2_gradient_accumulation_optimizer is not None:
            _note_chip("use_v2_gradient_accumulation_optimizer")
        for name in _memory_options(options, optimizer_kwargs):
            if name in ("opt", "num_mini_batches", "experimental_normalize_gradients"):
                raise OptionError(
                    f"Found `{name}` key in optimizer_kwargs. This argument is automatically set by "
                    f"Keras. Use gradient_accumulation_steps_per_replica and "
                    f"gradient_accumulation_reduction_method."
                )
            _chip_only(name, "set_gradient_accumulation_options")
        if gradient_accumulation_steps_per_replica is not None:
            options.gradient_accumulation_steps_per_replica = positive(
                "gradient_accumulation_steps_per_replica", gradient_accumulation_steps_per_replica
            )
        if gradient_accumulation_reduction_method is not None:
            options.gradient_accumulation_reduction_method = _reduction(
                gradient_accumulation_reduction_method
            )
        if dtype is not None:
            options.gradient_accumulation_dtype = check_choice(dtype, "dtype")
        self.forget_programs()

    def set_pipelining_options(
        self,
        gradient_accumulation_steps_per_replica: int | None = None,
        device_mapping: list[int] | None = None,
        accumulate_outfeed: bool | None = None,
        gradient_accumulation_reduction_method: enum.Enum | str | None = None,
        pipeline_schedule: enum.Enum | str | None = None,
        schedule: enum.Enum | str | None = None,
        recomputation_mode: enum.Enum | str | None = None,
        gradient_accumulation_dtype: DTypeLike = None,
        accumulate_outfeed_dtype: DTypeLike = None,
        **pipelining_kwargs: Any,
    ) -> None:
        """Set the pipeline options of a model with stages.

        Args:
            gradient_accumulation_steps_per_replica: the number of batches of a replica per step.
            device_mapping: for each stage, the device that it runs on.
            accumulate_outfeed: accepted; logs are the same either way.
            gradient_accumulation_reduction_method: "sum" (the default), "mean" or "running_mean".
            pipeline_schedule: "grouped" (the default), "interleaved" or "sequential".
            schedule: the same, under its other name.
            recomputation_mode: anything but None recomputes activations in the backward pass.
            gradient_accumulation_dtype: the dtype of the accumulators, a function of the variable that
                returns one, or None for that of each variable.
            accumulate_outfeed_dtype: accepted; logs are float32 sums.
            **pipelining_kwargs: as for `set_gradient_accumulation_options`.

        Raises:
            OptionError: a value is of the wrong kind, or an option is unknown.
        """
        options = self._options
        for name in _memory_options(options, pipelining_kwargs):
            _check_pipelining_kwarg(name)
        if gradient_accumulation_steps_per_replica is not None:
            options.pipelining_gradient_accumulation_steps_per_replica = positive(
                "gradient_accumulation_steps_per_replica", gradient_accumulation_steps_per_replica
            )
        if device_mapping is not None:
            if not isinstance(device_mapping, list) or not all(
                isinstance(d, int | np.integer) and not isinstance(d, bool) for d in device_mapping
            ):
                raise OptionError(
                    f"Expected device_mapping to be a list of integers. "
                    f"Received: {device_mapping!r}."
                )
            options.pipelining_device_mapping = [int(d) for d in device_mapping]
        if accumulate_outfeed is not None:
            options.pipelining_accumulate_outfeed = bool(accumulate_outfeed)
        if gradient_accumulation_reduction_method is not None:
            options.pipelining_reduction_method = _reduction(gradient_accumulation_reduction_method)
        chosen = schedule if pipeline_schedule is None else pipeline_schedule
        if chosen is not None:
            options.pipelining_schedule = str(_schedule(chosen))
        if recomputation_mode is not None:
            options.pipelining_recompute = bool(recomputation_mode)
        if gradient_accumulation_dtype is not None:
            options.pipelining_accumulation_dtype = check_choice(
                gradient_accumulation_dtype, "gradient_accumulation_dtype"
            )
        if accumulate_outfeed_dtype is not None:
            _note_chip("accumulate_outfeed_dtype")
        # The options are part of the program, which is traced again for the next fit.
        self.forget_programs()

    def set_infeed_queue_options(self, **kwargs: Any) -> None:
        """Options of the infeed: `prefetch` (or `prefetch_depth`), `resident`.

        With a prefetch of 0 data is read on demand; with any other number the next execution's data is
        read while one runs. `resident` decides whether NumPy arrays given to `fit` are kept on the
        device while it runs, so that only row indices are transferred (later writes to the arrays are
        not seen); None: on an accelerator, up to 1 GB. Other options of the original are logged and
        have no effect.

        Raises:
            OptionError: a value is of the wrong kind, or an option is unknown.
        """
        for name, value in kwargs.items():
            if name in ("dataset", "infeed_spec", "element_spec"):
                raise OptionError(
                    f"Found `{name}` key in infeed_kwargs. This argument is automatically set by "
                    f"Keras."
                )
            if name in ("prefetch", "prefetch_depth"):
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise OptionError(
                        f"{name} is the number of executions read ahead, at least 0. "
                        f"Received: {name}={value!r}."
                    )
                self._options.prefetch = value
            elif name == "resident":
                if value not in (None, True, False):
                    raise OptionError(
                        f"resident is True, False, or None to decide by size. "
                        f"Received: resident={value!r}."
                    )
                self._options.resident = value
            elif name in ("device_ordinal", "buffer_depth", "use_io_tiles", "optimise_latency"):
                _note_chip(name)
            else:
                raise OptionError(
                    f"set_infeed_queue_options takes prefetch_depth and resident. "
                    f"Received: {name}={value!r}."
                )
        self.forget_programs()

    def set_outfeed_queue_options(self, **kwargs: Any) -> None:
        """Options of the outfeed; those of the original chip are logged and have no effect.

        Raises:
            OptionError: an option is unknown.
        """
        for name, value in kwargs.items():
            if name in ("outfeed_mode", "device_ordinal"):
                raise OptionError(
                    f"Found `{name}` key in outfeed_kwargs. This argument is not compatible with "
                    f"Keras."
                )
            if name not in ("buffer_depth", "optimise_latency", "numerics_check", "io_batch_size"):
                raise OptionError(
                    f"set_outfeed_queue_options does not know {name}={value!r}. Leave it out."
                )
            _note_chip(name)
        self.forget_programs()

    def set_replication_options(
        self, replicated_metric_reduction_method: enum.Enum | str = "merged"
    ) -> None:
        """Set how metrics of several replicas are combined: see `tk.MetricReduction`.

        Raises:
            OptionError: there is no such reduction.
        """
        self._options.replicated_metric_reduction_method = str(
            MetricReduction.parse(replicated_metric_reduction_method)
        )

    def set_asynchronous_callbacks(self, asynchronous: bool = False) -> None:
        """Set whether callbacks are called for every batch of every replica, while an execution runs.

        Logs are those of the replica; the last ones of an execution are those of all replicas.
        """
        self._options.asynchronous_callbacks = bool(asynchronous)


def _memory_options(options: Options, given: dict[str, Any]) -> list[str]:
    """Set the options about memory; returns the names of the others."""
    for name, value in given.items():
        if name in _MEMORY:
            if value is not None and not isinstance(value, bool):
                raise OptionError(f"{name} is True, False or None. Received: {name}={value!r}.")
            keeps_open = name == "offload_weight_update_variables"
            setattr(options, _MEMORY[name], value if keeps_open else bool(value))
    return [name for name in given if name not in _MEMORY]


def _reduction(value: enum.Enum | str) -> str:
    return str(Reduction.parse(value))


def _schedule(value: object) -> PipelineSchedule:
    # Here it is an option of the model: an `OptionError`, not the `PlanError` of a plan.
    return member_named(PipelineSchedule, getattr(value, "name", value), "A pipeline schedule")


def _check_pipelining_kwarg(name: str) -> None:
    if _INSTEAD.get(name):
        raise OptionError(
            f"Found `{name}` key in pipelining_kwargs. Set the `{_INSTEAD[name]}` argument to "
            f"set_pipelining_options instead."
        )
    if name in _BY_KERAS:
        raise OptionError(
            f"Found `{name}` key in pipelining_kwargs. This argument is automatically set by Keras."
        )
    if name in _NOT_WITH_KERAS:
        raise OptionError(
            f"Found `{name}` key in pipelining_kwargs. This argument is not compatible with Keras."
        )
    if name in _REMOVED:
        raise OptionError(
            f"Found `{name}` key in pipelining_kwargs. It was removed: use "
            f"gradient_accumulation_reduction_method."
        )
    _chip_only(name, "set_pipelining_options")


def _chip_only(name: str, setter: str) -> None:
    if name not in _CHIP_ONLY:
        raise OptionError(f"{setter} does not know {name!r}. Leave it out, or check its spelling.")
    _note_chip(name)


def _note_chip(name: str) -> None:
    note_once(
        f"{name} is an option of the original chip. It is accepted and has no effect here.",
        key=f"chip option {name}",
    )
