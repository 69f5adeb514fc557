"""The engine: a model's training state on the devices, and the compiled programs that advance it.

    engine.use(dataset)                 selects the program: one per shape of elements
    ticket = engine.dispatch(length)    dispatches steps; does not wait for them
    results = engine.collect(ticket)    their results, on the host
    engine.state                        parameters, optimizer state, model state

`tr.Trainer`, the Keras front end, the PyTorch front end and the IPU programs each drive one with a
different loop. An engine knows nothing of epochs, callbacks, histories or files. It joins four parts:
the step (`Step`), its programs (`TrainingPrograms`), the state (`HeldState`) and the reading of
results (`Collector`). Long, and one thing: each of its methods is one of these four's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.checks import check_seed
from tailrace.base.spans.span import counter, is_traced, waiting_for
from tailrace.base.trees import Tree
from tailrace.devices.devices import Device, available
from tailrace.devices.placed import check_placed
from tailrace.devices.shardings import ModelSharding
from tailrace.errors import OptionError
from tailrace.feeds.feed import Feed, Staged
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.marks import path_name
from tailrace.pipeline.lowering.pipeline_step import PipelineStep
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.schedule.plan import Plan
from tailrace.program.compiling.build import DEFAULT, Build
from tailrace.program.memory.first_state import FirstState
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState, Numbers
from tailrace.program.running.placement import Placement
from tailrace.program.step.accumulation import Accumulation
from tailrace.program.step.loss_scale import LossScale
from tailrace.program.step.own_step import OwnStep, StepFunction
from tailrace.program.step.plain_step import PlainStep
from tailrace.program.step.step_sharding import StepSharding
from tailrace.program.step.train_state import TrainState
from tailrace.program.step.training_step import Step
from tailrace.program.step.update_rule import Optimizer
from tailrace.program.tracing.tap_selection import Sight
from tailrace.taps.catalogue import Catalogue
from tailrace.taps.tap import GradientDigest, Observe, parse_taps
from tailrace.trainer.checks import (
    check_guards,
    check_model,
    check_numbers,
    check_replica_state,
)
from tailrace.trainer.collector import Collector
from tailrace.trainer.costs.memory_plan import placement_of, plan_memory
from tailrace.trainer.costs.memory_shortage import ended_within_memory, within_memory
from tailrace.trainer.executions import Results, Ticket
from tailrace.trainer.held_state import begin_own_state, begin_state, leaves_of_replicas
from tailrace.trainer.observation.nonfinite_guard import stopped
from tailrace.trainer.optax_kinds import needs_of, promoting
from tailrace.trainer.sentinel import WATCHED, Sentinel, check_share
from tailrace.trainer.state_digests import StateDigests
from tailrace.trainer.training_programs import TrainingPrograms


class Engine:
    """Trains one model: holds its state, and runs its steps in dispatches of any length.

    Args:
        loss_fn: as for `tr.Trainer`, like all other arguments.
        optimizer: an optax transformation, or an object with `init` and `apply`.
        params: the parameters to start from.
        accumulation: the number of microbatches per step.
        replicas: the number of replicas.
        model_state: state that the model updates itself.
        replica_state: how it is combined over replicas.
        offload_optimizer_state: whether to keep optimizer state in host memory between updates.
        shard_optimizer_state: whether to shard it over replicas.
        offload_activations: whether to keep activations in host memory until the backward pass.
        seed: the seed of the keys of `tr.key()`.
        observe: taps.
        loss_scale: the rule of loss scaling.
        precision: the dtype of the loss function's computation.
        fingerprint: whether to compute fingerprints of executions.
        sentinel: the fraction of executions that run twice and are compared; None for none.
        sends_arrays: whether results have the small arrays of aux.
        build: how its programs are rewritten and compiled.
        sharding: how the model is sharded over a mesh; None for one that is not.
        device: the device of a model that is not sharded; None for the first.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer,
        params: Tree,
        *,
        accumulation: Accumulation | int = 1,
        replicas: int | None = 1,
        model_state: Tree = None,
        replica_state: str | Callable[[str], str] = "mean",
        offload_optimizer_state: bool | None = False,
        shard_optimizer_state: bool = False,
        offload_activations: bool = False,
        seed: int = 0,
        observe: Observe = (),
        loss_scale: LossScale | float | str | None = None,
        precision: jax.typing.DTypeLike | None = None,
        fingerprint: bool = False,
        sentinel: float | None = None,
        sends_arrays: bool = False,
        build: Build = DEFAULT,
        sharding: ModelSharding | None = None,
        device: Device | None = None,
    ) -> None:
        fingerprint = fingerprint or sentinel is not None
        # A sentinel's runs are compared by fingerprints. A rerun of past steps needs none of its own.
        # Before any other local exists: these are the arguments, and nothing else.
        given = locals()
        # Arguments, not attributes: a rerun must get what the user gave. `accumulation`, `seed` and
        # others are replaced by parsed values below.
        other = ("self", "params", "model_state", "observe", "sentinel")
        self.again = partial(Engine, **{k: v for k, v in given.items() if k not in other})
        """Makes another engine for the same model, from parameters, model state and taps."""
        self.pipeline = loss_fn if isinstance(loss_fn, Pipeline) else None
        accumulation, params = check_model(
            loss_fn, optimizer, params, model_state, self.pipeline, accumulation
        )
        self.seed, self.step, self.optimizer = check_seed(seed), 0, optimizer
        self.build = build
        self.taps = parse_taps(observe)
        self.guard = check_guards(self.taps)
        """The guards against values that are not finite, as one."""
        self.accumulation = Accumulation.of(accumulation)
        # Losses leave through an outfeed like those of users, but only the collector reads it.
        self.scalars = OutfeedQueue()
        placement = placement_of(self.pipeline, replicas, sharding, device)
        pipelined = self.pipeline is not None
        shardings = sharding and sharding.of_model(params, model_state)
        own = isinstance(loss_fn, StepFunction)
        self._check_placed(params, model_state, placement)
        if shardings is None:
            params, model_state = jax.tree.map(jnp.asarray, (params, model_state))
        else:  # from the host, each device gets its part alone
            params, model_state = jax.tree.map(jax.device_put, (params, model_state), shardings)
        # Shapes now, values later, leaf by leaf: state that the plan shards or offloads may be larger
        # than one device.
        microbatches, replicated = self.accumulation.microbatches, placement.replicas
        needs = needs_of(optimizer, params, microbatches, replicated, pipelined=pipelined)
        first = FirstState(promoting(optimizer, params, needs), params, sharding)
        # Before the step: where state is held decides how the step reads and writes it.
        self.memory = plan_memory(
            first.forms,
            placement,
            self.taps,
            share=shard_optimizer_state,
            offload_state=offload_optimizer_state,
            offload_activations=offload_activations,
            microbatches=self.accumulation.microbatches,
            pipelined=pipelined,
        )
        keeping, share = self.memory.keeping, check_share(sentinel)
        self.step_function: Step = (OwnStep if own else PipelineStep if pipelined else PlainStep)(
            loss_fn,
            optimizer,
            self.accumulation,
            model_state is not None,
            self.scalars,
            check_replica_state(replica_state),
            # Taps mark activations before differentiation, so a step must know all of them when it
            # is traced. A pipeline's sentinel compares leaves of the state, and needs no marks.
            (*self.taps, WATCHED) if share and not pipelined else tuple(self.taps),
            keeping,
            self.memory.held_activations,
            *check_numbers(loss_scale, precision, self.taps, params),
            needs,
            sends_arrays,
            sharding and StepSharding.of(sharding, params, first.forms, model_state),
        )
        scaling = self.step_function.loss_scale
        values = (params, first, model_state, scaling.init() if scaling is not None else None)
        self._state = (
            begin_own_state(model_state, placement)
            if own
            else begin_state(*values, placement, keeping, pipelined=pipelined)
        )
        self.form = self._state.form
        # One object for both: a sentinel compares the digests that fingerprints are made of.
        digests = StateDigests(self.form, keeping)
        self.digests = digests if fingerprint else None
        self.sentinel = Sentinel(share, digests, self.seed) if sentinel is not None else None
        self._programs, self._collector = self._parts(placement)

    def _check_placed(self, params: Tree, model_state: Tree, placement: Placement) -> None:
        """Refuse values that are sharded, or on other devices, which they would leave silently."""
        here = placement.devices if self.pipeline is None else available()
        check_placed("params", params, here, placement.sharding)
        name = "model_state" if len(jax.tree.leaves(params)) else "state"
        check_placed(name, model_state, here, placement.sharding)

    def _parts(self, placement: Placement) -> tuple[TrainingPrograms, Collector]:
        """What advances the state, and what reads the results."""
        step, taps = self.step_function, self.taps
        # Gradients exist only inside the step: unlike the state, they cannot be digested
        # afterwards. Not one of `self.taps`, which are the user's.
        if self.digests is not None and not isinstance(step, OwnStep):  # of that, none are known
            taps = [*taps, GradientDigest()]
        pipelined = self.pipeline is not None
        each = leaves_of_replicas(self.form, step.shares, step.keeping, pipelined=pipelined)
        programs = TrainingPrograms(
            step, self.form, each, placement, taps, self.digests, self.sentinel, self.build
        )
        count, scaling = self.accumulation.microbatches, step.loss_scale
        collector = Collector(self.scalars, count, scaling, self.guard, self.digests, self.sentinel)
        return programs, collector

    # -- the state ------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """The state on the devices, not copied: the next execution overwrites it."""
        return self._state.whole(self.placement)

    @state.setter
    def state(self, state: TrainState) -> None:
        self._check_placed(state.params, state[1:] or state, self.placement)
        self.replace(dict(enumerate(jax.tree.leaves(state))))

    @property
    def held_state(self) -> TrainState:
        """The state as it is held: optimizer state may be sharded or offloaded."""
        return self._state.held

    @property
    def placement(self) -> Placement:
        """The devices."""
        return self._programs.placement

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step; None without loss scaling."""
        scale = self._state.held.loss_scale
        return None if scale is None else float(self.placement.readable(scale.scale))

    def copied(self, tree: Tree) -> Any:
        """Copies of parts of the state that this process can read alone."""
        sharding = self.placement.sharding
        if sharding is not None:
            return jax.tree.map(lambda x: sharding.shown(jnp.copy(x)), tree)
        return jax.tree.map(lambda x: jnp.copy(self.placement.readable(x)), tree)

    def placed(self, params: Tree) -> Any:
        """Other parameters, where a program reads those of the state: sharded like them."""
        if self.placement.sharding is None:
            return params
        return jax.tree.map(
            lambda x, own: jax.device_put(x, own.sharding), params, self.state.params
        )

    def replace(self, leaves: Mapping[int, Any]) -> None:
        """Replace leaves of the state, by their index in its tree; values are copied."""
        # The next execution finds a state that no execution left: the check at rest would report it
        # as corruption.
        if self.sentinel is not None:
            self.sentinel.expects(None)
        self._state.replace(leaves, self.placement)

    def own_of_replicas(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The possible shapes of leaves that differ per replica: one for all, or one for each."""
        replicas = self.placement.replicas
        paths = jax.tree_util.tree_flatten_with_path(self.form)[0]
        return {
            path_name(path): (form.shape, (replicas, *form.shape))
            for (path, form), own in zip(paths, self._programs.each, strict=True)
            if own and replicas > 1
        }

    def read(self) -> tuple[Any, Any]:
        """Parameters and model state for a forward pass: one value for all replicas."""
        state = self._state.held
        if self.step_function.share_state is True or self.placement.replicas == 1:
            return state.params, state.model_state
        return state.params, self._state.merged_model_state()

    # -- the program ----------------------------------------------------------------------------

    def use(self, dataset: object, timeout_s: float | None = None, epoch: int = 0) -> Feed:
        """Use elements of this dataset (or feed) from now on; returns the feed of the program.

        There is one program per shape of elements, which the first one tells: a dataset has `timeout_s`
        seconds for it. A shuffled `tr.batches` begins with the order of `epoch`. The state moves to the
        current program.
        """
        runner, feed = self._programs.find(dataset, timeout_s, epoch)
        inputs = () if self.pipeline is None else self.pipeline.inputs
        self._state.move_to(runner, inputs, self._programs.form)
        self.form = self._programs.form
        # A guard runs a bad execution again up to its bad step, a sentinel all of it; where the program
        # computes no digests, they are taken of the elements on the device.
        apart = self.digests is not None and runner.closing is None
        runner.keep_elements = self.guarded or self.sentinel is not None or apart
        return feed

    def program_for(self, dataset: object) -> tuple[LoopRunner, Feed]:
        """The program for elements of the dataset's shape, and its feed set to that dataset."""
        return self._programs.find(dataset)

    def swap(self, runner: LoopRunner) -> None:
        """Replace the current program by `runner`, made by `LoopRunner.observing`."""
        self._state.swap(runner)

    def let_go(self, dataset: object, feed: Feed) -> None:
        """Release a dataset. Prefetched elements of a one-shot iterator are kept."""
        self._programs.let_go(dataset, feed)

    def tensors(self, example: Tree = None) -> Catalogue:
        """Every tensor of the step by name, for elements like `example` or the latest ones."""
        return self._programs.tensors(example)

    @property
    def has_program(self) -> bool:
        """Whether there is a program yet."""
        return self._state.in_use

    @property
    def runner(self) -> LoopRunner:
        """The current program."""
        return self._state.active[0]

    @property
    def loop_state(self) -> LoopState:
        """The state of the current program."""
        return self._state.active[1]

    @property
    def sight(self) -> Sight:
        """The tensors that taps select in the current program."""
        return self._programs.sight(self.runner)

    @property
    def guarded(self) -> bool:
        """Whether there is a guard against values that are not finite."""
        return self.guard is not None

    @property
    def live(self) -> bool:
        """Whether results are needed while executions run."""
        return any(getattr(tap, "live", False) for tap in self.taps)

    @property
    def plan(self) -> Plan | None:
        """The plan of the pipeline, once the shape of its elements is known; None without one."""
        return self._programs.plan

    @property
    def executions(self) -> int:
        """The number of dispatches so far."""
        return self._programs.executions

    @property
    def elements_per_step(self) -> int:
        """The number of elements per step: microbatches x replicas of this process."""
        return self.accumulation.microbatches * self.placement.local_replicas

    @property
    def built(self) -> dict[str, Any]:
        """How its program is built, ready for JSON."""
        return self.runner.built if self.has_program else self.build.recorded({})

    def build_as_recorded(self, note: object) -> None:
        """Build programs as a checkpoint says; see `Build.as_recorded`."""
        self.build_with(self.build.as_recorded(note))

    def build_with(self, build: Build) -> None:
        """Build programs in this way; those that were built otherwise are built again."""
        self.build = build
        self._programs.build_with(build)

    def set_inputs(self, inputs: Sequence[Any]) -> None:
        """Change the `inputs` of a pipeline, without compiling again."""
        if self.pipeline is None:
            raise OptionError(
                "inputs belong to a pipeline: tr.Pipeline(..., inputs=...). Received: inputs for a "
                "trainer without one. Leave them out, or put them into the dataset."
            )
        self.pipeline.set_inputs(inputs)

    # -- executions -----------------------------------------------------------------------------

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """A context in which the user's outfeeds receive values of the current program."""
        outfeeds = self.runner.traced.outfeeds
        # All are checked before any begins: a reader that waits for a program must not wait for a
        # refused one.
        for queue, out in outfeeds.items():
            queue.check_fits(out.structure, out.shapes)
        for queue in outfeeds:
            queue.begin()
        try:
            yield
        finally:
            for queue in outfeeds:
                queue.end()

    def dispatch(
        self,
        length: int,
        *,
        block: Staged | None = None,
        following: int | None = None,
        period: int | None = None,
    ) -> Ticket:
        """Dispatch an execution of `length` steps; does not wait for it.

        Args:
            length: the number of steps.
            block: their elements, if the caller has them; otherwise they come from the dataset.
            following: the number of steps of the next execution (0 for none, None for the same), to
                prefetch its elements.
            period: the period of periodic taps; None for that of the taps.
        """
        period = self.sight.period if period is None else period
        runner, state = self._state.active
        # Arguments of the program, not constants in it: another seed or step does not compile
        # again.
        numbers = Numbers(self.seed, self.step)

        def run(
            runner: LoopRunner,
            state: LoopState,
            block: Staged | None = block,
            following: int | None = following,
        ) -> Any:
            return runner.dispatch(state, length, numbers, following, period, block)

        # Dispatching allocates the outputs: this is where a device runs out of memory, not in
        # `collect`.
        with within_memory(self, length):
            if self.sentinel is None:
                return self.dispatched(length, *run(runner, state))
            emitted, ready, watch = self.sentinel.dispatch(runner, state, self.step, run)
        ticket = self.dispatched(length, emitted, ready)
        # The state must be found as this execution leaves it; digests are still on the device.
        self.sentinel.expects(ticket.digests[0])
        return dataclasses.replace(ticket, watch=watch)

    def dispatch_next(self, elements: tuple[Any, ...]) -> tuple[Sequence[Any], Any]:
        """Dispatch one more step, directly after an execution of one step; does not wait for it.

        Only if `runner.repeats`, and if nothing comes out but the scalars. Returns their leaves, as
        `Collector.sent` names them, and an array that is ready afterwards.
        """
        runner, state = self._state.active
        try:
            emitted, ready = runner.dispatch_next(state, elements)
        except jax.errors.JaxRuntimeError:
            # Entered only after the failure: this path is the fast one of single steps, which would
            # pay for the context in each call.
            with within_memory(self, 1):
                raise
        self.step += 1
        return emitted[self.scalars].value, ready

    def dispatched(self, length: int, emitted: dict[Any, Any], ready: jax.Array) -> Ticket:
        """The ticket of an execution that starts at this step, which moves on."""
        ticket = self.ticket(self.step, length, emitted, ready)
        self.step += length
        return ticket

    def ticket(
        self, first_step: int, length: int, emitted: dict[Any, Any], ready: jax.Array
    ) -> Ticket:
        """The ticket of the latest execution, however it was dispatched."""
        runner, state = self._state.active
        scalars = self._collector.scalars_on_device(runner, emitted)
        feed, digests, origin = next(iter(runner.infeeds), None), None, runner.origin
        if self.digests is not None:
            digests = self.digests.after(runner, state, emitted)
            # Elements are kept not only for a guard; without one nothing is ever rewound.
            origin = origin if self.guarded else None
        reading = None if feed is None else feed.reading
        return Ticket(first_step, length, emitted, scalars, ready, origin, digests, reading)

    def collect(self, ticket: Ticket) -> Results:
        """The results of an execution; waits for its end. Tickets are collected in order.

        If a guard stopped it, the state is that before the bad step, later tickets are void, and
        `failure` of the results has the reason.
        """
        runner, state = self._state.active
        with ended_within_memory(self, ticket), waiting_for(ticket.ready, "outfeed copy"):
            bad, failure = self._collector.bad_step(ticket, runner), None
            if bad is not None:
                ticket, failure = stopped(
                    ticket,
                    bad,
                    runner=runner,
                    state=state,
                    seed=self.seed,
                    microbatches=self.accumulation.microbatches,
                    digests=self.digests,
                    trained=self.form.trained[0],
                )
                # Executions dispatched after the bad one went on from its state: they do not count.
                self.step = ticket.first_step + ticket.steps
                if self.sentinel is not None:  # it expects the state that the whole execution left
                    self.sentinel.expects(None)
            results = self._collector.results(ticket, runner, self.sight)
            results = dataclasses.replace(results, failure=failure or results.failure)
        if is_traced() and results.steps:
            counter("loss", results.losses[-1])
        return results
