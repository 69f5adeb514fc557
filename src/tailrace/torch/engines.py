"""The programs behind models: a training loop, and a loop of forward passes.

Both run one execution a call. What they emit is handed back by tap, still as it left the program.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.errors import OptionError, PlanError
from tailrace.marks import name_values, path_name
from tailrace.notes import note_once
from tailrace.observe.records import Part, Records, take_records
from tailrace.observe.sinks import Finished, Sink
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.planning import plan
from tailrace.pipeline.timing import PipelineSchedule
from tailrace.program.executable import Numbers, Placement
from tailrace.program.loops import repeat_with, whole
from tailrace.program.runner import LoopRunner
from tailrace.program.sight import Sight, look
from tailrace.program.step import TrainState
from tailrace.tensors.catalogue import Catalogue, Entry, matches
from tailrace.tensors.probe import probed
from tailrace.tensors.taps import Tap, check_bytes, parse_taps
from tailrace.torch.feed import CallFeed
from tailrace.torch.forward import Forward
from tailrace.torch.optim.binding import DeviceOptimizer
from tailrace.torch.options import Execution, ModelOptions
from tailrace.training.history import History
from tailrace.training.trainer import Trainer

_HYPER = "optimizer_state/hyper"


def _scale_gradient(value: Any, factor: float) -> Any:
    """The value itself, whose gradient is multiplied by a factor."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    same.defjvp(lambda primals, tangents: (primals[0], tangents[0] * factor))
    return same(value)


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
        self.options = options
        scaling = optimizer.loss_scaling

        def loss_fn(params: Any, state: Any, element: Any, /) -> Any:
            held = {n: jax.lax.stop_gradient(v) if n in frozen else v for n, v in params.items()}
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
        self.trainer = Trainer(
            model,
            optimizer,
            dict(params),
            steps_per_execution=options.device_iterations,
            accumulation=accumulation,
            replicas=options.replicas,
            offload_optimizer_state=options.offload_optimizer_state,
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
        self._hyper = next(i for i, (path, _) in enumerate(paths) if path_name(path) == _HYPER)
        self._open = contextlib.ExitStack()
        self._fit = self._open.enter_context(self.trainer.fitting(self.feed))

    def compile(self) -> None:
        """Compile without running anything."""
        fit = self._fit
        fit.runner.compiled(fit.known, self.options.device_iterations, fit.sight.period)

    def run(self, blocks: list[Any]) -> dict[tuple[str, str], Part]:
        """One execution; returns what its taps emitted."""
        trainer, fit = self.trainer, self._fit
        self.records.clear()
        trainer.history = History(trainer.step, self.options.microbatches, self.options.replicas)
        self.feed.hand(blocks)
        fit.run(self.options.device_iterations, 0, fit.sight.period)
        to_host(fit.pending[-1][3])
        fit.take_in()
        return self.records.latest

    @property
    def catalogue(self) -> Catalogue:
        """Every tensor of the step."""
        return self._fit.sight.catalogue

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state and buffers on the device; not copies."""
        return self.trainer.current()

    def put(self, state: TrainState) -> None:
        """Go on from another state, which is copied."""
        self.trainer.replace(dict(enumerate(jax.tree.leaves(state))))

    def set_hypers(self, values: Any) -> None:
        """Other learning rates and the like, from the next step on."""
        self.trainer.replace({self._hyper: jnp.asarray(values)})

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


class InferenceEngine:
    """A loop of forward passes, fed by calls."""

    def __init__(
        self,
        forward: Forward,
        options: ModelOptions,
        params: Mapping[str, Any],
        buffers: Mapping[str, Any],
        own_taps: Sequence[Any],
        seed: int,
    ) -> None:
        self.options, self.seed, self.calls = options, seed, 0
        self.feed = feed = CallFeed(forward.form.spec())
        self.taps = [*own_taps, *user_taps(options.observe)]
        self.records = CallRecords()
        found: list[Entry] = []
        placement = Placement(options.replicas)
        feed.bind_replicas(options.replicas)

        def wants(entry: Entry) -> bool:
            return any(matches(tap.select, entry) for tap in self.taps)

        def body(state: Any, element: Any, params: Any) -> Any:
            params = name_values("param", params)
            element = name_values("input", element)
            state = name_values("buffer", state)
            found.clear()
            run = probed(lambda p, s, e: forward(p, s, e)[1], wants, found)
            return run(params, state, element)

        def program(state: Any, read: Any) -> Any:
            return repeat_with(whole, 1, lambda s, e: body(s, e, read), state, feed)

        self.params = {name: jnp.asarray(value) for name, value in params.items()}
        carried = dict(buffers)
        self.runner = LoopRunner(program, carried, self.params, placement)
        self.sight: Sight = look(
            self.runner.traced,
            self.taps,
            [e for e in found if e.kind != "cotangent"],
        )
        self.runner.wanted = self.sight.wanted
        check_bytes(
            self.sight.chosen, options.device_iterations, 1, options.replicas, options.observe_bytes
        )
        self.known = self.runner.begin(carried, self.params)

    @property
    def catalogue(self) -> Catalogue:
        """Every tensor of the forward pass."""
        return self.sight.catalogue

    @property
    def buffers(self) -> Any:
        """The buffers on the device."""
        return self.runner.carried(self.known)

    def put(self, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        """Other weights from now on; they are copied."""
        self.params = {name: jnp.array(value) for name, value in params.items()}
        self.known = self.runner.begin(dict(buffers), self.params)

    def compile(self) -> None:
        """Compile without running anything."""
        self.runner.compiled(self.known, self.options.device_iterations, self.sight.period)

    def run(self, blocks: list[Any]) -> dict[tuple[str, str], Part]:
        """One execution; returns what its taps emitted."""
        steps = self.options.device_iterations
        self.feed.hand(blocks)
        emitted, ticket = self.runner.dispatch(
            self.known, steps, Numbers(self.seed, self.calls), 0, self.sight.period
        )
        to_host(emitted)
        jax.block_until_ready(ticket)
        parts = take_records(
            emitted,
            self.sight.chosen,
            first_step=self.calls,
            steps=steps,
            replicas=self.options.replicas,
            period=self.sight.period,
        )
        self.calls += steps
        self.records.clear()
        for part in parts:
            self.records.add(part)
        return self.records.latest

    def close(self) -> None:
        """Nothing stays open."""


def to_host(emitted: Mapping[Any, Any]) -> None:
    """Start copying everything to the host at once: one by one, each would wait for the device."""
    if jax.default_backend() == "cpu":
        return
    for leaf in jax.tree.leaves([emission.value for emission in emitted.values()]):
        leaf.copy_to_host_async()


def user_taps(observe: Any) -> list[Tap]:
    """What a user gave as `observe=`, as taps."""
    return parse_taps(observe)
