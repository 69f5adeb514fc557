"""One training step of a pipeline, written as the plain accumulated step that it must equal.

The forward of the model is traced, cut into pieces, and each piece is differentiated on its own. The
program that results is a plain loop over microbatches in which every forward and every backward of a
stage is one equation (`marks.unit`):

    F0  F1  F2  B2  B1  B0  accumulate

Run as it stands it is the plain step, the oracle. The executor runs the same equations on other
devices and at other times.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp

from tailrace.errors import PipelineError
from tailrace.feeds.feed import Feed
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.internals import Tracer, Var
from tailrace.jaxprs.marks import (
    ProgramTrace,
    Tag,
    current_trace,
    inside_loop,
    mark,
    name_values,
    path_name,
    tracing,
)
from tailrace.pipeline.lowering.cut import Cut, cut_function
from tailrace.pipeline.lowering.forward_backward import Halves, call_backward, call_forward, halve
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.forward_step import forward_pass, microbatches_of, stages_of
from tailrace.pipeline.running.pipeline_runner import PipelineRunner
from tailrace.program.in_program import microbatch, tracing_training
from tailrace.program.loops import repeat, repeat_with, whole
from tailrace.program.running.executable import Placement
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.program.step.loss_scale import ScaleState, unscaled
from tailrace.program.step.training_step import Step, TrainState, Yield, share_of
from tailrace.taps.activation_listing import new_listing
from tailrace.taps.probe import probed


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineStep(Step):
    """How a step is computed whose model is cut into stages.

    `loss_fn` is a `tr.Pipeline`.
    """

    @property
    def pipeline(self) -> Pipeline:
        """The stages."""
        return cast(Pipeline, self.loss_fn)

    @property
    def _inputs(self) -> Any:
        return jax.tree.map(jnp.asarray, self.pipeline.inputs)

    def _called(self, params: Any, model_state: Any, batch: Any, inputs: Any) -> Any:
        return self.pipeline(params, model_state, self.has_model_state, batch, inputs)

    def runner(
        self, form: Any, infeed: Feed, placement: Placement, each: Any, kept_from: int
    ) -> PipelineRunner:
        """What runs the steps, each stage on its device."""

        def train(state: TrainState, inputs: Any) -> TrainState:
            return self.loop(state, infeed, inputs=inputs)

        flags = self.keeping.hosted if self.keeping else ()
        return PipelineRunner(
            train,
            form,
            self._inputs,
            self.pipeline,
            placement,
            each,
            hosted=frozenset(kept_from + place for place, flag in enumerate(flags) if flag),
            stash_on_host=self.hold_activations is not None,
        )

    def loop(
        self, state: TrainState, infeed: Feed, length: int = 1, inputs: Any = ()
    ) -> TrainState:
        """`length` steps, fed by `infeed`, all with the same `inputs`."""
        return repeat(length, lambda s: self.accumulated(s, infeed, inputs), state)

    def outputs(self, params: Any, model_state: Any, batch: Any, inputs: Any) -> Any:
        """What the last stage returns for an element."""
        return self.pipeline.outputs(params, model_state, self.has_model_state, batch, inputs)[0]

    def evaluating(
        self, compute: Any, out: OutfeedQueue, infeed: Feed, read: Any, placement: Placement
    ) -> LoopRunner:
        """The same, each stage on its device; on one device if the function has no boundaries."""
        inputs = self._inputs
        with tracing(ProgramTrace(replicas=placement.replicas)) as trace, inside_loop(trace):
            sizes = stages_of(compute, (*read, infeed.spec().tree(), inputs))
        if len(sizes) < 2:
            alone = Placement(placement.replicas)
            bound = lambda params, state, batch, _: compute(params, state, batch, inputs)  # noqa: E731
            return super().evaluating(bound, out, infeed, read, alone)
        count = microbatches_of(self.pipeline, sizes)

        def program(read: Any, inputs: Any) -> Any:
            return forward_pass(compute, read, infeed, out, count, inputs)

        return PipelineRunner(program, read, inputs, self.pipeline, placement, training=False)

    def begin_evaluating(self, runner: LoopRunner, read: Any) -> LoopState:
        """The values that such a runner's dispatches work on."""
        if not isinstance(runner, PipelineRunner):
            return super().begin_evaluating(runner, read)
        return runner.begin(read, self._inputs)

    def accumulated(self, state: TrainState, infeed: Feed, inputs: Any = ()) -> TrainState:
        """A step; every piece accumulates the gradients of the parameters that it uses."""
        named = self._named(state)
        accumulation = self.accumulation
        weighted = accumulation.weight is not None
        with inside_loop(current_trace("tr.Pipeline")):
            model = self.model(named, infeed.spec().tree(), inputs)
        change = getattr(self.optimizer, "each_alone", None)
        uses = (*model.uses, model.idle) if callable(change) else model.uses
        structure = jax.tree.structure(named.params)
        zeros = jax.tree.leaves(accumulation.zeros(named.params))

        def one(carry: Any, batch: Any) -> Any:
            accumulated, model_state, total = carry
            batch = name_values("input", batch)
            before = name_values("buffer", model_state)
            state = named._replace(model_state=before)
            grads, model_state, out = model.run(state, batch, inputs)
            if callable(change):
                grads = model.changed(grads, named.params, change)
            out = out._replace(weight=self._weight(batch))
            self._send(out, named)
            after = total + out.weight if weighted else None
            share = share_of(out.weight, after) if weighted else None
            accumulated = [
                accumulation.add(acc, grad, microbatch(), share)
                for acc, grad in zip(accumulated, grads, strict=True)
            ]
            return accumulated, model_state, after

        total = jnp.float32(0) if weighted else None
        start = ([[zeros[i] for i in used] for used in uses], named.model_state, total)
        accumulated, model_state, total = repeat_with(
            whole, accumulation.microbatches, one, start, infeed
        )
        sums: dict[int, Any] = {}
        for acc, used in zip(accumulated, uses, strict=True):
            for index, grad in zip(used, acc, strict=True):
                sums[index] = sums[index] + grad if index in sums else grad
        grads = jax.tree.unflatten(structure, [sums.get(i, zero) for i, zero in enumerate(zeros)])
        return self.finish(named, grads, model_state, total)

    def model(self, state: TrainState, batch: Any, inputs: Any) -> Model:
        """The model for such elements, cut and differentiated."""
        forward: Any = self.forward
        if self.taps:
            forward = probed(forward, self._is_tapped, new_listing())
        args = (state.params, state.model_state, batch, inputs)
        with tracing_training():
            return Model.trace(forward, args, self.pipeline.sizes, self.pipeline.recompute)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A traced model in halves of pieces, ready to be called microbatch by microbatch.

    Attributes:
        cut: its pieces.
        halves: forward and backward of each piece.
        names: of the parameters, in order.
        structure: of what it returns: loss, model state, aux.
        uses: for each piece, which parameters it has gradients of, by number.
    """

    cut: Cut
    halves: tuple[Halves, ...]
    names: tuple[str, ...]
    structure: Any
    uses: tuple[tuple[int, ...], ...]

    @classmethod
    def trace(cls, forward: Any, args: Any, sizes: tuple[int, ...], recompute: bool | str) -> Model:
        """Trace `forward(params, model_state, batch, inputs)` on the forms of `args`."""
        closes_over = PipelineError(
            "A stage of a pipeline uses a traced value that it was not given: it closes over it. "
            "Pass it through the stages, the dataset, or inputs=."
        )
        try:
            made, structure = cut_function(forward, args)
        except jax.errors.UnexpectedTracerError as error:
            raise closes_over from error
        if any(isinstance(const, Tracer) for const in made.consts.values()):
            raise closes_over
        _check_sizes(made, sizes)
        loss = made.outvars[0]
        if not isinstance(loss, Var):
            raise PipelineError(
                "The loss of a pipeline is computed by its last stage, not constant. Received: a "
                "constant. Return a loss that depends on what the last stage gets."
            )
        paths = jax.tree_util.tree_flatten_with_path(args[0])[0]
        names = tuple(path_name(path) or "params" for path, _ in paths)
        halves = halve(made, len(names), loss, recompute)
        index = {var: i for i, var in enumerate(made.invars[: len(names)])}
        uses = tuple(tuple(index[v] for v in h.wants if v in index) for h in halves)
        return cls(made, halves, names, structure, uses)

    def run(self, state: TrainState, batch: Any, inputs: Any) -> tuple[list[list[Any]], Any, Yield]:
        """Gradients by piece, next model state and yield of one microbatch."""
        leaves = jax.tree.leaves((state.params, state.model_state, batch, inputs))
        values: dict[Any, Any] = dict(zip(self.cut.invars, leaves, strict=True))
        residuals = [call_forward(halves, values) for halves in self.halves]
        loss = self.cut.outvars[0]
        scale = state.loss_scale
        dtype = loss.aval.dtype
        gradients = {loss: jnp.ones((), dtype) if scale is None else scale.scale.astype(dtype)}
        parts: list[list[Any]] = []
        for number in reversed(range(len(self.halves))):
            halves = self.halves[number]
            back: dict[Any, Any] = {}
            if halves.backward is not None:
                back = call_backward(halves, residuals[number], gradients)
            parts.insert(0, self._named(number, back, scale))
            for var, gradient in back.items():
                before = gradients.get(var)
                gradients[var] = gradient if before is None else before + gradient
        loss, after, aux = jax.tree.unflatten(self.structure, self.cut.results(values))
        loss = mark(loss, Tag("value", "loss"))
        return parts, after, Yield(loss, name_values("aux", aux), None)

    @property
    def idle(self) -> tuple[int, ...]:
        """The parameters that no piece has a gradient of, by number."""
        return tuple(i for i in range(len(self.names)) if all(i not in used for used in self.uses))

    def changed(self, grads: list[list[Any]], params: Any, change: Any) -> list[list[Any]]:
        """Gradients by piece, then of `idle`, each made another by `change(name, gradient, value)`."""
        values = jax.tree.leaves(params)
        stages: dict[int, list[int]] = {}
        for halves, used in zip(self.halves, self.uses, strict=True):
            for index in used:
                stages.setdefault(index, []).append(halves.piece.stage)
        for index, several in stages.items():
            if len(several) > 1:
                raise PipelineError(
                    f"The gradient of one microbatch is changed by a function of it, but that of "
                    f"{self.names[index]!r} is the sum of parts that stages {several} make on devices "
                    f"of their own: they meet once a step. Use the weight in one stage only, or "
                    f"change the gradients of a step."
                )
        none = [jnp.zeros_like(values[i]) for i in self.idle]
        return [
            [change(self.names[i], grad, values[i]) for i, grad in zip(used, each, strict=True)]
            for used, each in zip((*self.uses, self.idle), (*grads, none), strict=True)
        ]

    def _named(self, piece: int, back: dict[Any, Any], scale: ScaleState | None) -> list[Any]:
        """The gradients of a piece's parameters; without the scale, marked with their names."""
        grads = []
        for index in self.uses[piece]:
            shared = sum(index in used for used in self.uses) > 1
            # A weight that several stages use has a gradient in each; their sum exists once a step.
            stage = self.halves[piece].piece.stage
            name = self.names[index] + (f"@{stage}" if shared else "")
            tag = Tag("value", f"grad/{name}", payload=stage)
            grad = back[self.cut.invars[index]]
            if scale is None:
                grads.append(mark(grad, tag))
            else:
                mark(unscaled(grad, scale), tag)
                grads.append(grad)
        return grads


def _check_sizes(made: Cut, sizes: tuple[int, ...]) -> None:
    if len(made.sizes) < 2:
        raise PipelineError(
            "A pipeline has at least two stages. Received: one. Give a list of at least two stage "
            "functions, or mark where stages end with tr.stage_boundary."
        )
    if sizes and made.sizes != sizes:
        raise PipelineError(
            f"This pipeline was given {list(sizes)} functions for its stages, but cutting at "
            f"tr.stage_boundary finds {list(made.sizes)}. Do not call tr.stage_boundary inside a "
            f"stage."
        )
