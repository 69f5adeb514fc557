"""The program of a training model: an engine whose executions are calls.

The emissions of a call are returned by tap, unprocessed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import OptionError, PlanError
from tailrace.feeds.feed import HandedFeed
from tailrace.jaxprs.marks import path_name
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.schedule.plan import plan
from tailrace.pipeline.schedule.schedules import PipelineSchedule
from tailrace.program.running.loop_state import Numbers
from tailrace.program.step.accumulation import Accumulation
from tailrace.program.step.training_step import TrainState
from tailrace.records.history import History
from tailrace.records.records import Part, Records
from tailrace.taps.catalogue import Catalogue
from tailrace.taps.tap import Observe, check_bytes, parse_taps
from tailrace.torch.calls.options import Execution, ModelOptions
from tailrace.torch.optim.binding import DeviceOptimizer
from tailrace.torch.optim.loss_scaling import FACTOR
from tailrace.torch.programs.open_run import OpenRun
from tailrace.torch.programs.portions import Portions, Sent
from tailrace.torch.tracing.forward import Forward
from tailrace.trainer.costs.memory_shortage import within_memory
from tailrace.trainer.engine import Engine
from tailrace.trainer.executions import Results
from tailrace.trainer.fitting.interrupts import held_back
from tailrace.trainer.lookback.rerun import twin_of
from tailrace.trainer.observation.description import describe
from tailrace.trainer.observation.duties import Guarding, recording
from tailrace.trainer.observation.journal import Journal

_HYPER = "optimizer_state/hyper"


@jax.custom_jvp
def _scale_gradient(value: object, factor: TensorLike) -> Any:
    """The value unchanged, with its gradient multiplied by a factor."""
    return value


@_scale_gradient.defjvp
def _scaled_tangent(primals: Tree, tangents: Tree) -> Any:
    tangent = tangents[0]
    return primals[0], tangent * jnp.asarray(primals[1], tangent.dtype)


def _loss_of(
    forward: Forward, optimizer: DeviceOptimizer, frozen: frozenset[str]
) -> Callable[[Tree, Tree, Tree], Any]:
    """The loss function of the engine, with the optimizer's loss scaling."""

    def loss_fn(params: Tree, state: Tree, element: Tree, /) -> Any:
        # The factor is a parameter of the engine, because a loss sees parameters and no optimizer
        # state.
        scaling: Any = optimizer.loss_scaling
        if optimizer.automatic:
            scaling = scaling * params[FACTOR]
        # Frozen parameters stay parameters of the engine: thawing one does not move it to another
        # tree.
        held = {n: jax.lax.stop_gradient(v) if n in frozen else v for n, v in params.items()}
        held.pop(FACTOR, None)
        # The loss is multiplied and each gradient divided by rules of differentiation alone: the
        # values of the forward pass are those without scaling.
        if optimizer.scaled:
            held = {
                name: value if optimizer.keeps_scale(value) else _scale_gradient(value, 1 / scaling)
                for name, value in held.items()
            }
        loss, after = forward(held, state, element)
        # `backward()` of a loss with several entries is that of their sum.
        loss = loss.sum() if loss.ndim else loss
        return _scale_gradient(loss, scaling) if optimizer.scaled else loss, (after, None)

    return loss_fn


@dataclasses.dataclass(frozen=True)
class RunEnd:
    """The run directory of a training with checkpoints.

    Attributes:
        end: where it was at the checkpoint; None if there was none.
        resumed: whether it goes on from there.
        directory: the directory of the checkpoints.
    """

    end: Mapping[str, Any] | None
    resumed: bool
    directory: str


