"""Stretches of equations: what they read and make, what depends on what, and running them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.jaxprs import internals
from tailrace.jaxprs.control import jit_of
from tailrace.jaxprs.internals import ClosedJaxpr, Jaxpr, JaxprEqn, Var, variables

Emit = Callable[[JaxprEqn, list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Equations that are computed together.

    Attributes:
        equations: in order.
        reads: the variables that they use and do not make (live-in), in the order of first use.
        makes: the variables that they make and that are used after them (live-out), in order.
    """

    equations: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]


def stretch(equations: Sequence[JaxprEqn], later: Iterable[Any]) -> Stretch:
    """Equations as a stretch, if the variables `later` are used after it."""
    return Stretch(tuple(equations), live_ins(equations), live_outs(equations, later))


def stretches(groups: Sequence[Sequence[JaxprEqn]], results: Iterable[Any]) -> list[Stretch]:
    """Groups of equations that follow each other, and whose `results` (or literals) are wanted."""
    later = set(variables(results))
    found = []
    for group in reversed(groups):
        found.append(stretch(group, later))
        later.update(found[-1].reads)
    return found[::-1]


def live_ins(equations: Iterable[JaxprEqn]) -> tuple[Var, ...]:
    """The variables that equations use and do not make, in the order of first use."""
    equations = list(equations)
    made = set(made_by(equations))
    return tuple(var for var in used_by(equations) if var not in made)


def live_outs(equations: Iterable[JaxprEqn], later: Iterable[Any]) -> tuple[Var, ...]:
    """The variables that equations make and that are among `later`, in order."""
    later = later if isinstance(later, set | frozenset | dict) else set(later)
    return tuple(var for var in made_by(equations) if var in later)


def used_by(equations: Iterable[JaxprEqn]) -> dict[Var, None]:
    """The variables that equations use, in the order of first use."""
    return dict.fromkeys(var for eqn in equations for var in variables(eqn.invars))


def made_by(equations: Iterable[JaxprEqn]) -> list[Var]:
    """The variables that equations make, in order."""
    return [var for eqn in equations for var in eqn.outvars]


def makers(equations: Iterable[JaxprEqn]) -> dict[Var, int]:
    """The index of the equation that makes each variable."""
    return {var: index for index, eqn in enumerate(equations) for var in eqn.outvars}


# -- what depends on what -----------------------------------------------------------------------


def computed_from(equations: Iterable[JaxprEqn], start: Iterable[Any]) -> set[Any]:
    """`start`, and the floats that are computed from it: the variables that gradients reach."""
    active = set(start)
    for eqn in equations:
        if any(var in active for var in variables(eqn.invars)):
            active.update(var for var in eqn.outvars if is_float(var))
    return active


def needed_for(equations: Sequence[JaxprEqn], results: Iterable[Any]) -> list[JaxprEqn]:
    """The equations that `results` are computed by, in order."""
    needed, found = set(variables(results)), []
    for eqn in reversed(equations):
        if any(var in needed for var in eqn.outvars):
            needed.update(variables(eqn.invars))
            found.append(eqn)
    return found[::-1]


def useful_for(equations: Sequence[JaxprEqn], results: Iterable[Any]) -> set[Any]:
    """`results`, and the variables that they are computed from."""
    results = variables(results)
    return {*results, *used_by(needed_for(equations, results))}


def is_float(var: Any) -> bool:
    """Whether a variable can have a gradient."""
    return jnp.issubdtype(getattr(var.aval, "dtype", jnp.int32), jnp.inexact)


def crossing_bytes(
    equations: Sequence[JaxprEqn],
    results: Iterable[Any],
    nbytes: Callable[[Any], int] = internals.nbytes,
) -> list[int]:
    """For each equation the bytes that are made before it and used by it or after it.

    One more entry for the end: the bytes of the results.
    """
    last: dict[Any, int] = {}
    for index, eqn in enumerate(equations):
        last.update((var, index) for var in variables(eqn.invars))
    last.update((var, len(equations)) for var in variables(results))
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


def bound(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> dict[Any, Any]:
    """The values that a program starts from, by variable."""
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))
    return known


def run(
    equations: Iterable[JaxprEqn], known: dict[Any, Any], emit: Emit = internals.bind_again
) -> None:
    """Emit equations whose operands are in `known`, and add what they make."""
    for eqn in equations:
        with internals.equation_context(eqn):
            made = emit(eqn, [internals.value_of(known, var) for var in eqn.invars])
        known.update(zip(eqn.outvars, made, strict=True))


def results_of(known: dict[Any, Any], outvars: Iterable[Any]) -> list[Any]:
    """The values of a program's results."""
    return [internals.value_of(known, var) for var in outvars]


def opened(
    closed: ClosedJaxpr,
    forms: Sequence[Any],
    opens: Callable[[JaxprEqn], bool] = lambda eqn: True,
) -> ClosedJaxpr:
    """The same program, with the contents of its `jit` calls (those that `opens`) in their place."""

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
