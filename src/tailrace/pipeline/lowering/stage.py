"""A stage of a pipeline as data, and its calls in a plain step.

`forward_backward.py` makes a `Stage` once, from the traced model. Two interpreters read it:

* the plain step (`pipeline_step.py`, `running/forward_step.py`) calls the stages one after the other,
  for each microbatch: this is the oracle, and the program in which taps have their positions;
* the executor (`jobs.py`, `running/emit_ticks.py`) runs the same calls by the plan, each on its device.

A call is one equation, `marks.unit`, that names its unit. This holds for everything a step does with a
microbatch, not only for stages: accumulation, names and results are calls `in_unit(...)`. So the
executor never has to guess where an equation belongs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.errors import PipelineError
from tailrace.jaxprs.internals import Atom, ClosedJaxpr, Var, nbytes, variables
from tailrace.jaxprs.marks import unit

Who = tuple[str, int, int]
"""A unit: "F" or "B", stage, member."""

AHEAD: Who = ("A", -1, 0)
"""The unit of values that depend on all elements so far, but on no stage (a sum of weights)."""


class Residual(NamedTuple):
    """An operand of a backward: an input of the forward (read directly), or an output."""

    source: Literal["input", "output"]
    place: int


# Hashed by identity: stages are keys of dicts, and equal jaxprs of two stages are still two stages.
@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """One stage, or one member of a group of concurrent stages.

    `inputs` to `wants` name values by the variables of the traced model: equal variables of two stages
    are one value, which is sent from one to the other.

    Attributes:
        number: the index of the stage.
        member: the index of the member; 0 if the stage is not a group.
        inputs: live-ins of the forward, in the order of its operands.
        outputs: live-outs of the forward, first among its results.
        forward: takes `inputs`; returns `outputs`, then the residuals that are not among them.
        backward: takes `residuals`, then the gradients of `sends`; returns those of `wants`. None if
            nothing in the stage has a gradient.
        residuals: the origin of each operand of the backward.
        sends: the outputs through which gradients come back.
        wants: the inputs whose gradients the backward computes.
        params: the parameters among `wants`, by number.
    """

    number: int
    member: int
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    forward: ClosedJaxpr
    backward: ClosedJaxpr | None = None
    residuals: tuple[Residual, ...] = ()
    sends: tuple[Var, ...] = ()
    wants: tuple[Var, ...] = ()
    params: tuple[int, ...] = ()

    @property
    def forward_unit(self) -> Who:
        """The unit of its forward."""
        return "F", self.number, self.member

    @property
    def backward_unit(self) -> Who:
        """The unit of its backward."""
        return "B", self.number, self.member

    def stashed(self, everywhere: frozenset[Var]) -> int:
        """The bytes of the residuals of a microbatch, without the values in `everywhere`."""
        made = {r.place for r in self.residuals if r.source == "output"}
        given = {self.inputs[r.place] for r in self.residuals if r.source == "input"}
        kept = [self.forward.jaxpr.outvars[i] for i in made]
        kept += [var for var in given if var not in everywhere]
        return sum(nbytes(var.aval) for var in kept)

    def call_forward(self, values: dict[Any, Any]) -> list[Any]:
        """Call the forward; adds its outputs to `values`, returns the residuals."""
        inputs = [values[v] for v in self.inputs]
        outputs = unit(self.forward, inputs, *self.forward_unit)
        # Not strict: after the outputs come the residuals, which no other stage may read.
        values.update(zip(self.outputs, outputs, strict=False))
        return [(inputs if r.source == "input" else outputs)[r.place] for r in self.residuals]

    def call_backward(self, residuals: Sequence[Any], gradients: dict[Any, Any]) -> dict[Any, Any]:
        """Call the backward, if there is one; the gradients of `wants`, by variable."""
        if self.backward is None:
            return {}
        back = [
            gradients[v] if v in gradients else jnp.zeros(v.aval.shape, v.aval.dtype)  # type: ignore[attr-defined]
            for v in self.sends
        ]
        made = unit(self.backward, [*residuals, *back], *self.backward_unit)
        return dict(zip(self.wants, made, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """A model in stages, in the order in which a microbatch passes them.

    Attributes:
        each: the stages; members of a group follow each other.
        invars: the variables of the model's inputs: parameters, model state, element, inputs.
        outvars: the variables (or literals) of its results.
        structure: of the results.
        state: those of `invars` that are model state.
        after: those of `outvars` that are the next model state; empty if it does not change.
        consts: values of variables that are constants of the model.
    """

    each: tuple[Stage, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Any, ...]
    structure: Any
    state: tuple[Var, ...]
    after: tuple[Any, ...]
    consts: Mapping[Any, Any]

    def start(self, *args: Tree) -> dict[Any, Any]:
        """The initial values of a microbatch, by variable: the model's arguments and constants."""
        return {**self.consts, **dict(zip(self.invars, jax.tree.leaves(args), strict=True))}

    @property
    def results(self) -> Tree:
        """The variables (or literals) of the results, in their structure."""
        return jax.tree.unflatten(self.structure, self.outvars)

    @functools.cached_property
    def homes(self) -> dict[Any, Who]:
        """The first forward that has a value: computes it or, for model state, reads or writes it."""
        # Computed values first: model state that only a later stage writes has its home there.
        homes: dict[Any, Who] = {
            var: stage.forward_unit for stage in self.each for var in stage.outputs
        }
        pairs = zip(self.state, self.after, strict=False)
        written = {var: after for var, after in pairs if isinstance(after, Var)}
        for var in self.state:
            readers = (stage.forward_unit for stage in self.each if var in stage.inputs)
            home = next(readers, homes.get(written.get(var, var)))
            if home is not None:
                homes[var] = home
        return homes

    def home(self, values: Iterable[Any]) -> Who:
        """The first forward that can have all of these values (variables or literals).

        A value of no stage (the element, a constant) is in all units: the first one is chosen.
        """
        homes = {self.homes[v] for v in variables(values) if v in self.homes}
        if not homes:
            return self.each[0].forward_unit
        # A value is passed on from stage to stage, so the last of their stages can have all of them.
        stage = max(number for _, number, _ in homes)
        last = {home for home in homes if home[1] == stage}
        if len(last) == 1:
            return last.pop()
        # Members of a group run at the same time, on several devices: what uses the values of
        # several of them must come after the group.
        if stage < self.each[-1].number:
            return "F", stage + 1, 0
        raise PipelineError(
            f"Members of the group of concurrent stages {stage} make values that are used together, "
            f"and no stage comes after them to do that. Add a stage behind the group."
        )

    def next_state(self, carried: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
        """The leaves of the model state after a microbatch.

        Args:
            carried: those before it, as the loop over microbatches carries them.
            values: of the variables.
        """
        found = []
        for var, given, old in zip(self.after, self.state, carried, strict=True):
            if var is given:
                found.append(old)  # carried under the same variable: nothing is written
            elif isinstance(var, Var) and var in self.homes and var not in self.state:
                found.append(values[var])
            else:  # a constant, a part of the element, another leaf: copied, so that a unit owns it
                found.append(
                    in_unit(self.home([given, var]), functools.partial(value_in, values, var))
                )
        return found


def value_in(values: dict[Any, Any], var: Atom) -> Any:
    """The value of a variable or a literal, as an array."""
    return jnp.asarray(values[var] if isinstance(var, Var) else var.val)


def in_unit(who: Who, function: Callable[[], Any]) -> Tree:
    """Compute `function()` as a part of a unit: one equation that names it.

    The function closes over the values that it uses. They become the equation's operands, so that the
    executor sees what has to come from other units.
    """
    # Traced separately, a function's closed-over values become its constants.
    program, form = jax.make_jaxpr(function, return_shape=True)()
    jaxpr = program.jaxpr.replace(constvars=[], invars=list(program.jaxpr.constvars))
    made = unit(ClosedJaxpr(jaxpr, []), program.consts, *who)
    return jax.tree.unflatten(jax.tree.structure(form), made)
