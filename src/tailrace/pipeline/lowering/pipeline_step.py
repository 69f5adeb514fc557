"""One training step of a pipeline, written as the plain accumulated step that it must equal.

The model is made into stages (`stage.py`) once. The step is then a plain loop over microbatches, with a
call for each forward and backward, and calls for what is around them:

    F0  F1  F2  B2  B1  B0  results  accumulate

Each call names the unit it belongs to. Run in this order it is the plain step, the oracle. The executor
runs the same calls on other devices and at other times.

Two rules hold for all code here. Everything that a microbatch computes is in a unit, or depends only
on the element, the counters and constants of the loop (such equations run in every unit that needs
them). And a unit uses only values of units before it in the order above.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.feeds.feed import Feed
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.marks import (
    ProgramTrace,
    Tag,
    current_trace,
    inside_loop,
    mark,
    name_values,
    tracing,
)
from tailrace.pipeline.lowering.stage import AHEAD, Stage, in_unit
from tailrace.pipeline.lowering.staged_model import Microbatch, Model
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.forward_step import forward_pass, microbatches_of, stages_of
from tailrace.pipeline.running.pipeline_runner import PipelineRunner
from tailrace.program.in_program import microbatch, tracing_training
from tailrace.program.loops import repeat, repeat_with, whole
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.program.running.placement import Placement
from tailrace.program.step.loss_scale import unscaled
from tailrace.program.step.train_state import TrainState
from tailrace.program.step.training_step import Compute, Step, Yield, share_of
from tailrace.program.step.whole_step import evaluating_whole
from tailrace.taps.activation_listing import new_listing
from tailrace.taps.probe import probed


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineStep(Step):
    """A step whose model is cut into stages; `loss_fn` is a `tr.Pipeline`."""

    @property
    def pipeline(self) -> Pipeline:
        """The stages."""
        return cast(Pipeline, self.loss_fn)

    @property
    def _inputs(self) -> Tree:
        # Read each time: `fit(inputs=...)` replaces them, as arguments of the same compiled program.
        return jax.tree.map(jnp.asarray, self.pipeline.inputs)

    def _called(self, params: Tree, model_state: Tree, batch: Tree, inputs: Tree) -> Tree:
        return self.pipeline(params, model_state, self.has_model_state, batch, inputs)

    def runner(
        self,
        form: TrainState,
        infeed: Feed,
        placement: Placement,
        each: Sequence[bool],
        kept_from: int,
    ) -> PipelineRunner:
        """A runner of steps, each stage on its device."""

        def train(state: TrainState, inputs: Tree) -> TrainState:
            return self.loop(state, infeed, inputs=inputs)

        flags = self.keeping.hosted if self.keeping else ()
        return PipelineRunner(
            train,
            form,
            self._inputs,
            self.pipeline,
            placement,
            each,
            # The flags are of the optimizer state; the runner counts leaves of the whole training
            # state.
            hosted=frozenset(kept_from + place for place, flag in enumerate(flags) if flag),
            stash_on_host=self.hold_activations is not None,
        )

    def loop(
        self, state: TrainState, infeed: Feed, length: int = 1, inputs: Tree = ()
    ) -> TrainState:
        """`length` steps, fed by `infeed`, all with the same `inputs`."""
        return repeat(length, lambda s: self.accumulated(s, infeed, inputs), state)

    def outputs(self, params: Tree, model_state: Tree, batch: Tree, inputs: Tree) -> Tree:
        """The result of the last stage for an element."""
        return self.pipeline.outputs(params, model_state, self.has_model_state, batch, inputs)[0]

    def evaluating(
        self, compute: Compute, out: OutfeedQueue, infeed: Feed, read: Tree, placement: Placement
    ) -> LoopRunner:
        """A runner over the devices of stages; on one device if the function has no boundaries."""
        inputs = self._inputs
        with tracing(ProgramTrace(replicas=placement.replicas)) as trace, inside_loop(trace):
            sizes = stages_of(compute, (*read, infeed.spec().tree(), inputs))
        if len(sizes) < 2:
            # The metric may be a function without boundaries; a pipeline of one stage cannot be
            # planned.
            alone = Placement(placement.replicas)
            bound = lambda params, state, batch, _: compute(params, state, batch, inputs)  # noqa: E731
            return evaluating_whole(bound, out, infeed, read, alone)
        count = microbatches_of(self.pipeline, sizes)

        def program(read: Tree, inputs: Tree) -> Any:
            return forward_pass(compute, read, infeed, out, count, inputs)

        return PipelineRunner(program, read, inputs, self.pipeline, placement, training=False)

    def begin_evaluating(self, runner: LoopRunner, read: Tree) -> LoopState:
        """The state for dispatches of such a runner."""
        if not isinstance(runner, PipelineRunner):
            return runner.begin((), read)
        return runner.begin(read, self._inputs)

    def accumulated(self, state: TrainState, infeed: Feed, inputs: Tree = ()) -> TrainState:
        """A step; every stage accumulates the gradients of the parameters that it uses."""
        named = self.named(state)
        accumulation = self.accumulation
        weighted = accumulation.weight is not None
        # Traced outside of the loop over microbatches for use inside it: the model's keys and
        # counters must count that loop.
        with inside_loop(current_trace("tr.Pipeline")):
            model = self.model(named, infeed.spec().tree(), inputs)
        params = self._params_by_stage(model)
        structure = jax.tree.structure(named.params)
        zeros = jax.tree.leaves(accumulation.zeros(named.params))

        def one(carry: Tree, batch: Tree) -> Any:
            accumulated, model_state, total = carry
            batch = name_values("input", batch)
            weight = self.weight(batch)
            after = share = None
            if weight is not None:
                # The share of a microbatch depends on all microbatches before it, and on no stage.
                # It is computed ahead, so that no device waits for it.
                after, share = in_unit(AHEAD, functools.partial(_share_so_far, total, weight))
            run = model.run(named._replace(model_state=model_state), batch, inputs)
            self._send_from(model, run, weight, named)

            def add(stage: Stage, used: tuple[int, ...], acc: list[Any]) -> list[Any]:
                grads = self._gradients(model, stage, used, run, named)
                return accumulation.add(acc, grads, microbatch(), share)

            # One call for each stage, in its backward's unit: the accumulators of a stage then
            # never leave its device.
            added = [
                in_unit(stage.backward_unit, functools.partial(add, stage, used, acc))
                if used
                else []
                for stage, used, acc in zip(model.stages.each, params, accumulated, strict=True)
            ]
            return added, run.model_state, after

        total = jnp.float32(0) if weighted else None
        start = ([[zeros[i] for i in used] for used in params], named.model_state, total)
        accumulated, model_state, total = repeat_with(
            whole, accumulation.microbatches, one, start, infeed
        )
        # A weight of several stages has an accumulator in each; they are summed here, once per step.
        sums: dict[int, Any] = {}
        for acc, used in zip(accumulated, params, strict=True):
            for index, grad in zip(used, acc, strict=True):
                sums[index] = sums[index] + grad if index in sums else grad
        # A parameter that no stage differentiates has a zero gradient; the optimizer may still
        # change it (weight decay).
        grads = jax.tree.unflatten(structure, [sums.get(i, zero) for i, zero in enumerate(zeros)])
        return self.finish(named, grads, model_state, total)

    def model(self, state: TrainState, batch: Tree, inputs: Tree) -> Model:
        """The model for such elements, cut and differentiated."""
        forward: Any = self.forward
        if self.taps:
            forward = probed(forward, self.is_tapped, new_listing())
        args = (state.params, state.model_state, batch, inputs)
        with tracing_training():
            return Model.trace(forward, args, self.pipeline.sizes, self.pipeline.recompute)

    def _send_from(
        self, model: Model, run: Microbatch, weight: jax.Array | None, state: TrainState
    ) -> None:
        """Send out loss and scalars, in the unit that computes the last of them."""
        _, _, aux = model.stages.results
        # Only scalars are sent: the rest of aux stays on the device that computes it.
        scalars = [var for var in jax.tree.leaves(aux) if var.aval.shape == ()]
        home = model.stages.home([model.loss, *scalars])
        in_unit(home, lambda: self.send(Yield(run.loss, run.aux, weight), state))

    def _params_by_stage(self, model: Model) -> list[tuple[int, ...]]:
        """The parameters whose gradients each stage accumulates."""
        params = [stage.params for stage in model.stages.each]
        if callable(getattr(self.optimizer, "each_alone", None)):
            model.check_alone()
            # The update of an optimizer for a zero gradient need not be zero.
            params[0] += model.idle
        return params

    def _gradients(
        self, model: Model, stage: Stage, used: tuple[int, ...], run: Microbatch, state: TrainState
    ) -> list[Any]:
        """The gradients that a stage accumulates, named."""
        values = jax.tree.leaves(state.params)
        change = getattr(self.optimizer, "each_alone", None)
        grads = []
        for index in used:
            grad = run.gradients[stage].get(index)
            if grad is None:
                grad = jnp.zeros_like(values[index])
            else:
                tag = Tag("value", f"grad/{model.gradient_name(index, stage)}")
                if state.loss_scale is None:
                    grad = mark(grad, tag)
                else:  # observers see it without the scale
                    mark(unscaled(grad, state.loss_scale), tag)
            grads.append(
                change(model.names[index], grad, values[index]) if callable(change) else grad
            )
        return grads


def _share_so_far(total: jax.Array, weight: jax.Array) -> tuple[Any, Any]:
    """The weight of all microbatches so far, and the share of this one in it."""
    after = total + weight
    return after, share_of(weight, after)
