"""A model in stages, called as the plain step calls it: all forwards, then all backwards.

In: a traced forward that returns loss, next model state and aux. Out: `Model`, whose `run` is one
microbatch through its stages. Everything around the calls of stages (sums of gradients, names) is a
call too, in the unit that has its operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.errors import PipelineError
from tailrace.jaxprs.internals import Atom, Tracer
from tailrace.jaxprs.marks import Tag, mark, path_name
from tailrace.pipeline.lowering.cut import Cut, cut_function
from tailrace.pipeline.lowering.forward_backward import training_stages
from tailrace.pipeline.lowering.stage import Stage, Stages, Who, in_unit, value_in
from tailrace.program.step.training_step import TrainState


class Microbatch(NamedTuple):
    """The results of one microbatch.

    Attributes:
        loss: the loss.
        aux: the other results of the model.
        model_state: the next model state.
        gradients: the gradients of parameters, by stage, then by the parameter's number.
    """

    loss: Any
    aux: Any
    model_state: Any
    gradients: dict[Stage, dict[int, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model in stages, ready to be called microbatch by microbatch.

    Attributes:
        stages: its stages; their results are loss, model state and aux.
        names: the names of the parameters, in order.
    """

    stages: Stages
    names: tuple[str, ...]

    @classmethod
    def trace(
        cls, forward: Callable[..., Tree], args: Tree, sizes: tuple[int, ...], recompute: bool | str
    ) -> Model:
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
        paths = jax.tree_util.tree_flatten_with_path(args[0])[0]
        names = tuple(path_name(path) or "params" for path, _ in paths)
        return cls(training_stages(made, structure, recompute), names)

    @property
    def loss(self) -> Any:
        """The variable of the loss."""
        return self.stages.outvars[0]

    def run(self, state: TrainState, batch: Tree, inputs: Tree) -> Microbatch:
        """One microbatch through all stages, forward and backward."""
        stages = self.stages
        named = self._named_state(state.model_state)
        values = stages.start(state.params, named, batch, inputs)
        # Each stage finds its inputs among the outputs of all earlier stages: skips need no special
        # case.
        residuals = [stage.call_forward(values) for stage in stages.each]
        dtype = self.loss.aval.dtype
        scale = state.loss_scale
        # The backward is linear in its seed: scaling it there scales all gradients, and the loss
        # itself stays unscaled for taps, history and outfeeds.
        seed = jnp.ones((), dtype) if scale is None else scale.scale.astype(dtype)
        gradients = self._backward(seed, residuals)
        _, _, aux = stages.results
        aux = jax.tree_util.tree_map_with_path(
            lambda path, var: self._named(f"aux/{path_name(path) or '0'}", var, values), aux
        )
        # The carried state, not the marked one: a leaf that does not change keeps its variable.
        carried, structure = jax.tree.flatten(state.model_state)
        after = jax.tree.unflatten(structure, stages.next_state(carried, values))
        return Microbatch(self._named("loss", self.loss, values), aux, after, gradients)

    def _backward(self, seed: jax.Array, residuals: Sequence[Any]) -> dict[Stage, dict[int, Any]]:
        """Call all backwards, the last stage's first; the gradients of parameters."""
        stages = self.stages.each
        numbers = {var: i for i, var in enumerate(self.stages.invars[: len(self.names)])}
        gradients: dict[Any, Any] = {self.loss: seed}
        homes: dict[Any, Who] = {}
        found: dict[Stage, dict[int, Any]] = {}
        # All users of a value are later stages: when a stage is reached, the gradients of its
        # outputs are complete.
        for stage, kept in zip(reversed(stages), reversed(residuals), strict=True):
            mine = found[stage] = {}
            for var, gradient in stage.call_backward(kept, gradients).items():
                if var in numbers:  # each stage accumulates its own part
                    mine[numbers[var]] = gradient
                elif var in homes:
                    # Added as early as possible, so that one value is sent, not several.
                    homes[var] = _meeting(homes[var], stage.backward_unit)
                    pair = gradients[var], gradient
                    gradients[var] = in_unit(homes[var], lambda pair=pair: pair[0] + pair[1])
                else:
                    gradients[var], homes[var] = gradient, stage.backward_unit
        return found

    def _named(self, name: str, var: Atom, values: dict[Any, Any]) -> Any:
        """A result, marked with its name in the unit that computes it."""
        home = self.stages.home([var])
        return in_unit(home, lambda: mark(value_in(values, var), Tag("value", name)))

    def _named_state(self, model_state: Tree) -> Any:
        """The model state, marked with its names in the unit that uses it first."""
        # `state` has the variables of the leaves, in the order in which the tree is flattened.
        homes = iter(self.stages.state)

        def named(path: Any, leaf: object) -> Any:
            tag = Tag("value", f"buffer/{path_name(path) or '0'}")
            return in_unit(self.stages.home([next(homes)]), lambda: mark(leaf, tag))

        return jax.tree_util.tree_map_with_path(named, model_state)

    def users(self, index: int) -> list[int]:
        """The stages that have gradients of a parameter."""
        return [stage.number for stage in self.stages.each if index in stage.params]

    @property
    def idle(self) -> tuple[int, ...]:
        """The parameters that no stage has a gradient of, by number."""
        return tuple(index for index in range(len(self.names)) if not self.users(index))

    def gradient_name(self, index: int, stage: Stage) -> str:
        """The name of a stage's gradient of a parameter.

        A weight that several stages use has a gradient in each; they are summed once per step.
        """
        return self.names[index] + (f"@{stage.number}" if len(self.users(index)) > 1 else "")

    def check_alone(self) -> None:
        """Refuse weights of several stages if the gradients of microbatches are changed."""
        for index in [index for stage in self.stages.each for index in stage.params]:
            if len(several := self.users(index)) > 1:
                raise PipelineError(
                    f"The gradient of one microbatch is changed by a function of it, but that of "
                    f"{self.names[index]!r} is the sum of parts that stages {several} make on separate "
                    f"devices, and they are added up once per step. Use the weight in one stage only, "
                    f"or change the gradients of a step."
                )


def _meeting(one: Who, other: Who) -> Who:
    """The first backward that can have the values of two others."""
    if one == other or one[1] != other[1]:
        return min(one, other, key=lambda who: who[1])
    # Members of a group run at the same time, on several devices: their values meet after it.
    return "B", one[1] - 1, 0


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
