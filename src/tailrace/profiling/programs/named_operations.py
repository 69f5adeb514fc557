"""The program of an operation, and the scope and phase of each instruction.

Instructions that XLA adds (copies, two-part reductions) have no name. They get the place of their
operands, or else that of their users.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tailrace.profiling.programs.device_operations import Operation
from tailrace.profiling.programs.hlo_text import Instruction, Module, parse, program_text
from tailrace.profiling.programs.op_names import Phase, Place, place_of

if TYPE_CHECKING:
    import jax

CONTAINERS = {"while", "conditional", "call", "async-start", "async-done"}
"""Instructions that run others, whose time is not self time."""

_DEPTH = 8
"""The most instructions to search for a name."""


class NamedProgram:
    """A compiled program whose instructions have places.

    Args:
        compiled: a `jax.stages.Compiled`.
    """

    def __init__(self, compiled: jax.stages.Compiled) -> None:
        self.compiled = compiled
        self.module: Module = parse(program_text(compiled))
        # Kernels of a GPU are named after instructions, but a symbol may not contain a dot.
        self._kernels = {name.replace(".", "_"): name for name in self.module.instructions}
        self._users: dict[str, list[Instruction]] = {}
        for part in self.module.computations.values():
            for one in part:
                for operand in one.operands:
                    self._users.setdefault(operand, []).append(one)
        self._places: dict[str, Place | None] = {}

    def resolved(self, operation: Operation) -> Operation:
        """An operation under the name of its instruction; a library's kernel keeps its own."""
        if not operation.in_graph or operation.name not in self._kernels:
            return operation
        return dataclasses.replace(operation, name=self._kernels[operation.name])

    def place(self, name: str) -> Place | None:
        """The place of an instruction; None if it is unknown."""
        if name not in self._places:
            one = self.module.instructions.get(name)
            self._places[name] = None if one is None else self._found(one)
        return self._places[name]

    def _found(self, one: Instruction) -> Place | None:
        # A name without a scope gives the phase LOOP: a weak answer, if a better one can be found.
        own = place_of(one.op_name) if one.op_name else None
        if own is not None and (own.phase is not Phase.LOOP or one.opcode in CONTAINERS):
            return own
        inside = [
            place
            for inner in (self.module.inside(one) if one.opcode == "fusion" else ())
            if inner.op_name and (place := place_of(inner.op_name)).phase is not Phase.LOOP
        ]
        if inside:
            # The last operation of a fusion names it: the others are computed for it.
            return inside[-1]
        if own is not None:
            return own
        near = self._near(one, {one.name}, _DEPTH)
        return near._replace(operation=one.opcode) if near is not None else None

    def _near(self, one: Instruction, seen: set[str], depth: int) -> Place | None:
        """The place of the nearest instruction with a name, operands first."""
        instructions = self.module.instructions
        around = [instructions[n] for n in one.operands if n in instructions]
        around += self._users.get(one.name, [])
        # All neighbours before their neighbours: the nearest name is the best guess. A container is
        # next to everything that it takes and returns, so it says nothing about one of them.
        for other in around:
            if other.op_name and other.name not in seen and other.opcode not in CONTAINERS:
                return place_of(other.op_name)
        for other in around:
            if depth and other.name not in seen and other.opcode not in CONTAINERS:
                seen.add(other.name)
                found = self._near(other, seen, depth - 1)
                if found is not None:
                    return found
        return Place(Phase.LOOP, "", one.opcode)


def programs_of(
    operations: Iterable[Operation], compiled: Sequence[jax.stages.Compiled]
) -> dict[int, NamedProgram]:
    """The program for each program id of operations.

    The profiler's ids of programs are not known to us. A program matches an id if it has all the
    instructions that ran under that id. Kernels of graphs may be a library's and are ignored.
    """
    ran: dict[int, set[str]] = {}
    for one in operations:
        names = ran.setdefault(one.program, set())
        if not one.in_graph:
            names.add(one.name)
    programs = [NamedProgram(each) for each in compiled]
    found = {}
    for number, names in ran.items():
        fitting = [p for p in programs if names <= p.module.instructions.keys()]
        if fitting:  # of several, the one with the fewest other instructions
            found[number] = min(fitting, key=lambda p: len(p.module.instructions))
    return found


def resolved(
    operations: Iterable[Operation], programs: Mapping[int, NamedProgram]
) -> list[Operation]:
    """Operations under the names of instructions, as far as their programs are known."""
    return [
        programs[one.program].resolved(one) if one.program in programs else one
        for one in operations
    ]
