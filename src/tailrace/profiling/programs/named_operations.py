"""The program of an operation, and the scope and phase of each instruction.

Instructions that XLA adds (copies, two-part reductions) have no name. They get the place of their
operands, or else that of their users.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tailrace.profiling.programs.device_operations import Operation
from tailrace.profiling.programs.hlo_text import Instruction, Module, parse, program_text
from tailrace.profiling.programs.op_names import Phase, Place, place_of

CONTAINERS = {"while", "conditional", "call", "async-start", "async-done"}
"""Instructions that run others, whose time is not self time."""

_DEPTH = 8
"""The most instructions to search for a name."""


class NamedProgram:
    """A compiled program whose instructions have places.

    Args:
        compiled: a `jax.stages.Compiled`.
    """

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.module: Module = parse(program_text(compiled))
        self._users: dict[str, list[Instruction]] = {}
        for part in self.module.computations.values():
            for one in part:
                for operand in one.operands:
                    self._users.setdefault(operand, []).append(one)
        self._places: dict[str, Place | None] = {}

    def place(self, name: str) -> Place | None:
        """The place of an instruction; None if it is unknown."""
        if name not in self._places:
            one = self.module.instructions.get(name)
            self._places[name] = None if one is None else self._found(one)
        return self._places[name]

    def _found(self, one: Instruction) -> Place | None:
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
    operations: Iterable[Operation], compiled: Sequence[Any]
) -> dict[int, NamedProgram]:
    """The program for each program id of operations.

    The profiler's ids are unknown to us: a program matches an id if it has all the instructions that
    ran under it.
    """
    ran: dict[int, set[str]] = {}
    for one in operations:
        ran.setdefault(one.program, set()).add(one.name)
    programs = [NamedProgram(each) for each in compiled]
    found = {}
    for number, names in ran.items():
        fitting = [p for p in programs if names <= p.module.instructions.keys()]
        if fitting:  # of several, the one with the fewest other instructions
            found[number] = min(fitting, key=lambda p: len(p.module.instructions))
    return found
