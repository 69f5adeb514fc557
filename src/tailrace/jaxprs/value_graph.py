"""A program as a graph of values: the producer and the users of each, as XLA sees them.

Calls are transparent, since XLA inlines them. Loops are not: carried values begin and end at the loop's
border, because XLA's simplifier does not look across it. A loop's constants are the same value inside.
"""

# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tailrace.jaxprs.control import Call, Cond, Scan, While, control
from tailrace.jaxprs.internals import Atom, JaxprEqn, Literal, Var
from tailrace.jaxprs.own_equations import is_mark
from tailrace.jaxprs.visitor import Visitor
from tailrace.jaxprs.walk import Position, concerns_us

BORDER, UNKNOWN = "border", "unknown"
"""Pseudo-operations: a loop's border, and a construct that XLA may or may not inline."""

_SAME = frozenset(
    ["broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "neg", "reshape",
     "rev", "slice", "squeeze", "transpose"]
)  # fmt: skip
"""Operations that change at most the sign, shape and dtype of their operand's elements."""

Around = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Value:
    """A value of a program.

    Attributes:
        shape: its shape.
        dtype: its dtype; None for what has none.
        made_by: the operation that computes it; None for an argument.
        literal: the literal, if it is one.
        constant: whether it is known at compile time.
        users: the operations that use it, each with the index of the operand.
        around: of a literal, the ids of the equations around the one that uses it, outermost first.
        equation: of a literal, the equation that uses it.
    """

    shape: tuple[int, ...] = ()
    dtype: Any = None
    made_by: Operation | None = None
    literal: Literal | None = None
    constant: bool = False
    users: list[tuple[Operation, int]] = dataclasses.field(default_factory=list)
    around: Around | None = None
    equation: JaxprEqn | None = None

    def source(self) -> Value:
        """The value this one equals up to sign, exponent, shape and dtype.

        XLA's rules see through such operations, so every question about a value is about its source.
        """
        value = self
        while value.made_by is not None and (kept := value.made_by.kept) is not None:
            value = kept
        return value  # ends: every step goes to an earlier equation

    def uses(self) -> Iterator[tuple[Operation, int, Value]]:
        """Its uses, through reshapes and the like: operation, operand index, and the value used."""
        for operation, index in self.users:
            if operation.kept is self:
                yield from operation.results[0].uses()
            else:
                yield operation, index, self

    @property
    def is_spread(self) -> bool:
        """Whether it is the broadcast of a smaller value."""
        value = self
        while value.made_by is not None and (kept := value.made_by.kept) is not None:
            if value.made_by.name == "broadcast_in_dim":
                return True
            value = kept
        return False

    @property
    def is_power_of_two(self) -> bool:
        """Whether it is a literal power of two: products with it are exact, in any order."""
        number = self.source().literal
        return number is not None and abs(math.frexp(_float(number))[0]) == 0.5


@dataclasses.dataclass(eq=False)
class Operation:
    """A node of the graph: the name, inputs and results of an equation, and its position.

    What enters a loop or a branch is the result of a pseudo-operation without position.
    """

    name: str
    inputs: list[Value]
    results: list[Value] = dataclasses.field(default_factory=list)
    position: Position | None = None

    # Found once: asked again for each use, a chain of squares (x = x * x) takes twice as long for each.
    @functools.cached_property
    def kept(self) -> Value | None:
        """The input that the result equals up to sign, exponent, shape and dtype; or None."""
        if self.name in _SAME:
            return self.inputs[0]
        # A power of two only changes the exponent, so XLA may move it past other products exactly.
        if self.name in ("mul", "div") and self.inputs[1].is_power_of_two:
            return self.inputs[0]
        return self.inputs[1] if self.name == "mul" and self.inputs[0].is_power_of_two else None

    def others(self, index: int) -> list[Value]:
        """All inputs except the one at `index`."""
        return [value for number, value in enumerate(self.inputs) if number != index]


