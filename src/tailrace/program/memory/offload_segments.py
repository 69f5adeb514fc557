"""Where a forward pass is cut, so that its activations need not all exist at once.

A traced forward pass is a list of equations. Those that use parameters alone (casting weights, say)
are set apart: they come first, once. The others are cut into parts of about equal weight, where the
weight of an equation is the bytes that it makes; each cut stands where the fewest bytes cross it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import ClosedJaxpr, Jaxpr, JaxprEqn, primitives
from tailrace.jaxprs.marks import ambient_p


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Equations that are computed together.

    Attributes:
        equations: in order.
        reads: the variables that they use and do not make.
        makes: the variables that they make and that are used after them.
    """

    equations: tuple[JaxprEqn, ...]
    reads: tuple[Any, ...]
    makes: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """A forward pass in parts.

    Attributes:
        before: what is made of parameters alone.
        parts: the rest.
        active: the variables through which a gradient flows, from the loss back to the parameters.
    """

    before: Part
    parts: tuple[Part, ...]
    active: frozenset[Any]

    def crossing(self, least: int) -> list[list[Any]]:
        """For each part, what it makes for later ones that has `least` bytes or more.

        The backward pass begins with the last part: what only that one reads stays where it is.
        """
        later: set[Any] = set()
        found: list[list[Any]] = [[]]
        for part in reversed(self.parts[:-1]):
            found.append([v for v in part.makes if v in later and nbytes(v.aval) >= least])
            later.update(part.reads)
        return found[::-1]


def segments(jaxpr: Jaxpr, parts: int) -> Segments:
    """Cut a program, of parameters alone and with the loss as first result, into at most `parts`."""
    before, rest = _apart(jaxpr)
    cuts = _cuts(rest, jaxpr.outvars, parts)
    groups = [rest[a:b] for a, b in zip([0, *cuts], [*cuts, len(rest)], strict=True)]
    active = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if any(v in active for v in internals.variables(eqn.invars)):
            active.update(v for v in eqn.outvars if is_float(v.aval))
    useful = set(internals.variables(jaxpr.outvars[:1]))
    for eqn in reversed(jaxpr.eqns):
        if any(v in useful for v in eqn.outvars):
            useful.update(internals.variables(eqn.invars))
    made = []
    later = set(internals.variables(jaxpr.outvars))
    for group in reversed([before, *groups]):
        made.append(_part(group, later))
        later.update(made[-1].reads)
    first, *others = made[::-1]
    return Segments(first, tuple(others), frozenset(active & useful))


def opened(closed: ClosedJaxpr, inputs: Sequence[Any]) -> ClosedJaxpr:
    """The same program, with the contents of its `jit` calls in their place."""
    return jax.make_jaxpr(lambda *given: _open(closed.jaxpr, closed.consts, given))(*inputs)


def run(
    equations: Sequence[JaxprEqn],
    known: dict[Any, Any],
    emit: Callable[[JaxprEqn, list[Any]], list[Any]] = internals.bind_again,
) -> None:
    """Emit equations whose operands are in `known`, and add what they make."""
    for eqn in equations:
        with internals.equation_context(eqn):
            made = emit(eqn, [internals.value_of(known, v) for v in eqn.invars])
        known.update(zip(eqn.outvars, made, strict=True))


def nbytes(aval: Any) -> int:
    """The bytes of a value; none for a random key."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)


def is_float(aval: Any) -> bool:
    """Whether a value of this form can have a gradient."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


# -- inside -------------------------------------------------------------------------------------


def _open(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        inside = internals.contents(eqn) if eqn.primitive is primitives.jit_p else None
        if inside is None:
            run([eqn], known)
            continue
        values = [internals.value_of(known, v) for v in eqn.invars]
        with internals.equation_context(eqn):
            known.update(zip(eqn.outvars, _open(inside[1], inside[2], values), strict=True))
    return [internals.value_of(known, v) for v in jaxpr.outvars]


def _apart(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Equations that use parameters and nothing else, and all others."""
    of_parameters = set(jaxpr.invars)
    before, rest = [], []
    for eqn in jaxpr.eqns:
        used = internals.variables(eqn.invars)
        if used and all(v in of_parameters for v in used) and eqn.primitive is not ambient_p:
            of_parameters.update(eqn.outvars)
            before.append(eqn)
        else:
            rest.append(eqn)
    return before, rest


def _cuts(equations: Sequence[JaxprEqn], outputs: Sequence[Any], parts: int) -> list[int]:
    """Before which equations to cut."""
    weights = [_weight(eqn) for eqn in equations]
    share = sum(weights) / parts
    crossing = _crossing(equations, outputs)
    cuts: list[int] = []
    so_far, position = 0.0, 0
    for number in range(1, parts):
        # All positions that are nearer to this cut than to the next.
        window = []
        while position < len(equations) and so_far < share * (number + 0.5):
            if position and so_far >= share * (number - 0.5):
                window.append((crossing[position], abs(so_far - share * number), position))
            so_far += weights[position]
            position += 1
        best = min(window, default=None)
        # Where as much crosses as half a part makes, little is gained.
        if best is not None and best[0] <= share / 2:
            cuts.append(best[2])
    return cuts


def _crossing(equations: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[int]:
    """The bytes that are made before each equation and used by it or after it."""
    last: dict[Any, int] = {}
    for index, eqn in enumerate(equations):
        last.update((v, index) for v in internals.variables(eqn.invars))
    last.update((v, len(equations)) for v in internals.variables(outputs))
    change = [0] * (len(equations) + 2)
    for index, eqn in enumerate(equations):
        for var in eqn.outvars:
            if last.get(var, -1) > index:
                change[index + 1] += nbytes(var.aval)
                change[last[var] + 1] -= nbytes(var.aval)
    found, total = [], 0
    for amount in change[: len(equations)]:
        total += amount
        found.append(total)
    return found


def _weight(eqn: JaxprEqn) -> int:
    """The bytes that an equation makes, those inside it included."""
    times = eqn.params["length"] if eqn.primitive is primitives.scan_p else 1
    inside = sum(
        times * sum(map(_weight, inner.eqns)) for _, _, inner, _ in internals.inner_jaxprs(eqn)
    )
    return inside + sum(nbytes(var.aval) for var in eqn.outvars)


def _part(equations: Sequence[JaxprEqn], later: set[Any]) -> Part:
    made = dict.fromkeys(v for eqn in equations for v in eqn.outvars)
    used = dict.fromkeys(v for eqn in equations for v in internals.variables(eqn.invars))
    return Part(
        tuple(equations),
        tuple(v for v in used if v not in made),
        tuple(v for v in made if v in later),
    )
