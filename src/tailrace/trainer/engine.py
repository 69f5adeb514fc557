"""The engine: a model's training state on the devices, and the compiled programs that advance it.

    engine.use(dataset)                 selects the program: one per shape of elements
    ticket = engine.dispatch(length)    dispatches steps; does not wait for them
    results = engine.collect(ticket)    their results, on the host
    engine.state                        parameters, optimizer state, model state

`tr.Trainer`, the Keras front end, the PyTorch front end and the IPU programs each drive one with a
different loop. An engine knows nothing of epochs, callbacks, histories or files. The file is long
because it is one thing: every method works on the same state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.errors import OptionError, ProgramError
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.feed import Feed, Staged
from tailrace.feeds.infeed import InfeedQueue
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.marks import path_name
from tailrace.pipeline.lowering.pipeline_step import PipelineStep
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.pipeline_runner import PipelineRunner
from tailrace.pipeline.schedule.plan import Plan
from tailrace.program.memory.first_state import FirstState
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState, Numbers
from tailrace.program.step.accumulation import Accumulation
from tailrace.program.step.loss_scale import NAME as SCALE
from tailrace.program.step.loss_scale import note_collapse
from tailrace.program.step.training_step import Step, TrainState
from tailrace.program.tracing.tap_selection import Sight, look
from tailrace.program.tracing.trace import trace_program
from tailrace.records.history import split_emission
from tailrace.records.records import take_records
from tailrace.spans.span import counter, is_traced, waiting_for
from tailrace.taps.activation_listing import listing_activations
from tailrace.taps.catalogue import Catalogue
from tailrace.taps.tap import GradientDigest, StopOnNonfinite, Tap, parse_taps
from tailrace.trainer.checks import check_model, check_numbers, check_replica_state
from tailrace.trainer.costs.memory_plan import on_host, placement_of, plan_memory
from tailrace.trainer.costs.memory_shortage import ended_within_memory, within_memory
from tailrace.trainer.executions import Results, Ticket
from tailrace.trainer.observation.nonfinite_guard import bad_steps, diagnose, first_bad_step
from tailrace.trainer.sentinel import WATCHED, Sentinel, check_share
from tailrace.trainer.state_digests import StateDigests


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
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        params: Any,
        *,
        accumulation: Accumulation | int = 1,
        replicas: int | None = 1,
        model_state: Any = None,
        replica_state: str | Callable[[str], str] = "mean",
        offload_optimizer_state: bool | None = False,
        shard_optimizer_state: bool = False,
        offload_activations: bool = False,
        seed: int = 0,
        observe: Any = (),
        loss_scale: Any = None,
        precision: Any = None,
        fingerprint: bool = False,
        sentinel: float | None = None,
    ) -> None:
        fingerprint = fingerprint or sentinel is not None
        given = locals()
        other = ("self", "params", "model_state", "observe", "sentinel")
        self.again = partial(Engine, **{k: v for k, v in given.items() if k not in other})
        """Makes another engine for the same model, from parameters, model state and taps."""
        self.pipeline = loss_fn if isinstance(loss_fn, Pipeline) else None
        accumulation, params = check_model(
            loss_fn, optimizer, params, model_state, self.pipeline, accumulation
        )
        self.seed, self.step = seed, 0
        self.taps = parse_taps(observe)
        self.accumulation = Accumulation.of(accumulation)
        self.placement = placement_of(self.pipeline, replicas)
        self.scalars = OutfeedQueue()
        self.optimizer = optimizer
        params, model_state = jax.tree.map(jnp.asarray, (params, model_state))
        first = FirstState(optimizer.init, params)
        self.memory = plan_memory(
            first.forms,
            self.placement,
            self.taps,
            share=shard_optimizer_state,
            offload_state=offload_optimizer_state,
            offload_activations=offload_activations,
            microbatches=self.accumulation.microbatches,
            pipelined=self.pipeline is not None,
        )
        if fingerprint:
            self.memory = self.memory.with_fingerprints(params)
        watched = [WATCHED] if check_share(sentinel) and self.pipeline is None else []
        self.step_function = (Step if self.pipeline is None else PipelineStep)(
            loss_fn,
            optimizer,
            self.accumulation,
            model_state is not None,
            self.scalars,
            check_replica_state(replica_state),
            (*self.taps, *watched),
            self.memory.keeping,
            self.memory.held_activations,
            *check_numbers(loss_scale, precision, self.taps, params),
        )
        scaling = self.step_function.loss_scale
        scale = scaling.init() if scaling is not None else None
        forms = jax.eval_shape(lambda: (params, model_state, scale))
        self.form = TrainState(forms[0], self.memory.optimizer_forms(first.forms), *forms[1:])
        digests = StateDigests(self.form, self.memory.keeping)
        self.digests = digests if fingerprint else None
        self.sentinel = (
            Sentinel(check_share(sentinel), digests, seed) if sentinel is not None else None
        )
        self._state: TrainState | None = self._first_state(params, first, model_state, scale)
        self._runners: dict[ElementSpec, LoopRunner] = {}
        self._sights: dict[ElementSpec, Sight] = {}
        self._active: tuple[LoopRunner, LoopState] | None = None
        self._left: tuple[Any, InfeedQueue] | None = None

    # -- the state ------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """The state on the devices, not copied: the next execution overwrites it."""
        state = self._held()
        keeping = self.memory.keeping
        if keeping is None:
            return state
        return state._replace(optimizer_state=keeping.whole(state.optimizer_state, self.placement))

    @state.setter
    def state(self, state: TrainState) -> None:
        self.replace(dict(enumerate(jax.tree.leaves(state))))

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step; None without loss scaling."""
        scale = self._held().loss_scale
        return None if scale is None else float(self.placement.readable(scale.scale))

    def copied(self, tree: Any) -> Any:
        """Copies of parts of the state that this process can read alone."""
        return jax.tree.map(lambda x: jnp.copy(self.placement.readable(x)), tree)

    def replace(self, leaves: Mapping[int, Any]) -> None:
        """Replace leaves of the state, by their index in its tree; values are copied."""
        if self.sentinel is not None:
            self.sentinel.expects(None)
        keeping = self.memory.keeping
        if keeping is not None:
            first = len(jax.tree.leaves(self.form.params))
            leaves = keeping.hold_some(leaves, first, self.placement)
        if self._active is not None:
            runner, state = self._active
            runner.replace(state, leaves)
            return
        now, structure = jax.tree.flatten(self._state)
        self._state = jax.tree.unflatten(
            structure, [leaves.get(number, value) for number, value in enumerate(now)]
        )

    def own_of_replicas(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The possible shapes of leaves that differ per replica: one for all, or one for each."""
        replicas = self.placement.replicas
        paths = jax.tree_util.tree_flatten_with_path(self.form)[0]
        return {
            path_name(path): (form.shape, (replicas, *form.shape))
            for (path, form), own in zip(paths, self._own_of_replicas(), strict=True)
            if own and replicas > 1
        }

    def read(self) -> tuple[Any, Any]:
        """Parameters and model state for a forward pass: one value for all replicas."""
        state = self._held()
        model_state = state.model_state
        shares = self.step_function.share_state is True
        if not shares and self._active is not None and self.placement.replicas > 1:
            model_state = jax.tree.map(_merged, model_state, self.form.model_state)
        return state.params, model_state

    # -- the program ----------------------------------------------------------------------------

    def use(self, dataset: Any) -> Feed:
        """Use elements of this dataset (or feed) from now on; returns the feed of the program.

        There is one program per shape of elements. The state moves to the current one.
        """
        runner, feed = self.program_for(dataset)
        inputs = () if self.pipeline is None else self.pipeline.inputs
        if self._active is None or self._active[0] is not runner:
            self._active = (runner, runner.begin(self._held(), inputs))
            self._state = None
        elif isinstance(runner, PipelineRunner):
            runner.read(self._active[1], inputs)
        runner.keep_elements = self.guarded or self.digests is not None
        return feed

    def swap(self, runner: LoopRunner) -> None:
        """Replace the current program by `runner`, made by `LoopRunner.observing`."""
        self._active = (runner, self.loop_state)

    def let_go(self, dataset: Any, feed: Feed) -> None:
        """Release a dataset. Prefetched elements of a one-shot iterator are kept."""
        feed.rest()
        self._left = None
        if isinstance(feed, InfeedQueue) and feed is not dataset and not feed.restartable:
            self._left = (dataset, feed)

    @property
    def has_program(self) -> bool:
        """Whether there is a program yet."""
        return self._active is not None

    @property
    def runner(self) -> LoopRunner:
        """The current program."""
        return self._in_use()[0]

    @property
    def sight(self) -> Sight:
        """The tensors that taps select in the current program."""
        return self._sights[self.runner.infeeds[0].spec()]

    @property
    def loop_state(self) -> LoopState:
        """The state of the current program."""
        return self._in_use()[1]

    @property
    def guard(self) -> StopOnNonfinite | None:
        """The guard against values that are not finite; of several, one that stops."""
        found = [tap for tap in self.taps if isinstance(tap, StopOnNonfinite)]
        return min(found, key=lambda tap: tap.skips, default=None)

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
        for runner in reversed(self._runners.values()):
            if isinstance(runner, PipelineRunner):
                return runner.plan
        return None

    @property
    def executions(self) -> int:
        """The number of dispatches so far."""
        return sum(runner.executions for runner in self._runners.values())

    @property
    def elements_per_step(self) -> int:
        """The number of elements per step: microbatches x replicas of this process."""
        return self.accumulation.microbatches * self.placement.local_replicas

    def set_inputs(self, inputs: Sequence[Any]) -> None:
        """Change the `inputs` of a pipeline, without compiling again."""
        if self.pipeline is None:
            raise OptionError(
                "inputs belong to a pipeline: tr.Pipeline(..., inputs=...). Received: inputs for a "
                "trainer without one. Leave them out, or put them into the dataset."
            )
        self.pipeline.set_inputs(inputs)

    def program_for(self, dataset: Any) -> tuple[LoopRunner, Feed]:
        """The program for elements of the dataset's shape, and its feed set to that dataset."""
        fresh = dataset if isinstance(dataset, Feed) else InfeedQueue(dataset)
        fresh.bind_replicas(self.placement.replicas)
        if self._left is not None and self._left[0] is dataset and isinstance(fresh, InfeedQueue):
            fresh.adopt(self._left[1])  # a one-shot iterator: prefetched elements come first
        spec = fresh.spec()
        if spec in self._runners:
            runner = self._runners[spec]
            feed = runner.infeeds[0]
            if isinstance(fresh, InfeedQueue) and feed is not fresh:
                feed.adopt(fresh)
            return runner, feed
        first = len(jax.tree.leaves(self.form.params))
        with listing_activations() as found:
            runner = self.step_function.runner(
                self.form, fresh, self.placement, self._own_of_replicas(), first
            )
        runner.purpose = "training, another form of elements" if self._runners else "training"
        self.placement = runner.placement  # a pipeline's is known once its stages are
        taps = self.taps if self.digests is None else [*self.taps, GradientDigest()]
        self._sights[spec] = look(runner.traced, taps, found, runner.stage_of)
        runner.wanted = self._sights[spec].wanted
        if WATCHED in self.step_function.taps and self.sentinel is not None:
            self.sentinel.watch(runner, look(runner.traced, [WATCHED], found, runner.stage_of))
        self._runners[spec] = runner
        return runner, fresh

    def tensors(self, example: Any = None) -> Catalogue:
        """Every tensor of the step by name, for elements like `example` or the latest ones."""
        if example is None and not self._sights:
            raise ProgramError(
                "The step has tensors once the form of its batches is known. Give an element of "
                "the dataset: trainer.tensors(example), or call it after a fit."
            )
        # With marks on all of them, so that exactly those are listed that a tap would find.
        everything = (Tap("*"),)
        step = self.step_function.tapped(everything)
        spec = next(reversed(self._sights)) if example is None else None
        infeed = InfeedQueue([example]) if spec is None else self._runners[spec].infeeds[0]

        def train(state: TrainState, _: Any) -> TrainState:
            return step.loop(state, infeed)

        with listing_activations() as found:
            traced = trace_program(train, (self.form, ()), self.placement.replicas)
        if self.pipeline is None:
            return look(traced, everything, found).catalogue
        runner = self._runners[spec] if spec is not None else self.program_for([example])[0]
        return look(traced, everything, found, runner.stage_of).catalogue

    # -- executions -----------------------------------------------------------------------------

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """A context in which the user's outfeeds receive values of the current program."""
        outfeeds = self.runner.traced.outfeeds
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
        runner, state = self._in_use()
        numbers = Numbers(self.seed, self.step)

        def run(
            runner: LoopRunner,
            state: LoopState,
            block: Any = block,
            following: int | None = following,
        ) -> Any:
            return runner.dispatch(state, length, numbers, following, period, block)

        with within_memory(self, length):
            if self.sentinel is None:
                return self.dispatched(length, *run(runner, state))
            emitted, ready, watch = self.sentinel.dispatch(runner, state, self.step, run)
        ticket = self.dispatched(length, emitted, ready)
        self.sentinel.expects(ticket.digests[0])
        return dataclasses.replace(ticket, watch=watch)

    def dispatched(self, length: int, emitted: dict[Any, Any], ready: Any) -> Ticket:
        """The ticket of an execution that was dispatched in portions, starting at this step."""
        scalars: dict[str, Any] = {}
        if self.scalars in emitted:
            sent = self._sent(emitted)
            scalars = {"loss": sent["loss"], **sent["aux"]}
        runner, state = self._in_use()
        feed, digests, origin = next(iter(runner.infeeds), None), None, runner.origin
        if self.digests is not None:
            digests = self.digests.take(runner, state, runner.taken.get(feed) if feed else None)
            origin = origin if self.guarded else None
        reading = None if feed is None else feed.reading
        ticket = Ticket(self.step, length, emitted, scalars, ready, origin, digests, reading)
        self.step += length
        return ticket

    def collect(self, ticket: Ticket) -> Results:
        """The results of an execution; waits for its end. Tickets are collected in order.

        If a guard stopped it, the state is that before the bad step, later tickets are void, and
        `failure` of the results has the reason.
        """
        with ended_within_memory(self, ticket), waiting_for(ticket.ready, "outfeed copy"):
            results = self._collected(ticket)
        if is_traced() and results.steps:
            counter("loss", results.scalars["loss"][-1].mean())
        return results

    def _collected(self, ticket: Ticket) -> Results:
        runner, state = self._in_use()
        replicas, count = self.placement.replicas, self.accumulation.microbatches
        emitted = dict(ticket.emitted)
        parts = take_records(
            emitted,
            self.sight.chosen,
            first_step=ticket.first_step,
            steps=ticket.steps,
            replicas=replicas,
            period=self.sight.period,
        )
        sent = self._sent(emitted)
        emitted.pop(self.scalars)
        runner.traced.deliver(emitted)
        values = {"loss": sent["loss"], **sent["aux"]}
        arrays = {name: split_emission(v, count, replicas) for name, v in values.items()}
        weights = sent["weight"]
        if weights is not None:
            weights = split_emission(weights, count, replicas).astype("float64")
        scaling = self.step_function.loss_scale
        if scaling is not None and not scaling.is_fixed:
            note_collapse(float(arrays[SCALE][-1, 0, 0]))
        skips = self.guard is not None and self.guard.skips
        bad = first_bad_step(emitted, replicas) if self.guarded and not skips else None
        if skips:
            shape = arrays["loss"].shape
            arrays["skipped"] = np.broadcast_to(bad_steps(emitted, replicas)[:, None, None], shape)
        marks, elements, kept, failure = {}, None, ticket.steps, None
        if self.digests is not None:
            marks, elements = self.digests.of(ticket, arrays["loss"])
        if self.sentinel is not None and bad is None:
            again = ticket.watch.emitted
            losses = again and split_emission(self._sent(again)["loss"], count, replicas)
            self.sentinel.check(ticket, marks, arrays["loss"], losses)
        if bad is not None:
            kept, marks = bad[0], {}  # the gradients belong to a step that does not count
            arrays = {name: values[:kept] for name, values in arrays.items()}
            weights = weights[:kept] if weights is not None else None
            elements = elements[:kept] if elements is not None else None
            # The state is recomputed here, after the fact: keeping the old one in every step would cost
            # a read and a write of all of it.
            assert ticket.origin is not None
            runner.rewind(state, ticket.origin, kept)
            self.step = ticket.first_step + kept
            failure = diagnose(
                runner,
                state,
                ticket.origin.elements[runner.infeeds[0]],
                bad,
                first_step=ticket.first_step,
                seed=self.seed,
                microbatches=count,
            )
            per_step, feed = count * self.placement.local_replicas, runner.infeeds[0]
            rows = slice(kept * per_step, (kept + 1) * per_step)
            block = [leaf[rows] for leaf in ticket.origin.elements[feed].host]
            failure.elements = feed.elements_of(block)
        first, reading = ticket.first_step, ticket.reading
        if reading is not None:
            reading = (*reading[:2], reading[2] // ticket.steps * kept)
        return Results(first, kept, parts, arrays, weights, failure, marks, elements, reading)

    # -- inside ---------------------------------------------------------------------------------

    def _sent(self, emitted: Mapping[Any, Any]) -> Any:
        """The losses, metrics and weights among a program's emissions."""
        structure = self.runner.traced.outfeeds[self.scalars].structure
        return jax.tree.unflatten(structure, emitted[self.scalars].value)

    def _in_use(self) -> tuple[LoopRunner, LoopState]:
        if self._active is None:
            raise ProgramError("An engine runs the program of a dataset. Call engine.use first.")
        return self._active

    def _held(self) -> TrainState:
        """The state as it is held: possibly offloaded or sharded."""
        if self._active is not None:
            runner, state = self._active
            return runner.carried(state)
        assert self._state is not None
        return self._state

    def _first_state(
        self, params: Any, first: FirstState, model_state: Any, scale: Any
    ) -> TrainState:
        # A pipeline's state is on the host until it is known which device holds what.
        place = self.placement.own if self.pipeline is None else on_host
        keeping = self.memory.keeping
        if keeping is None:
            leaves = [place(leaf) for leaf in first.leaves()]
            made = jax.tree.unflatten(jax.tree.structure(first.forms), leaves)
        else:
            made = keeping.hold(first.leaves(), self.placement)
        params, model_state, scale = jax.tree.map(place, (params, model_state, scale))
        return TrainState(params, made, model_state, scale)

    def _own_of_replicas(self) -> list[bool]:
        """For each leaf of the state, whether it differs per replica."""
        each = [
            path[0].name == "model_state" and not self.step_function.shares(path_name(path[1:]))
            for path, _ in jax.tree_util.tree_flatten_with_path(self.form)[0]
        ]
        keeping = self.memory.keeping
        if self.pipeline is not None and keeping is not None:
            first = len(jax.tree.leaves(self.form.params))
            for place, shared in enumerate(keeping.shared, start=first):
                each[place] |= shared
        return each


def _merged(value: Any, form: Any) -> Any:
    """One value from those of all replicas: their mean, or the first if a mean is undefined."""
    if value.ndim == len(form.shape):
        return value
    return value.mean(axis=0) if jnp.issubdtype(value.dtype, jnp.inexact) else value[0]
