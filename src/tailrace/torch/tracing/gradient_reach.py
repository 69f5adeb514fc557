"""Which parameters a loss depends on, in a way that has a gradient."""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.jaxprs.control import jit_of
from tailrace.jaxprs.internals import Atom, Jaxpr, Var, variables
from tailrace.jaxprs.operations import stops_gradient
from tailrace.jaxprs.stretches import is_float


def inputs_with_gradient(jaxpr: Jaxpr, results: Iterable[Atom]) -> set[Var]:
    """The inputs of a program from which a differentiable path leads to one of its `results`.

    As in PyTorch, `detach` and integers end a path, and a derivative that is zero does not. Programs
    inside of an equation other than a plain call count as paths from all inputs to all outputs.
    """
    wanted = set(variables(results))
    # Backwards, once: every equation comes after those whose results it uses.
    for eqn in reversed(jaxpr.eqns):
        if stops_gradient(eqn) or wanted.isdisjoint(eqn.outvars):
            continue
        sources = list(eqn.invars)
        # Into calls: many of jnp's functions are one, and would connect every input to every output.
        call = jit_of(eqn)
        if call is not None:
            inner = call.program.jaxpr
            pairs = zip(inner.outvars, eqn.outvars, strict=True)
            reached = inputs_with_gradient(inner, [one for one, out in pairs if out in wanted])
            pairs = zip(inner.invars, eqn.invars, strict=True)
            sources = [var for one, var in pairs if one in reached]
        wanted.update(filter(is_float, variables(sources)))
    return wanted.intersection(jaxpr.invars)
