"""Cutting a program into what is dispatched: stretches of equations, and long loops of their own.

Most programs are one segment and one dispatch. A loop at the top whose elements would not fit in
memory at once, or whose results are wanted while it runs, becomes a segment of its own, which is
dispatched several times, a piece of the loop each time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from tailrace.devices import devices
from tailrace.jaxprs.control import as_scan
from tailrace.jaxprs.free_numbers import FreeNumbers, free_numbers
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, Var, variables
from tailrace.jaxprs.stretches import live_ins, live_outs, made_by
from tailrace.jaxprs.walk import concerns_us, elements_read


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """Equations that are dispatched together.

    Attributes:
        equations: what it computes.
        first: the index of the first of them in the program.
        reads: variables it needs, in order; of a loop, without what it carries and counts.
        writes: variables that are needed after it, in order; of a loop, all that it carries.
        is_loop: whether it is one `tr.repeat`, which may be run in pieces.
        elements: how many elements of each infeed it reads (one pass of it, if it is a loop).
    """

    equations: tuple[JaxprEqn, ...]
    first: int
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]
    is_loop: bool
    elements: dict[Any, int]

    @functools.cached_property
    def free_numbers(self) -> FreeNumbers:
        """The numbers in it that are arguments of what is compiled: others may share that."""
        return free_numbers(self.equations, devices.platform() == "cpu")

    @property
    def length(self) -> int:
        """The number of passes of a loop."""
        return as_scan(self.equations[0]).length

    @property
    def start(self) -> tuple[tuple[Var, Any], ...]:
        """What a loop carries: the variable of each result, and what it starts from."""
        loop = self.equations[0]
        _, carried, _ = as_scan(loop).split(loop.invars)
        return tuple(zip(loop.outvars, carried, strict=True))


def cut(jaxpr: Jaxpr, loops: Iterable[int]) -> list[Segment]:
    """The segments of a program, the equations at the indices `loops` on their own."""
    alone = set(loops)
    groups: list[tuple[int, int]] = []
    start = 0
    for index in [*sorted(alone), len(jaxpr.eqns)]:
        if index > start:
            groups.append((start, index))
        if index < len(jaxpr.eqns):
            groups.append((index, index + 1))
        start = index + 1
    needed_after: set[Any] = set(variables(jaxpr.outvars))
    segments: list[Segment] = []
    for first, last in reversed(groups):
        equations = tuple(jaxpr.eqns[first:last])
        is_loop = first in alone
        made = made_by(equations)
        if is_loop:
            loop = as_scan(equations[0])
            consts, carried, _ = loop.split(equations[0].invars)
            # The counter, behind those, is made anew in each piece.
            needed = tuple(variables([*consts, *carried]))
            reads, writes = tuple(dict.fromkeys(variables(consts))), tuple(made)
            part = loop.body.jaxpr.eqns
        else:
            needed = reads = live_ins(equations)
            writes, part = live_outs(equations, needed_after), equations
        if writes or any(concerns_us(eqn) or eqn.effects for eqn in equations):
            segments.append(Segment(equations, first, reads, writes, is_loop, elements_read(part)))
        needed_after = (needed_after - set(made)) | set(needed)
    return segments[::-1]
