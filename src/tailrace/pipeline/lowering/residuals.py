"""Which values a forward leaves for its backward, and which the backward computes again.

JAX's derivative of a function keeps whatever its rules ask for: for a GELU several values of the same
size, for a layer in bfloat16 its cast weights. In one program XLA computes them again where that is
cheaper. Between the two units of a stage they would be written to the stash and read from it, for
every microbatch in flight. So here it is decided what to keep:

* what depends on parameters alone is never kept,
* results of elementwise operations, casts, broadcasts and reshapes are recomputed if fewer bytes are
  kept that way: the minimum cut between expensive values and what the backward reads.

Expensive operations (matrix products, convolutions, reductions, random numbers, loops) never run
twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from tailrace.jaxprs.internals import ClosedJaxpr, JaxprEqn, Var, form_of, nbytes, variables
from tailrace.jaxprs.operations import is_arithmetic, is_rearrangement
from tailrace.jaxprs.own_equations import ambient_in, is_mark
from tailrace.jaxprs.stretches import bound, makers, results_of, run
from tailrace.pipeline.lowering.minimum_cut import minimum_cut

_EACH = 1024
"""Bytes added to the size of each value: separate operations write and read it."""

_LONGEST = 32
"""The longest chain of arithmetic operations to recompute; beyond that, reading a value is cheaper."""


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """The values kept of a forward, and how its residuals are computed from them.

    Attributes:
        kept: variables of the forward that the backward reads: inputs, or results to be stashed.
        again: equations of the forward that the backward runs again on them.
        residuals: the values that the derivative reads, computed by these; literals are unchanged.
        unmarked: the value behind each variable that a mark defines.
    """

    kept: tuple[Var, ...]
    again: tuple[JaxprEqn, ...]
    residuals: tuple[Any, ...]
    unmarked: Mapping[Var, Any]


def select(
    forward: ClosedJaxpr, residuals: Sequence[Any], fixed: Collection[Var], free: Collection[Var]
) -> Selection:
    """Choose what to keep of a forward for a backward that reads `residuals`.

    Args:
        forward: the program.
        residuals: variables of it, or literals.
        fixed: those of its inputs that are parameters.
        free: the inputs that the backward can read anyway, parameters included.
    """
    jaxpr = forward.jaxpr
    # A mark is an identity that taps add. It must not change which values are kept: an observed
    # pipeline would need a different amount of memory.
    equations, same = _without_marks(jaxpr.eqns)
    wanted = [same.get(var, var) for var in variables(residuals)]
    wanted = list(dict.fromkeys(variables(wanted)))
    constant = _made_of(equations, {*jaxpr.constvars, *fixed})
    cut = _cheapest(equations, wanted, {*constant, *free})
    made = makers(equations)
    inputs = {*jaxpr.constvars, *jaxpr.invars}
    # From the wanted values back to the cut: everything in between is recomputed. Values that
    # depend on parameters alone are not in the cut, so they are recomputed from the parameters.
    again: set[int] = set()
    kept: dict[Any, None] = {}
    waiting = list(reversed(wanted))
    while waiting:
        var = waiting.pop()
        if var in cut or var in inputs:
            kept[var] = None
        elif made[var] not in again:
            again.add(made[var])
            waiting.extend(variables(equations[made[var]].invars))
    return Selection(
        tuple(var for var in kept if var not in jaxpr.constvars),
        tuple(equations[index] for index in sorted(again)),
        tuple(same.get(var, var) if isinstance(var, Var) else var for var in residuals),
        same,
    )


def _cheapest(
    equations: Sequence[JaxprEqn], wanted: Sequence[Var], costless: Collection[Var]
) -> set[Var]:
    """The values with the fewest bytes from which cheap operations compute all wanted values."""
    made, cheap = makers(equations), _cheap(equations)
    weights: dict[Var, int] = {}
    edges: list[tuple[Var, Var]] = []
    sources: list[Var] = []
    waiting = [var for var in wanted if var not in costless]
    targets = list(waiting)
    while waiting:
        var = waiting.pop()
        if var in weights:
            continue
        weights[var] = nbytes(var.aval) + _EACH
        # An input, or the result of an expensive operation: it cannot be recomputed, only kept.
        if made.get(var) not in cheap:
            sources.append(var)
            continue
        operands = [v for v in variables(equations[made[var]].invars) if v not in costless]
        edges.extend((operand, var) for operand in operands)
        waiting.extend(operands)
    return minimum_cut(weights, edges, sources, targets)


def reading(forward: ClosedJaxpr, backward: ClosedJaxpr, chosen: Selection) -> ClosedJaxpr:
    """A backward that takes the kept values of `forward` in place of its residuals."""
    count = len(chosen.kept)

    def call(*operands: jax.Array) -> list[Any]:
        known = dict(zip(forward.jaxpr.constvars, forward.consts, strict=True))
        known.update(zip(chosen.kept, operands[:count], strict=True))
        run(chosen.again, known)
        residuals = results_of(known, chosen.residuals)
        inside = bound(backward.jaxpr, backward.consts, [*residuals, *operands[count:]])
        run(backward.jaxpr.eqns, inside)
        return results_of(inside, backward.jaxpr.outvars)

    gradients = backward.jaxpr.invars[len(chosen.residuals) :]
    return jax.make_jaxpr(call)(*map(form_of, [*chosen.kept, *gradients]))


def _without_marks(equations: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], dict[Var, Any]]:
    """Equations with marks bypassed, and the marked variable of each variable that a mark defines."""
    same: dict[Any, Any] = {}
    found = []
    for eqn in equations:
        operands = [same.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]
        if is_mark(eqn):
            same.update(zip(eqn.outvars, operands, strict=True))
        else:
            found.append(eqn.replace(invars=operands))
    return found, same


def _cheap(equations: Sequence[JaxprEqn]) -> set[int]:
    """The indices of the equations that may be recomputed."""
    length: dict[Any, int] = {}
    found = set()
    for index, eqn in enumerate(equations):
        if eqn.effects or not (is_arithmetic(eqn) or is_rearrangement(eqn)):
            continue
        longest = max((length.get(v, 0) for v in variables(eqn.invars)), default=0)
        # Rearrangements compute nothing and do not count. An operation beyond the limit is kept
        # like an expensive one, and the count begins again behind it.
        longest += is_arithmetic(eqn)
        if longest <= _LONGEST:
            found.add(index)
            length.update(dict.fromkeys(eqn.outvars, longest))
    return found


def _made_of(equations: Sequence[JaxprEqn], start: Collection[Any]) -> set[Any]:
    """The variables computed from `start` alone, or without operands, without effects."""
    known = set(start)
    for eqn in equations:
        # A random key has no operands either, but it differs for each microbatch.
        quiet = not eqn.effects and ambient_in(eqn) is None
        if quiet and all(var in known for var in variables(eqn.invars)):
            known.update(eqn.outvars)
    return known
