"""The buffers that are live at a compiled program's peak memory use, and their owners.

XLA's text is in execution order. A buffer is live from the instruction that defines it to the last that
reads it. Tuples and loops pass buffers on.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.base.spans.scopes import STASH
from tailrace.profiling.programs.hlo_text import Instruction
from tailrace.profiling.programs.named_operations import NamedProgram
from tailrace.profiling.programs.op_names import Phase

_PASSES_ON = {"bitcast", "while", "optimization-barrier", "copy-done", "get-tuple-element", "tuple"}
_RUNS_OTHERS = {"while", "conditional", "call"}

RECORDS = "records"
"""The owner of what a program returns besides the state: losses, and what taps read."""

Buffers = list[frozenset[str]]
"""For each element of a tuple (or the single result), its buffers."""


def alive_at_peak(program: NamedProgram, owner: Callable[[Instruction], str]) -> dict[str, int]:
    """Bytes by owner, largest first, at peak memory use.

    Args:
        program: the program.
        owner: returns the owner of an argument of the program.
    """
    module = program.module
    _, alive = _peak(program, module.entry, owner)
    return dict(sorted(alive.items(), key=lambda item: -item[1]))


def _peak(
    program: NamedProgram, name: str, owner: Callable[[Instruction], str] | None
) -> tuple[int, dict[str, int]]:
    """The peak of one computation; `owner` for that of the program, whose arguments count."""
    instructions = program.module.computations.get(name, [])
    buffers: dict[str, Buffers] = {}
    last: dict[str, int] = {}
    # The last use of each buffer first: only then is it known which ones an instruction frees.
    for place, one in enumerate(instructions):
        buffers[one.name] = _made(one, buffers, bool(owner), program)
        for operand in one.operands:
            for each in buffers.get(operand, ()):
                last.update(dict.fromkeys(each, place))
        if one.is_root:  # the caller uses it, after the last instruction
            for each in buffers[one.name]:
                last.update(dict.fromkeys(each, len(instructions)))
    # What an inner computation returns is in the buffers of its caller: of a loop, those of its carry,
    # which XLA overwrites.
    of_caller: set[str] = set()
    if owner is None:
        roots = [one for one in instructions if one.is_root]
        of_caller.update(b for one in roots for each in buffers[one.name] for b in each)
    alive: dict[str, tuple[str, int]] = {}
    most, found = 0, {}
    for place, one in enumerate(instructions):
        # Otherwise its result is one of its operands' buffers.
        made = {b for each in buffers[one.name] for b in each}
        if one.name in made and one.name not in of_caller:
            whose = owner(one) if owner and one.opcode == "parameter" else _owner(program, one)
            # Without a scope, and returned: the arrays to which every iteration adds its results.
            if owner and whose == Phase.LOOP and last.get(one.name) == len(instructions):
                whose = RECORDS
            alive[one.name] = (whose, one.nbytes)
        inner, live = 0, {}
        if one.opcode in _RUNS_OTHERS:
            # Condition and body, or branches, run one at a time: the largest counts.
            for called in one.calls:
                size, theirs = _peak(program, called, None)
                if size > inner:
                    inner, live = size, theirs
        now = sum(size for _, size in alive.values()) + inner
        if now > most:
            most, found = now, dict(live)
            for whose, size in alive.values():
                found[whose] = found.get(whose, 0) + size
        for operand in {*one.operands, one.name}:
            for each in buffers.get(operand, ()):
                for buffer in each:
                    # The caller of the program holds its arguments until it ends.
                    argument = owner is not None and _is_argument(program, buffer)
                    if last.get(buffer, place) <= place and not argument:
                        alive.pop(buffer, None)
    return most, found


def _made(
    one: Instruction, buffers: dict[str, Buffers], is_entry: bool, program: NamedProgram
) -> Buffers:
    """The buffers of an instruction's result: a new one, or those it passes on."""
    given = [buffers.get(operand, [frozenset()]) for operand in one.operands]
    if one.opcode == "tuple":
        return [frozenset().union(*each) for each in given]
    if one.opcode == "get-tuple-element" and given:
        number = one.attributes.partition("index=")[2].split(",")[0].strip()
        place = int(number) if number.isdigit() else 0
        return [given[0][place]] if place < len(given[0]) else [frozenset()]
    if one.opcode in _PASSES_ON and given:
        return given[0]
    if one.opcode == "parameter" and not is_entry:
        return [frozenset()] * max(1, len(one.shapes))  # counted at its definition
    if one.opcode == "constant":
        return [frozenset()]
    if _writes_in_place(one, program) and given:
        return given[0]
    return [frozenset({one.name})] * max(1, len(one.shapes))


def _writes_in_place(one: Instruction, program: NamedProgram) -> bool:
    if one.opcode == "fusion" and one.calls:
        inside = program.module.computations.get(one.calls[0], [])
        return any(i.is_root and i.opcode == "dynamic-update-slice" for i in inside)
    return one.opcode == "dynamic-update-slice"


def _is_argument(program: NamedProgram, name: str) -> bool:
    found = program.module.instructions.get(name)
    return found is not None and found.opcode == "parameter"


def _owner(program: NamedProgram, one: Instruction) -> str:
    """The owner of a buffer that the program defines: a scope's residuals, or its temporaries."""
    place = program.place(one.name)
    if place is None:
        return str(Phase.LOOP)
    what = {Phase.FORWARD: "residuals", Phase.BACKWARD: "gradients"}.get(place.phase)
    if what is None:
        return "stash" if STASH in one.op_name else str(place.phase)
    return f"{what} of {place.scope}" if place.scope else what
