"""What a trainer holds: its state, the programs that advance it, and where both lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.errors import OptionError, ProgramError, TailraceError
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.infeed import InfeedQueue
from tailrace.jaxprs.marks import path_name
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.pipeline_engine import PipelineRunner
from tailrace.pipeline.schedule.plan import Plan
from tailrace.program.memory.optimizer_state import StateKeeping
from tailrace.program.running.engine import LoopRunner
from tailrace.program.running.executable import Placement
from tailrace.program.step.accumulation import Accumulation
from tailrace.program.step.training_step import Step, TrainState
from tailrace.program.tracing.tap_selection import Sight, look
from tailrace.program.tracing.trace import trace_program
from tailrace.taps.catalogue import Catalogue, Entry
from tailrace.taps.tap import Tap
from tailrace.training.explain import flops_of


class Programs:
    """The state of a training, in the program that runs at the moment or on its own.

    One program exists for each form of elements; the state moves into the one that runs. Made, and
    used, by `tr.Trainer`.
    """

    accumulation: Accumulation
    pipeline: Pipeline | None
    placement: Placement
    taps: list[Any]
    stopping: bool
    _step: Step
    _form: Any
    _keeping: StateKeeping | None
    _state: TrainState | None
    _runners: dict[ElementSpec, LoopRunner]
    _sights: dict[ElementSpec, Sight]
    _active: tuple[LoopRunner, dict[Any, Any]] | None
    _left: tuple[Any, InfeedQueue] | None

    # -- what there is --------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state and model state: copies, which training leaves alone."""
        return self._copied(self.current())

    @property
    def params(self) -> Any:
        """The parameters as they are now: a copy."""
        params = self._copied(self._current().params)
        return params if self.pipeline is None else self.pipeline.tie(params)

    @property
    def model_state(self) -> Any:
        """The model state as it is now: a copy."""
        return self._copied(self._current().model_state)

    def current(self) -> TrainState:
        """The state as it lies on the devices, not copied: the next execution overwrites it."""
        state = self._current()
        if self._keeping is None:
            return state
        return state._replace(
            optimizer_state=self._keeping.whole(state.optimizer_state, self.placement)
        )

    def replace(self, leaves: Mapping[int, Any]) -> None:
        """Replace leaves of the state, by their number in its tree; values are copied."""
        if self._keeping is not None:
            first = len(jax.tree.leaves(self._form.params))
            leaves = self._keeping.hold_some(leaves, first, self.placement)
        if self._active is not None:
            runner, known = self._active
            runner.replace(known, leaves)
            return
        now, structure = jax.tree.flatten(self._state)
        self._state = jax.tree.unflatten(
            structure, [leaves.get(number, value) for number, value in enumerate(now)]
        )

    @property
    def plan(self) -> Plan | None:
        """The plan of the pipeline, once the form of its elements is known; None without one."""
        for runner in reversed(self._runners.values()):
            if isinstance(runner, PipelineRunner):
                return runner.plan
        return None

    @property
    def replicas(self) -> int:
        """How many copies train side by side."""
        return self.placement.replicas

    @property
    def executions(self) -> int:
        """How many dispatches training has made so far."""
        return sum(runner.executions for runner in self._runners.values())

    @property
    def elements_per_step(self) -> int:
        """How many elements of the dataset one step takes: microbatches x replicas.

        With several processes each has a dataset of its own, and counts its own replicas.
        """
        return self.accumulation.microbatches * self.placement.local_replicas

    def set_inputs(self, inputs: Sequence[Any]) -> None:
        """Other values for the `inputs` of a pipeline; nothing is compiled again."""
        if self.pipeline is None:
            raise OptionError(
                "inputs belong to a pipeline: tr.Pipeline(..., inputs=...). Received: inputs for a "
                "trainer without one. Leave them out, or put them into the dataset."
            )
        self.pipeline.set_inputs(inputs)

    def stop(self) -> None:
        """End the current fit after the execution that runs now."""
        self.stopping = True

    def tensors(self, example: Any = None) -> Catalogue:
        """Every tensor of the step by name, as `observe=` selects them.

        Args:
            example: one element of the dataset; not needed after a fit.
        """
        if example is None:
            if not self._sights:
                raise ProgramError(
                    "The step has tensors once the form of its batches is known. Give an element of "
                    "the dataset: trainer.tensors(example), or call it after a fit."
                )
            spec = next(reversed(self._sights))
        else:
            spec = InfeedQueue([example]).spec()
        found: list[Entry] = []
        # All of them marked, so that only those are listed that a tap would find.
        step = dataclasses.replace(self._step, activations=found, taps=(Tap("*"),))
        infeed = InfeedQueue([example]) if example is not None else self._runners[spec].infeeds[0]

        def train(state: TrainState, _: Any) -> TrainState:
            return step.loop(state, infeed)

        traced = trace_program(train, (self._form, ()), self.replicas)
        if self.pipeline is None:
            return look(traced, step.taps, found).catalogue
        runner = self._runners[spec] if example is None else self._runner_for([example])[0]
        return look(traced, step.taps, found, runner.stage_of).catalogue

    # -- inside ---------------------------------------------------------------------------------

    def _flops_of_update(self, state: TrainState) -> float:
        optimizer = self._step.optimizer
        update = jax.jit(getattr(optimizer, "apply", None) or optimizer.update)
        held = self._keeping.forms if self._keeping else state.optimizer_state
        try:
            return flops_of(update.lower(state.params, held, state.params))
        except TailraceError:  # it means something inside a program only: small beside the rest
            return 0.0

    def _current(self) -> TrainState:
        if self._active is not None:
            runner, known = self._active
            return runner.carried(known)
        assert self._state is not None
        return self._state

    def _read(self) -> tuple[Any, Any]:
        """Parameters and model state, one for all replicas."""
        state = self._current()
        model_state = state.model_state
        if self._step.share_state is not True and self._active is not None and self.replicas > 1:
            forms = self._form.model_state
            model_state = jax.tree.map(_merged, model_state, forms)
        return state.params, model_state

    def _runner_for(self, dataset: Any) -> tuple[LoopRunner, InfeedQueue]:
        """The program for elements of the dataset's form, and its infeed set to that dataset."""
        fresh = dataset if isinstance(dataset, InfeedQueue) else InfeedQueue(dataset)
        fresh.bind_replicas(self.replicas)
        if self._left is not None and self._left[0] is dataset:
            fresh.adopt(self._left[1])  # a one-shot iterator: what was read ahead comes first
        spec = fresh.spec()
        if spec in self._runners:
            runner = self._runners[spec]
            infeed = runner.infeeds[0]
            if infeed is not fresh:
                infeed.adopt(fresh)
            return runner, infeed
        each = [
            path[0].name == "model_state" and not self._step.shares(path_name(path[1:]))
            for path, _ in jax.tree_util.tree_flatten_with_path(self._form)[0]
        ]
        first = len(jax.tree.leaves(self._form.params))
        if self.pipeline is not None and self._keeping is not None:
            for place, shared in enumerate(self._keeping.shared, start=first):
                each[place] |= shared
        runner = self._step.runner(self._form, fresh, self.placement, each, first)
        self.placement = runner.placement  # of a pipeline, known once its stages are
        self._sights[spec] = look(
            runner.traced, self.taps, self._step.activations or (), runner.stage_of
        )
        runner.wanted = self._sights[spec].wanted
        self._runners[spec] = runner
        return runner, fresh

    def _activate(self, runner: LoopRunner) -> dict[Any, Any]:
        """Move the state into the program that will run."""
        inputs = () if self.pipeline is None else self.pipeline.inputs
        if self._active is None or self._active[0] is not runner:
            self._active = (runner, runner.begin(self._current(), inputs))
            self._state = None
        elif isinstance(runner, PipelineRunner):
            runner.read(self._active[1], inputs)
        return self._active[1]

    def _copied(self, tree: Any) -> Any:
        """Copies that this process can read on its own."""
        return jax.tree.map(lambda x: jnp.copy(self.placement.readable(x)), tree)


def _merged(value: Any, form: Any) -> Any:
    """One value of those of all replicas: their mean, or the first where there is no mean."""
    if value.ndim == len(form.shape):
        return value
    return value.mean(axis=0) if jnp.issubdtype(value.dtype, jnp.inexact) else value[0]


def on_host(value: Any) -> Any:
    """A copy in the host's memory; a random key stays what it is."""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jnp.copy(value) if is_key else np.array(value)