class ValueGraph(Visitor[Value, Around]):
    """The values of a program.

    Args:
        equations: the equations of the program.
        first: the index of the first one in it.

    Attributes:
        equations: the equations of the program.
        literals: every use of a literal, as a value.
        operations: the operations, in execution order.
    """

    def __init__(self, equations: Sequence[JaxprEqn], first: int = 0) -> None:
        self.equations = equations
        self.literals: list[Value] = []
        self.operations: list[Operation] = []
        self.run_equations(equations, _Arguments(), (), first=first)

    def constant(self, value: Any, var: Atom) -> Value:
        """A literal, or a constant of an inner program."""
        literal = var if isinstance(var, Literal) else None
        return Value(_shape(var), _dtype(var), literal=literal, constant=True)

    def plain(
        self, eqn: JaxprEqn, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        """One operation; marks are transparent."""
        self._note(eqn, inputs, around)
        if is_mark(eqn):
            return inputs
        return self._made(eqn.primitive.name, inputs, eqn.outvars, here)

    def call(self, call: Call, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """The contents of the call, inlined."""
        self._note(call.eqn, inputs, around)
        return self.run_inner(call.program, inputs, (*around, id(call.eqn)), here)

    def scan(self, scan: Scan, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """The body between two borders; XLA may inline a loop of one iteration."""
        self._note(scan.eqn, inputs, around)
        # XLA may inline a loop of one iteration. One with our equations is emitted with another, often
        # dynamic, length, and stays a loop.
        kind = BORDER if scan.length > 1 or concerns_us(scan.eqn) else UNKNOWN
        consts, *_ = scan.split(inputs)
        entering = self._made(kind, inputs, scan.body.jaxpr.invars)[len(consts) :]
        inside = (*around, id(scan.eqn))
        results = self.run_inner(scan.body, [*consts, *entering], inside, here)
        return self._made(kind, results, scan.eqn.outvars, here)

    def while_loop(
        self, loop: While, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        """Its programs, opaque from outside: how often they run is unknown."""
        return self._closed(loop, inputs, around, here)

    def cond(self, cond: Cond, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """Its branches, opaque from outside: which one runs is unknown."""
        return self._closed(cond, inputs, around, here)

    def _closed(
        self, found: While | Cond, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        self._note(found.eqn, inputs, around)
        # Every value that enters or leaves gets the pseudo-operation UNKNOWN, which `free_numbers`
        # treats as the worst case.
        for inner in found.inside:
            entering = self._made(UNKNOWN, inputs, inner.jaxpr.invars)
            self._made(UNKNOWN, self.run_inner(inner, entering, (*around, 0), here), ())
        return self._made(UNKNOWN, inputs, found.eqn.outvars, here)

    def _made(
        self,
        name: str,
        inputs: list[Value],
        outvars: Sequence[Atom],
        here: Position | None = None,
    ) -> list[Value]:
        operation = Operation(name, inputs, position=here)
        self.operations.append(operation)
        # XLA computes what depends on constants alone while it compiles. An array without elements is
        # one, wherever it comes from: its sum is the literal 0.
        known = name not in (BORDER, UNKNOWN) and all(value.constant for value in inputs)
        operation.results = [
            Value(_shape(var), _dtype(var), operation, constant=known or 0 in _shape(var))
            for var in outvars
        ]
        for index, value in enumerate(inputs):
            value.users.append((operation, index))
        return operation.results

    def _note(self, eqn: JaxprEqn, inputs: list[Value], around: Around) -> None:
        for value in inputs:
            # The first use decides; each use of a literal is a separate `Value` anyway.
            if value.literal is not None and value.around is None:
                value.around, value.equation = around, eqn
                self.literals.append(value)


class _Arguments(dict[Var, Value]):
    """The values of variables; a variable that no equation defined is an argument."""

    def __missing__(self, var: Var) -> Value:
        value = self[var] = Value(_shape(var), _dtype(var))
        return value


def is_opened(eqn: JaxprEqn) -> bool:
    """Whether an equation is inlined when the program is emitted, or could be with equal results."""
    found = control(eqn)
    return concerns_us(eqn) or (isinstance(found, Call) and (found.is_jit or found.is_custom))


def _float(literal: Literal) -> float:
    """A scalar literal as a number; zero for an array, or for a complex one."""
    known = _shape(literal) == () and not np.iscomplexobj(literal.val)
    return float(literal.val) if known else 0.0


def _shape(var: Atom) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _dtype(var: Atom) -> Any:
    return getattr(var.aval, "dtype", None)
