"""A parser for the text of a compiled program: its computations and their instructions.

XLA prints one instruction per line:

    %fusion.3 = f32[32,64]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused, metadata={op_name="..."}
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

_HEAD = re.compile(r"^(ENTRY )?%?([^\s(]+) .*\{$")
_LINE = re.compile(r"^(ROOT )?%?(\S+) = (.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")  # XLA numbers the elements of long tuples: /*index=5*/
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of an array: XLA's name of its dtype, and its dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        if self.dtype in ("token", "opaque"):
            return 0
        # The first number in XLA's name of a dtype is its bits (bf16, s4, f8e4m3fn). Only `pred` has
        # none, and takes a byte.
        bits = _BITS.search(self.dtype)
        return -(-self.size * (int(bits[0]) if bits else 8) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation of a compiled program.

    Attributes:
        name: unique in the program.
        opcode: its opcode: "fusion", "dot", "while", ...
        shapes: the shapes of its result; several for a tuple.
        operands: the names of instructions it reads.
        calls: the names of computations it runs.
        op_name: JAX's scopes and operation; "" if it has none.
        attributes: the rest of its line.
        is_root: whether its result is that of its computation.
        number: the index of a parameter.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    calls: tuple[str, ...]
    op_name: str
    attributes: str
    is_root: bool
    number: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its result."""
        return sum(shape.nbytes for shape in self.shapes)


class Module:
    """A compiled program.

    Attributes:
        computations: the instructions of each, in execution order, by name.
        entry: the entry computation.
        instructions: all of them by name.
    """

    def __init__(self, computations: dict[str, list[Instruction]], entry: str) -> None:
        self.computations, self.entry = computations, entry
        self.instructions = {one.name: one for part in computations.values() for one in part}

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions of all computations that an instruction calls, transitively."""
        for called in instruction.calls:
            for each in self.computations.get(called, ()):
                yield each
                yield from self.inside(each)


def parse(text: str) -> Module:
    """A module from the text of a compiled program (`compiled.as_text()`).

    >>> module = parse('''ENTRY main {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %y = f32[8]{0} sine(%x), metadata={op_name="jit(f)/jvp(head)/sin"}
    ... }''')
    >>> module.instructions["y"].op_name, module.instructions["y"].nbytes
    ('jit(f)/jvp(head)/sin', 32)
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        line = line.strip()
        if current is None:
            head = _HEAD.match(line)
            # The line of the module may end with a brace too.
            if head and not line.startswith("HloModule"):
                current = computations.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
        elif line == "}" or line.startswith("} "):
            current = None
        else:
            found = _LINE.match(line)
            if found:
                current.append(_instruction(found))
    return Module(computations, entry)


def program_text(compiled: jax.stages.Compiled) -> str:
    """The text of a `jax.stages.Compiled`; "" if the platform has none."""
    return compiled.as_text() or ""


def _instruction(found: re.Match[str]) -> Instruction:
    root, name, rest = found[1], found[2], _COMMENT.sub("", found[3])
    # A result is one shape, or several in brackets; layouts after a shape may have brackets too.
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shapes = tuple(
        Shape(dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in _SHAPE.findall(_without_layouts(rest[:end]))
    )
    rest = rest[end:].lstrip()
    start = rest.index("(")
    close = _closing(rest, start)
    opcode, inside, attributes = rest[:start], rest[start + 1 : close], rest[close + 1 :]
    calls = tuple(
        each.strip().lstrip("%")
        for group in _CALLED.findall(attributes)
        for each in group.strip("{}").split(",")
        if each.strip()
    )
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', attributes)
    # Between the brackets of a constant is its value, not a list of operands.
    operands = tuple(re.findall(r"%([^\s,()]+)", inside)) if opcode != "constant" else ()
    return Instruction(
        name,
        opcode,
        shapes,
        operands,
        calls,
        op_name[1] if op_name else "",
        attributes,
        bool(root),
        int(inside) if opcode == "parameter" else None,
    )


def _without_layouts(text: str) -> str:
    return re.sub(r"\{[^{}]*\}", "", text)


def _closing(text: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`; quoted text is skipped."""
    depth, quoted = 0, False
    for place in range(start, len(text)):
        character = text[place]
        if character == '"' and text[place - 1] != "\\":
            quoted = not quoted
        elif not quoted and character == "(":
            depth += 1
        elif not quoted and character == ")":
            depth -= 1
            if not depth:
                return place
    return len(text) - 1
