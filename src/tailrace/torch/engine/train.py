"""The program behind a training model: a `tr.Trainer` whose executions are calls.

What a call emits is handed back by tap, still as it left the program.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.errors import OptionError, PlanError
from tailrace.jaxprs.marks import path_name
from tailrace.messages import note_once
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.schedule.plan import plan
from tailrace.pipeline.schedule.schedules import PipelineSchedule
from tailrace.program.running.executable import Numbers
from tailrace.program.step.training_step import TrainState
from tailrace.records.history import History
from tailrace.records.records import Part, Records
from tailrace.records.sinks import Finished, Sink
from tailrace.taps.catalogue import Catalogue
from tailrace.taps.tap import Tap, parse_taps
from tailrace.torch.calls.call_feed import CallFeed
from tailrace.torch.calls.options import Execution, ModelOptions
from tailrace.torch.engine.portions import Portions
from tailrace.torch.optim.binding import DeviceOptimizer
from tailrace.torch.optim.loss_scaling import FACTOR
from tailrace.torch.tracing.forward import Forward
from tailrace.training.trainer import Trainer

_HYPER = "optimizer_state/hyper"


@jax.custom_jvp
def _scale_gradient(value: Any, factor: Any) -> Any:
    """The value itself, whose gradient is multiplied by a factor."""
    return value


@_scale_gradient.defjvp
def _scaled_tangent(primals: Any, tangents: Any) -> Any:
    tangent = tangents[0]
    return primals[0], tangent * jnp.asarray(primals[1], tangent.dtype)


class CallRecords(Records):
    """Records of one call after the other; the latest are also there as they left the program."""

    latest: dict[tuple[str, str], Part]

    def clear(self) -> None:
        """Forget those of the call before."""
        super().clear()
        self.latest = {}

    def add(self, record: Any) -> None:
        """Append what one tap emitted."""
        super().add(record)
        self.latest[(record.name, record.kind)] = record


class _TapsOnly:
    """A sink that keeps what users tap, and not what calls return."""

    def __init__(self, sink: Sink, others: set[str]) -> None:
        self._sink, self._others = sink, others
        self.fitting, self.stored = sink.fitting, sink.stored

    def execution(self, done: Finished) -> None:
        """Take one execution."""
        parts = [part for part in done.parts if part.kind not in self._others]
        self._sink.execution(dataclasses.replace(done, parts=parts))


class TrainingEngine:
    """A `tr.Trainer` whose executions are calls."""

    def __init__(
        self,
        forward: Forward,
        optimizer: DeviceOptimizer,
        options: ModelOptions,
        params: Mapping[str, Any],
        buffers: Mapping[str, Any],
        frozen: frozenset[str],
        own_taps: Sequence[Any],
        seed: int,
        step: int = 0,
    ) -> None:
        self.options, self._automatic = options, optimizer.automatic

        def loss_fn(params: Any, state: Any, element: Any, /) -> Any:
            scaling: Any = optimizer.loss_scaling
            if optimizer.automatic:
                scaling = scaling * params[FACTOR]
            held = {n: jax.lax.stop_gradient(v) if n in frozen else v for n, v in params.items()}
            held.pop(FACTOR, None)
            if optimizer.scaled:
                held = {
                    name: value
                    if optimizer.keeps_scale(value)
                    else _scale_gradient(value, 1 / scaling)
                    for name, value in held.items()
                }
            loss, after = forward(held, state, element)
            loss = loss.sum() if loss.ndim else loss
            return _scale_gradient(loss, scaling) if optimizer.scaled else loss, (after, None)

        accumulation = options.accumulation
        if optimizer.accum_type is not None:
            accumulation = dataclasses.replace(accumulation, dtype=optimizer.accum_type)  # type: ignore[type-var]
        self.feed = CallFeed(forward.form.spec())
        model: Any = loss_fn
        if forward.spread:
            model = as_pipeline(loss_fn, forward, options, accumulation)
            accumulation = 1
        own = {FACTOR: optimizer.init(params)[FACTOR]} if optimizer.automatic else {}
        self.trainer = Trainer(
            model,
            optimizer,
            {**params, **own},
            steps_per_execution=options.device_iterations,
            accumulation=accumulation,
            replicas=options.replicas,
            offload_optimizer_state=options.offload_optimizer_state,
            shard_optimizer_state=options.shard_optimizer_state,
            offload_activations=options.offload_activations,
            model_state=dict(buffers),
            seed=seed,
            observe=[*own_taps, *user_taps(options.observe)],
            observe_bytes=options.observe_bytes,
            run_dir=options.run_dir,
        )
        self.trainer.step = step
        if self.trainer.sink is not None:
            self.trainer.sink = _TapsOnly(self.trainer.sink, {tap.kind for tap in own_taps})
        stored = self.trainer.sink.stored if self.trainer.sink else None
        self.trainer.records = self.records = CallRecords(stored)
        paths = jax.tree_util.tree_flatten_with_path(self.trainer.current())[0]
        self._leaves = {path_name(path): number for number, (path, _) in enumerate(paths)}
        self._open = contextlib.ExitStack()
        self._fit = fit = self._open.enter_context(self.trainer.fitting(self.feed))
        steps, resident = options.device_iterations, forward.form.resident
        self._portions = Portions(fit.runner, fit.sight, steps, resident)

    def compile(self) -> None:
        """Compile without running anything."""
        self._portions.compile(self._fit.known)

    def run(self, blocks: list[Any]) -> dict[tuple[str, str], Part]:
        """One execution; returns what its taps emitted."""
        trainer, fit = self.trainer, self._fit
        self.records.clear()
        trainer.history = History(trainer.step, self.options.microbatches, self.options.replicas)
        first, steps = trainer.step, self.options.device_iterations
        self.feed.hand(blocks, self._portions.counts)
        emitted, _ = self._portions.dispatch(fit.known, Numbers(trainer.seed, first))
        fit.pending.append((first, steps, fit.sight.period, emitted, fit.runner.taken))
        trainer.step += steps
        fit.take_in()
        return self.records.latest

    @property
    def catalogue(self) -> Catalogue:
        """Every tensor of the step."""
        return self._fit.sight.catalogue

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state and buffers on the device; not copies."""
        state = self.trainer.current()
        if not self._automatic:
            return state
        return state._replace(params={n: v for n, v in state.params.items() if n != FACTOR})

    def put(self, state: TrainState) -> None:
        """Go on from another state, which is copied."""
        if self._automatic:
            factor = state.optimizer_state[FACTOR]
            state = state._replace(params={**state.params, FACTOR: factor})
        self.trainer.replace(dict(enumerate(jax.tree.leaves(state))))

    def put_weights(self, values: Mapping[str, Any]) -> None:
        """Go on from other values of some parameters and buffers."""
        state = self.state
        leaves = {}
        for name, value in values.items():
            kind = "params" if name in state.params else "model_state"
            like = getattr(state, kind)[name]
            leaves[self._leaves[f"{kind}/{name}"]] = jnp.array(value, like.dtype)
        self.trainer.replace(leaves)

    def set_hypers(self, values: Any) -> None:
        """Other learning rates and the like, from the next step on."""
        self.trainer.replace({self._leaves[_HYPER]: jnp.asarray(values)})

    def close(self) -> None:
        """End; history and records on disk are complete after this."""
        self._open.close()


