"""Stretches of equations: live-ins and live-outs, dependences between values, and running them."""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.jaxprs import internals
from tailrace.jaxprs.control import jit_of
from tailrace.jaxprs.internals import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var, variables

Emit = Callable[[JaxprEqn, list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive equations that are computed together.

    Attributes:
        equations: in order.
        reads: the live-ins, variables that they use but do not define, in the order of first use.
        makes: the live-outs, variables that they define and that are used later, in order.
    """

    equations: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]


def stretch(equations: Sequence[JaxprEqn], later: Iterable[Var]) -> Stretch:
    """Equations as a stretch; `later` are the variables used after it."""
    return Stretch(tuple(equations), live_ins(equations), live_outs(equations, later))


def stretches(groups: Sequence[Sequence[JaxprEqn]], results: Iterable[Atom]) -> list[Stretch]:
    """Consecutive groups of equations as stretches; `results` are the program's outputs."""
    # Backwards: what a group makes is live if a later group, or the program's results, use it.
    later = set(variables(results))
    found: list[Stretch] = []
    for group in reversed(groups):
        found.append(stretch(group, later))
        later.update(found[-1].reads)
    return found[::-1]


def live_ins(equations: Iterable[JaxprEqn]) -> tuple[Var, ...]:
    """The variables that equations use but do not define, in the order of first use."""
    equations = list(equations)
    made = set(made_by(equations))
    return tuple(var for var in used_by(equations) if var not in made)


def live_outs(equations: Iterable[JaxprEqn], later: Iterable[Var]) -> tuple[Var, ...]:
    """The variables that equations define and that are in `later`, in order."""
    later = later if isinstance(later, set | frozenset | dict) else set(later)
    return tuple(var for var in made_by(equations) if var in later)


def used_by(equations: Iterable[JaxprEqn]) -> dict[Var, None]:
    """The variables that equations use, in the order of first use."""
    # A dict as an ordered set: the order decides that of operands, and must be the same in each
    # process.
    return dict.fromkeys(var for eqn in equations for var in variables(eqn.invars))


def made_by(equations: Iterable[JaxprEqn]) -> list[Var]:
    """The variables that equations define, in order."""
    return [var for eqn in equations for var in eqn.outvars]


def makers(equations: Iterable[JaxprEqn]) -> dict[Var, int]:
    """The index of the equation that defines each variable."""
    return {var: index for index, eqn in enumerate(equations) for var in eqn.outvars}


# -- dependences --------------------------------------------------------------------------------


def computed_from(equations: Iterable[JaxprEqn], start: Iterable[Var]) -> set[Var]:
    """`start` and the floats computed from it: the variables that gradients flow through."""
    active = set(start)
    for eqn in equations:
        if any(var in active for var in variables(eqn.invars)):
            active.update(var for var in eqn.outvars if is_float(var))
    return active


def needed_for(equations: Sequence[JaxprEqn], results: Iterable[Atom]) -> list[JaxprEqn]:
    """The equations needed to compute `results`, in order."""
    needed, found = set(variables(results)), []
    for eqn in reversed(equations):
        if any(var in needed for var in eqn.outvars):
            needed.update(variables(eqn.invars))
            found.append(eqn)
    return found[::-1]


def useful_for(equations: Sequence[JaxprEqn], results: Iterable[Atom]) -> set[Var]:
    """`results` and the variables they are computed from."""
    wanted = variables(results)
    return {*wanted, *used_by(needed_for(equations, wanted))}


def is_float(var: Atom) -> bool:
    """Whether a variable can have a gradient."""
    return jnp.issubdtype(getattr(var.aval, "dtype", jnp.int32), jnp.inexact)


def crossing_bytes(
    equations: Sequence[JaxprEqn],
    results: Iterable[Atom],
    nbytes: Callable[[Any], int] = internals.nbytes,
) -> list[int]:
    """For each equation, the bytes of the variables that are live just before it.

    A last entry counts the bytes of the results.
    """
    last: dict[Var, int] = {}
    for index, eqn in enumerate(equations):
        last.update((var, index) for var in variables(eqn.invars))
    last.update((var, len(equations)) for var in variables(results))
    # Changes at the ends of live ranges, summed once at the end: linear in the size of the program,
    # where looking up the live set at each equation would be quadratic.
    change = [0] * (len(equations) + 2)
    for var, index in makers(equations).items():
        if last.get(var, -1) > index:
            change[index + 1] += nbytes(var.aval)
            change[last[var] + 1] -= nbytes(var.aval)
    found, total = [], 0
    for amount in change[:-1]:
        total += amount
        found.append(total)
    return found


# -- running them -------------------------------------------------------------------------------


def bound(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> dict[Var, Any]:
    """A program's constants and inputs, by variable."""
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))
    return known


def run(
    equations: Iterable[JaxprEqn], known: dict[Var, Any], emit: Emit = internals.bind_again
) -> None:
    """Emit equations whose operands are in `known`, and add their results to it."""
    for eqn in equations:
        with internals.equation_context(eqn):
            made = emit(eqn, [internals.value_of(known, var) for var in eqn.invars])
        known.update(zip(eqn.outvars, made, strict=True))


def results_of(known: Mapping[Var, Any], outvars: Iterable[Atom]) -> list[Any]:
    """Look up the values of a program's results."""
    return [internals.value_of(known, var) for var in outvars]


def opened(
    closed: ClosedJaxpr,
    forms: Sequence[Any],
    opens: Callable[[JaxprEqn], bool] = lambda eqn: True,
) -> ClosedJaxpr:
    """The same program with its `jit` calls inlined, those for which `opens` is true."""

    def emit(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        call = jit_of(eqn) if opens(eqn) else None
        if call is None:
            return internals.bind_again(eqn, inputs)
        return whole(call.program.jaxpr, call.program.consts, inputs)

    def whole(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        known = bound(jaxpr, consts, inputs)
        run(jaxpr.eqns, known, emit)
        return results_of(known, jaxpr.outvars)

    return jax.make_jaxpr(lambda *given: whole(closed.jaxpr, closed.consts, given))(*forms)
