"""Cuts a forward pass into parts, so that not all activations exist at once.

A traced forward pass is a list of equations. Those that use only parameters (casts of weights, say) are
separated: they run first, once. The others are cut into parts of about equal weight, where the weight
of an equation is the bytes of its results; each cut is placed where the fewest bytes cross it.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tailrace.jaxprs.control import programs_in, scan_of
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, nbytes, variables
from tailrace.jaxprs.stretches import (
    Stretch,
    computed_from,
    crossing_bytes,
    stretches,
    useful_for,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """A forward pass in parts.

    Attributes:
        before: the equations that use only parameters.
        parts: the rest.
        active: the variables through which a gradient flows, from the loss back to the parameters.
    """

    before: Stretch
    parts: tuple[Stretch, ...]
    active: frozenset[Any]

    def crossing(self, least: int) -> list[list[Any]]:
        """For each part, its results of at least `least` bytes that later parts use.

        The backward pass begins with the last part: values that only it reads stay on the device.
        """
        later: set[Any] = set()
        found: list[list[Any]] = [[]]
        for part in reversed(self.parts[:-1]):
            found.append([v for v in part.makes if v in later and nbytes(v.aval) >= least])
            later.update(part.reads)
        return found[::-1]


def segments(jaxpr: Jaxpr, parts: int) -> Segments:
    """Cut a program, whose inputs are parameters and first result the loss, into at most `parts`."""
    before, rest = _apart(jaxpr)
    cuts = _cuts(rest, jaxpr.outvars, parts)
    groups = [rest[a:b] for a, b in zip([0, *cuts], [*cuts, len(rest)], strict=True)]
    active = computed_from(jaxpr.eqns, jaxpr.invars)
    useful = useful_for(jaxpr.eqns, jaxpr.outvars[:1])
    first, *others = stretches([before, *groups], jaxpr.outvars)
    return Segments(first, tuple(others), frozenset(active & useful))


# -- inside -------------------------------------------------------------------------------------


def _apart(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Separate the equations that use only parameters from all others."""
    of_parameters = set(jaxpr.invars)
    before, rest = [], []
    for eqn in jaxpr.eqns:
        used = variables(eqn.invars)
        # An equation without operands (zeros, a key) stays where it is used.
        if used and all(v in of_parameters for v in used):
            of_parameters.update(eqn.outvars)
            before.append(eqn)
        else:
            rest.append(eqn)
    return before, rest


def _cuts(equations: Sequence[JaxprEqn], outputs: Sequence[Any], parts: int) -> list[int]:
    """The indices of the equations to cut before."""
    weights = [_weight(eqn) for eqn in equations]
    share = sum(weights) / parts
    crossing = crossing_bytes(equations, outputs)
    cuts: list[int] = []
    so_far, position = 0.0, 0
    for number in range(1, parts):
        # Candidates: all positions nearer to this cut than to the next.
        window = []
        while position < len(equations) and so_far < share * (number + 0.5):
            if position and so_far >= share * (number - 0.5):
                window.append((crossing[position], abs(so_far - share * number), position))
            so_far += weights[position]
            position += 1
        best = min(window, default=None)
        # If as many bytes cross as half a part produces, the cut saves little.
        if best is not None and best[0] <= share / 2:
            cuts.append(best[2])
    return cuts


def _weight(eqn: JaxprEqn) -> int:
    """The bytes of an equation's results, those of inner programs included."""
    scan = scan_of(eqn)
    times = 1 if scan is None else scan.length
    inside = sum(times * sum(map(_weight, inner.eqns)) for inner in programs_in(eqn))
    return inside + sum(nbytes(var.aval) for var in eqn.outvars)