def as_pipeline(
    loss_fn: Any, forward: Forward, options: ModelOptions, accumulation: Any
) -> Pipeline:
    """The model as a pipeline, or as stages that run one at a time."""
    stages = len(forward.devices)
    pipelined = options.execution is Execution.PIPELINED
    if pipelined and options.microbatches < 2 * stages - 1:
        raise OptionError(
            f"accumulation (gradientAccumulation) must be greater than or equal to the number of "
            f"pipeline stages ({2 * stages - 1}) when using pipelined execution. Please note that a "
            f"model with {stages} pipeline stages will have an additional {stages - 1} stages when "
            f"training. Received: accumulation={options.microbatches}."
        )
    devices = sorted(set(forward.devices))
    mapping = [devices.index(device) for device in forward.devices]
    schedule = options.schedule if pipelined else PipelineSchedule.SEQUENTIAL
    if schedule == "auto":
        schedule = _fitting_schedule(mapping, options.microbatches)
    return Pipeline(
        loss_fn,
        accumulation=accumulation,
        schedule=schedule,
        device_mapping=mapping,
        recompute=options.recompute,
    )


def _fitting_schedule(mapping: list[int], microbatches: int) -> PipelineSchedule:
    """The fastest schedule that takes so many microbatches."""
    reason = ""
    for schedule in (PipelineSchedule.GROUPED, PipelineSchedule.INTERLEAVED):
        try:
            plan(len(mapping), microbatches, schedule, mapping)
        except PlanError as error:
            reason = str(error)
            continue
        return schedule
    note_once(f"The pipeline runs one stage at a time, with the same results. {reason}")
    return PipelineSchedule.SEQUENTIAL


def user_taps(observe: Any) -> list[Tap]:
    """What a user gave as `observe=`, as taps."""
    return parse_taps(observe)
