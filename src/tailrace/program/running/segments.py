"""Cutting a program into what is dispatched: stretches of equations, and long loops of their own.

Most programs are one segment and one dispatch. A loop at the top whose elements would not fit in
memory at once, or whose results are wanted while it runs, becomes a segment of its own, which is
dispatched several times, a piece of the loop each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, Var, scan_sizes
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

    @property
    def length(self) -> int:
        """The number of passes of a loop."""
        return self.equations[0].params["length"]

    @property
    def start(self) -> tuple[tuple[Var, Any], ...]:
        """What a loop carries: the variable of each result, and what it starts from."""
        loop = self.equations[0]
        before, carried = scan_sizes(loop)
        return tuple(zip(loop.outvars, loop.invars[before : before + carried], strict=True))


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
    needed_after: set[Any] = {var for var in jaxpr.outvars if isinstance(var, Var)}
    segments: list[Segment] = []
    for first, last in reversed(groups):
        equations = tuple(jaxpr.eqns[first:last])
        is_loop = first in alone
        made = [var for eqn in equations for var in eqn.outvars]
        used = [var for eqn in equations for var in eqn.invars if isinstance(var, Var)]
        inside = set(made)
        needed = tuple(dict.fromkeys(var for var in used if var not in inside))
        if is_loop:
            before, carried = scan_sizes(equations[0])
            # The counter, behind those, is made anew in each piece.
            needed = tuple(
                var for var in equations[0].invars[: before + carried] if isinstance(var, Var)
            )
            consts = equations[0].invars[:before]
            reads = tuple(dict.fromkeys(var for var in consts if isinstance(var, Var)))
            writes, part = tuple(made), equations[0].params["jaxpr"].jaxpr.eqns
        else:
            reads, writes = needed, tuple(var for var in made if var in needed_after)
            part = equations
        if writes or any(concerns_us(eqn) or eqn.effects for eqn in equations):
            segments.append(Segment(equations, first, reads, writes, is_loop, elements_read(part)))
        needed_after = (needed_after - inside) | set(needed)
    return segments[::-1]
