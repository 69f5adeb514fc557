"""Iteration over a traced program: every equation, with its position and its surroundings.

A position is a tuple of numbers: the index of an equation, then the index of the program inside that
equation, then the index of an equation there, and so on. It identifies an equation even if two
equations share one inner program object, where `id(eqn)` would be ambiguous.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, primitives
from tailrace.jaxprs.marks import (
    FORWARD,
    Tag,
    ambient_p,
    cross_replica_p,
    dequeue_p,
    gather_p,
    mark_p,
    unit_p,
)
from tailrace.jaxprs.own_equations import has_role, queue_in, tag_in, unit_in

Position = tuple[int, ...]

Item = TypeVar("Item")

LOOP, SCAN, WHILE, BRANCH, REPLAY, CALL = "loop", "scan", "while", "branch", "replay", "call"


@dataclasses.dataclass(frozen=True)
class Surrounding:
    """One construct around an equation.

    Attributes:
        kind: `LOOP` (made by Tailrace), `SCAN` or `WHILE` (the user's), `BRANCH` of a condition,
            `REPLAY` (a recomputation in the backward pass), or a plain `CALL`.
        length: the number of iterations; None if it is known only at run time.
        tag: the tag of a loop made by Tailrace.
        scopes: the name stack of its equation.
        stage: the pipeline stage that it is a call of, if any.
    """

    kind: str
    length: int | None = None
    tag: Tag | None = None
    scopes: str = ""
    stage: int | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """An equation and its position."""

    equation: JaxprEqn
    position: Position
    inside: tuple[Surrounding, ...] = ()

    @property
    def replayed(self) -> bool:
        """Whether it recomputes, for the backward pass, what the forward pass computed already."""
        return any(around.kind == REPLAY for around in self.inside)

    def loops(self) -> tuple[Surrounding, ...]:
        """The loops around this equation, outermost first."""
        return tuple(a for a in self.inside if a.kind in (LOOP, SCAN, WHILE))


def walk(
    equations: Sequence[JaxprEqn],
    position: Position = (),
    inside: tuple[Surrounding, ...] = (),
) -> Iterator[Place]:
    """Every equation of a program and of its inner programs, in execution order."""
    for index, eqn in enumerate(equations):
        here = (*position, index)
        yield Place(eqn, here, inside)
        # All programs inside, those included that a visitor cannot enter (the function of a reduction):
        # a mark that hides there must be found, to be refused.
        for number, (_, _, inner, _) in enumerate(internals.inner_jaxprs(eqn)):
            yield from walk(inner.eqns, (*here, number), (*inside, surrounding(eqn, inner)))


def surrounding(eqn: JaxprEqn, inner: Jaxpr) -> Surrounding:
    """An equation as the surrounding of a program inside it."""
    scopes = internals.name_stack_of(eqn)
    # Our loops are ordinary scans and while loops; a mark in the body identifies them, because a mark
    # survives every transformation that the loop survives.
    tag = loop_tag(inner)
    if eqn.primitive is primitives.scan_p:
        return Surrounding(LOOP if tag else SCAN, eqn.params["length"], tag, scopes)
    if eqn.primitive is primitives.while_p:
        return Surrounding(LOOP if tag else WHILE, tag.payload if tag else None, tag, scopes)
    if eqn.primitive is primitives.cond_p:
        return Surrounding(BRANCH, scopes=scopes)
    # Before other calls: what is repeated is not an observation, and is neither sent nor counted twice.
    if internals.is_replay(eqn):
        return Surrounding(REPLAY, scopes=scopes)
    unit = unit_in(eqn)
    return Surrounding(CALL, scopes=scopes, stage=None if unit is None else unit.stage)


def loop_tag(body: Jaxpr) -> Tag | None:
    """The tag of the Tailrace loop whose body this is, or None for any other program."""
    return next((tag_in(eqn) for eqn in body.eqns if has_role(eqn, "loop")), None)


def tag_of(place: Place) -> Tag | None:
    """The tag of a mark that is not the replay of an earlier one, else None."""
    # A replayed mark of a gradient is not a repetition: the backward pass is where it first appears.
    tag = tag_in(place.equation)
    if tag is None or (place.replayed and tag.direction == FORWARD):
        return None
    return tag


def by_surrounding(items: Mapping[Position, Iterable[Item]]) -> dict[Position, list[Item]]:
    """For each equation that contains chosen ones, the items of those.

    Whether anything inside an equation is chosen is then one look-up, however many are chosen.
    """
    found: dict[Position, list[Item]] = {}
    for position, each in items.items():
        for depth in range(1, len(position), 2):  # an index of a program, then one of an equation
            found.setdefault(position[:depth], []).extend(each)
    return found


def concerns_us(eqn: JaxprEqn) -> bool:
    """Whether an equation must be replaced before XLA compiles the program: it contains one of ours."""
    return eqn.primitive in _OURS or any(
        concerns_us(inner_eqn)
        for _, _, inner, _ in internals.inner_jaxprs(eqn)
        for inner_eqn in inner.eqns
    )


_OURS: set[Any] = {mark_p, dequeue_p, ambient_p, cross_replica_p, gather_p, unit_p}


def elements_read(equations: Sequence[JaxprEqn]) -> dict[Any, int]:
    """The number of elements of each infeed that one run reads (an upper bound for while loops)."""
    counts: dict[Any, int] = {}
    for place in walk(equations):
        queue = queue_in(place.equation)
        if queue is not None:
            total = 1
            for around in place.loops():
                # Without a length for a user's while loop: a dequeue in one is refused when the program
                # is traced.
                total *= around.length if around.length is not None else 1
            counts[queue] = counts.get(queue, 0) + total
    return counts


def acts_on_host(equations: Sequence[JaxprEqn]) -> bool:
    """Whether any equation, or one inside it, has effects other than those of marks."""

    def acts(eqn: JaxprEqn) -> bool:
        # A mark has an effect only so that JAX keeps it; it does nothing on the host by itself.
        if eqn.primitive is mark_p or not eqn.effects:
            return False
        inner = internals.inner_jaxprs(eqn)
        return not inner or any(acts_on_host(jaxpr.eqns) for _, _, jaxpr, _ in inner)

    return any(map(acts, equations))