class TrainingProgram:
    """An engine whose executions are calls."""

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
        kept: RunEnd | None = None,
    ) -> None:
        self.options, self._automatic = options, optimizer.automatic
        loss_fn = _loss_of(forward, optimizer, frozen)
        accumulation = options.accumulation
        if optimizer.accum_type is not None:
            accumulation = dataclasses.replace(accumulation, dtype=optimizer.accum_type)  # type: ignore[type-var]
        model: Any = loss_fn
        if forward.spread:
            model = as_pipeline(loss_fn, forward, options, accumulation)
            # A pipeline has its own.
            accumulation = 1
        # Beside the parameters; `state` takes it out again before anyone sees it.
        own = {FACTOR: optimizer.init(params)[FACTOR]} if optimizer.automatic else {}
        self.engine = Engine(
            model,
            optimizer,
            {**params, **own},
            accumulation=accumulation,
            replicas=options.replicas,
            offload_optimizer_state=options.offload_optimizer_state,
            shard_optimizer_state=options.shard_optimizer_state,
            offload_activations=options.offload_activations,
            model_state=dict(buffers),
            seed=seed,
            observe=[*own_taps, *parse_taps(options.observe)],
            fingerprint=options.fingerprint,
            build=options.build,
        )
        self.engine.step = step
        # Outputs and anchors are returned to the caller, and are no records of the run.
        self.journal = Journal(
            options.run_dir, leaving_out={tap.kind for tap in own_taps}, timed=True
        )
        if kept is not None and kept.resumed:
            none = History(step, options.microbatches, options.replicas)
            self.journal.take_up(none, kept.end)
        paths = jax.tree_util.tree_flatten_with_path(self.engine.state)[0]
        self._leaves = {path_name(path): number for number, (path, _) in enumerate(paths)}
        self.feed = HandedFeed(forward.form.spec())
        """Says what the elements of a call look like."""
        self.latest: Results | None = None
        """What the latest call left behind; None if it left nothing."""
        self._compiled = False
        self.engine.use(self.feed)
        steps, runner, sight = options.device_iterations, self.engine.runner, self.engine.sight
        microbatches = self.engine.accumulation.microbatches
        check_bytes(sight.chosen, steps, microbatches, options.replicas, options.observe_bytes)
        self._outfeeds = contextlib.ExitStack()
        self._outfeeds.enter_context(self.engine.delivering())
        # A catalogue of a thousand tensors takes tens of milliseconds, so only if something keeps it.
        info = {} if self.journal.sink is None else describe(self.engine, steps)
        if info and kept is not None:
            info = {**info, "checkpoint": kept.directory}
        self._run = OpenRun(self.journal, info)
        self._run.open()
        weakref.finalize(self, self._run.close).atexit = False  # it closes itself then
        # Over all calls: nobody but the user knows where one training ends and another begins.
        self._guarding = Guarding(self.engine, History())
        # The elements of a call have one fingerprint, so they are dispatched together.
        whole = forward.form.resident or options.fingerprint
        self.portions = Portions(runner, sight, steps, whole)

    def compile(self) -> None:
        """Compile without running anything."""
        self.portions.compile(self.engine.loop_state)
        self._compiled = True

    def run(self, blocks: list[Any], moved: Callable[[], None]) -> dict[tuple[str, str], Part]:
        """Run one execution; returns the emissions of its taps.

        Whatever ends it, the state, the step and the history agree, and a run directory is complete.

        Args:
            blocks: its elements.
            moved: called once the state on the device is no longer what it was.
        """
        engine, options = self.engine, self.options
        self.latest = None
        self._run.open()
        # Of this call alone: `model.history` is that of the latest one.
        self.journal.begin(engine.step, options.microbatches, options.replicas)
        self._guarding.go_on()
        try:
            with recording(self.journal), within_memory(engine, options.device_iterations):
                if not self._compiled:
                    self.compile()  # minutes, which Ctrl-C may end
            with held_back():
                self._advance(blocks, moved)
        except BaseException as error:
            self._run.close(error)
            raise
        return self._parts()

    def _parts(self) -> dict[tuple[str, str], Part]:
        assert self.latest is not None
        return {(part.name, part.kind): part for part in self.latest.parts}

    def _advance(self, blocks: list[Any], moved: Callable[[], None]) -> None:
        """Dispatch an execution and take its results."""
        engine, first, sent = self.engine, self.engine.step, Sent()

        def past(steps: int) -> None:
            engine.step += steps
            moved()

        try:
            numbers = Numbers(engine.seed, first)
            with recording(self.journal), within_memory(engine, self.options.device_iterations):
                self.portions.dispatch(engine.loop_state, numbers, blocks, sent, past)
        finally:
            # Also of a call that failed between its portions: what ran counts.
            if sent.parts:
                self.journal.began(sent.ready, len(sent.parts))
                self._take(first, sent)

    def _take(self, first_step: int, sent: Sent) -> None:
        engine = self.engine
        with within_memory(engine, sent.steps):
            emitted = self.portions.results(sent)
        ticket = engine.ticket(first_step, sent.steps, emitted, sent.ready)
        self.latest = engine.collect(ticket)
        self.journal.add(self.latest)
        self._guarding.check(self.latest)

    @property
    def records(self) -> Records:
        """The records of the latest call."""
        return self.journal.records

    @property
    def catalogue(self) -> Catalogue:
        """Every tensor of the step."""
        return self.engine.sight.catalogue

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state and buffers on the device; not copies."""
        state = self.engine.state
        if not self._automatic:
            return state
        # No parameter of the module: saved files and the host must not see it.
        own = dict(state.params)
        del own[FACTOR]
        return state._replace(params=own)

    def put(self, state: TrainState) -> None:
        """Go on from another state, which is copied."""
        self.engine.state = self._whole(state)

    def _whole(self, state: TrainState) -> TrainState:
        if not self._automatic:
            return state
        factor = state.optimizer_state[FACTOR]
        return state._replace(params={**state.params, FACTOR: factor})

    def twin(self, observe: Observe, state: TrainState, fingerprint: bool) -> Engine:
        """An engine for the same model, with other taps, in this state."""
        twin = twin_of(self.engine, observe, fingerprint)
        twin.state = self._whole(state)
        return twin

    def put_weights(self, values: Mapping[str, Any]) -> None:
        """Replace the values of some parameters and buffers."""
        state = self.state
        leaves = {}
        for name, value in values.items():
            kind = "params" if name in state.params else "model_state"
            like = getattr(state, kind)[name]
            # A copy: the array may share its memory with a tensor of the host.
            leaves[self._leaves[f"{kind}/{name}"]] = jnp.array(value, like.dtype)
        self.engine.replace(leaves)

    def set_hypers(self, values: Tree) -> None:
        """Other learning rates and the like, from the next step on."""
        self.engine.replace({self.hypers: jnp.asarray(values)})

    @property
    def hypers(self) -> int:
        """The number, among the leaves of the state, of learning rates and the like."""
        return self._leaves[_HYPER]

    def close(self) -> None:
        """Close; history and records on disk are complete afterwards."""
        self._run.close()
        self._outfeeds.close()


def as_pipeline(
    loss_fn: Callable[..., Any],
    forward: Forward,
    options: ModelOptions,
    accumulation: Accumulation | int,
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
    # Users may leave numbers of devices out; a mapping counts those that are used.
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
    """The fastest schedule for this number of microbatches."""
    reason = ""
    # The fastest first. Whether one fits the numbers of stages and microbatches, only a plan can
    # say.
    for schedule in (PipelineSchedule.GROUPED, PipelineSchedule.INTERLEAVED):
        try:
            plan(len(mapping), microbatches, schedule, mapping)
        except PlanError as error:
            reason = str(error)
            continue
        return schedule
    note_once(f"The pipeline runs one stage at a time, with the same results. {reason}")
    return PipelineSchedule.SEQUENTIAL
