"""Cuts a program into segments to dispatch: stretches of equations, and long loops separately.

Most programs are one segment and one dispatch. A top-level loop whose elements would not fit in memory
at once, or whose results are wanted while it runs, becomes a separate segment, which is dispatched
several times, one piece of the loop each time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.errors import ProgramError
from tailrace.jaxprs.boundaries import Boundaries, boundaries
from tailrace.jaxprs.control import as_scan
from tailrace.jaxprs.free_numbers import FreeNumbers, free_numbers
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, Var, variables
from tailrace.jaxprs.stretches import live_ins, live_outs, made_by
from tailrace.jaxprs.value_graph import ValueGraph
from tailrace.jaxprs.walk import concerns_us, elements_read
from tailrace.program.compiling.build import Option
from tailrace.program.compiling.suited_options import suited_options
from tailrace.program.tracing.replica_drift import check_in_step
from tailrace.program.tracing.trace import Traced, top_loops, trace_program


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """Equations that are dispatched together.

    Attributes:
        equations: its equations.
        first: the index of the first of them in the program.
        reads: its live-ins, in order; of a loop, without the carry and the counter.
        writes: its live-outs, in order; of a loop, the whole carry.
        is_loop: whether it is one `tr.repeat`, which may run in pieces.
        elements: the number of elements it reads from each infeed (per iteration, if it is a loop).
    """

    equations: tuple[JaxprEqn, ...]
    first: int
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]
    is_loop: bool
    elements: dict[Any, int]

    @property
    def free_numbers(self) -> FreeNumbers:
        """Its literals that become arguments, so that equal programs can share an executable."""
        return self._read[0]

    @property
    def boundaries(self) -> Boundaries:
        """Its values that XLA must not fuse through; on other devices than CPUs there are none."""
        return self._read[1]

    @property
    def suited_options(self) -> Mapping[str, Option]:
        """The options of the compiler that suit it, if nobody has decided otherwise."""
        return self._read[2]

    @functools.cached_property
    def _read(self) -> tuple[FreeNumbers, Boundaries, dict[str, Option]]:
        # Together: both read one graph, which is larger than what they find in it.
        graph, platform = ValueGraph(self.equations, self.first), devices.platform()
        on_cpu = platform == "cpu"
        return (
            free_numbers(graph, on_cpu),
            boundaries(graph) if on_cpu else {},
            suited_options(graph, platform),
        )

    @property
    def length(self) -> int:
        """The number of iterations of a loop."""
        return as_scan(self.equations[0]).length

    @property
    def start(self) -> tuple[tuple[Var, Any], ...]:
        """The carry of a loop: the variable of each result, and its initial value."""
        loop = self.equations[0]
        _, carried, _ = as_scan(loop).split(loop.invars)
        return tuple(zip(loop.outvars, carried, strict=True))


def cut(jaxpr: Jaxpr, loops: Iterable[int]) -> list[Segment]:
    """The segments of a program, with the equations at the indices `loops` separate."""
    # Between separate loops the rest stays together: each segment is a dispatch.
    alone = set(loops)
    groups: list[tuple[int, int]] = []
    start = 0
    for index in [*sorted(alone), len(jaxpr.eqns)]:
        if index > start:
            groups.append((start, index))
        if index < len(jaxpr.eqns):
            groups.append((index, index + 1))
        start = index + 1
    # Backwards, so that the live-outs of a segment are known when it is made.
    needed_after: set[Any] = set(variables(jaxpr.outvars))
    segments: list[Segment] = []
    for first, last in reversed(groups):
        equations = tuple(jaxpr.eqns[first:last])
        is_loop = first in alone
        made = made_by(equations)
        if is_loop:
            loop = as_scan(equations[0])
            consts, carried, _ = loop.split(equations[0].invars)
            # The counter comes after those; each piece creates it.
            needed = tuple(variables([*consts, *carried]))
            # The whole carry is written, used later or not: the next piece continues from it.
            reads, writes = tuple(dict.fromkeys(variables(consts))), tuple(made)
            part = loop.body.jaxpr.eqns
        else:
            needed = reads = live_ins(equations)
            writes, part = live_outs(equations, needed_after), equations
        # A segment without live-outs is dropped, unless it has effects or one of our equations.
        if writes or any(concerns_us(eqn) or eqn.effects for eqn in equations):
            segments.append(Segment(equations, first, reads, writes, is_loop, elements_read(part)))
        needed_after = (needed_after - set(made)) | set(needed)
    return segments[::-1]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLoop:
    """A traced program that is one loop, and what its function computes before the loop.

    Attributes:
        traced: the whole program; it returns the loop's carry.
        loop: the loop.
        before: the segments before it, which run once.
        num_carried: the number of leaves that the loop carries: the first inputs of the program.
    """

    traced: Traced
    loop: Segment
    before: tuple[Segment, ...]
    num_carried: int

    @staticmethod
    def trace(
        function: Callable[[Any, Any], Any],
        carried: Tree,
        read: Tree,
        replicas: int,
        each: Sequence[bool] | None,
    ) -> TracedLoop:
        """Trace `function(carried, read)`; `each`: whether a leaf of its result differs per replica."""
        traced = trace_program(function, (carried, read), replicas)
        # Before anything is compiled: drifting replicas are silent errors at run time.
        if replicas > 1:
            check_in_step(traced, each)
        loops = top_loops(traced)
        if len(loops) != 1:
            raise ProgramError(
                f"A runner runs one loop at the top of a program. Received: {len(loops)} loops."
            )
        segments = cut(traced.jaxpr, loops)
        (loop,) = (segment for segment in segments if segment.is_loop)
        before = tuple(segment for segment in segments if segment.first < loop.first)
        return TracedLoop(traced, loop, before, len(jax.tree.leaves(carried)))
