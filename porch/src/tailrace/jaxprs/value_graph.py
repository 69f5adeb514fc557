"""A program as a graph of values: what makes each, and what uses it, as XLA sees it.

Calls are looked through, since XLA puts their contents in their place. Loops are not: what a loop
carries begins and ends at its border. What a loop only reads is the same value inside.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tailrace.jaxprs.control import Call, Cond, Scan, While, control
from tailrace.jaxprs.internals import JaxprEqn, Literal
from tailrace.jaxprs.own_equations import is_mark
from tailrace.jaxprs.visitor import Visitor
from tailrace.jaxprs.walk import Position, concerns_us

BORDER, UNKNOWN = "border", "unknown"
"""Operations that are none: the end of a loop, and what XLA may open or not."""

_SAME = frozenset(
    ["broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "neg", "reshape",
     "rev", "slice", "squeeze", "transpose"]
)  # fmt: skip
"""Operations that compute nothing new, element by element, apart from sign, shape and dtype."""

Around = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Value:
    """A value of a program.

    Attributes:
        shape: its shape.
        made_by: the operation, with its inputs; None for an argument.
        literal: the literal that it is, if it is one.
        constant: whether it is known when the program is compiled.
        users: the operations that use it, and as which operand.
        around: the equations around the one that uses a literal, by identity; outermost first.
        equation: that equation.
    """

    shape: tuple[int, ...] = ()
    made_by: Operation | None = None
    literal: Literal | None = None
    constant: bool = False
    users: list[tuple[Operation, int]] = dataclasses.field(default_factory=list)
    around: Around | None = None
    equation: JaxprEqn | None = None

    def source(self) -> Value:
        """The value that this one is, but for its sign, exponent, shape and dtype."""
        value = self
        while value.made_by is not None and (kept := value.made_by.kept) is not None:
            value = kept
        return value

    def uses(self) -> Iterator[tuple[Operation, int, Value]]:
        """The operations that use it, also in another shape; as which operand, and in which shape."""
        for operation, index in self.users:
            if operation.kept is self:
                yield from operation.results[0].uses()
            else:
                yield operation, index, self

    @property
    def is_spread(self) -> bool:
        """Whether it is a smaller value, repeated."""
        value = self
        while value.made_by is not None and (kept := value.made_by.kept) is not None:
            if value.made_by.name == "broadcast_in_dim":
                return True
            value = kept
        return False

    @property
    def is_power_of_two(self) -> bool:
        """Whether it is a literal with which a product is exact, in whatever order."""
        number = self.source().literal
        return number is not None and abs(math.frexp(_float(number))[0]) == 0.5


@dataclasses.dataclass(eq=False)
class Operation:
    """An equation that computes something; its name, inputs and results."""

    name: str
    inputs: list[Value]
    results: list[Value] = dataclasses.field(default_factory=list)

    @property
    def kept(self) -> Value | None:
        """The input that the result is, but for its sign, exponent, shape and dtype; or None."""
        if self.name in _SAME:
            return self.inputs[0]
        if self.name in ("mul", "div") and self.inputs[1].is_power_of_two:
            return self.inputs[0]
        return self.inputs[1] if self.name == "mul" and self.inputs[0].is_power_of_two else None

    def others(self, index: int) -> list[Value]:
        """The inputs but one."""
        return [value for number, value in enumerate(self.inputs) if number != index]


class ValueGraph(Visitor[Value, Around]):
    """The values of a program.

    Attributes:
        literals: every literal that an equation uses, one for each use.
    """

    def __init__(self, equations: Sequence[JaxprEqn]) -> None:
        self.literals: list[Value] = []
        self.run_equations(equations, _Arguments(), ())

    def constant(self, value: Any, var: Any) -> Value:
        """A literal, or a constant of a program inside."""
        literal = var if isinstance(var, Literal) else None
        return Value(_shape(var), literal=literal, constant=True)

    def plain(
        self, eqn: JaxprEqn, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        """One operation; a mark is none."""
        self._note(eqn, inputs, around)
        return inputs if is_mark(eqn) else self._made(eqn.primitive.name, inputs, eqn.outvars)

    def call(self, call: Call, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """The contents."""
        self._note(call.eqn, inputs, around)
        return self.run_inner(call.program, inputs, (*around, id(call.eqn)), here)

    def scan(self, scan: Scan, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """A body between two borders; a single pass may be opened."""
        self._note(scan.eqn, inputs, around)
        kind = BORDER if scan.length > 1 or concerns_us(scan.eqn) else UNKNOWN
        consts, *_ = scan.split(inputs)
        entering = self._made(kind, inputs, scan.body.jaxpr.invars)[len(consts) :]
        inside = (*around, id(scan.eqn))
        results = self.run_inner(scan.body, [*consts, *entering], inside, here)
        return self._made(kind, results, scan.eqn.outvars)

    def while_loop(
        self, loop: While, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        """Its programs, of which nothing is known from outside."""
        return self._closed(loop, inputs, around, here)

    def cond(self, cond: Cond, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """Its branches, of which nothing is known from outside."""
        return self._closed(cond, inputs, around, here)

    def _closed(
        self, found: While | Cond, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        self._note(found.eqn, inputs, around)
        for inner in found.inside:
            entering = self._made(UNKNOWN, inputs, inner.jaxpr.invars)
            self._made(UNKNOWN, self.run_inner(inner, entering, (*around, 0), here), ())
        return self._made(UNKNOWN, inputs, found.eqn.outvars)

    def _made(self, name: str, inputs: list[Value], outvars: Sequence[Any]) -> list[Value]:
        operation = Operation(name, inputs)
        known = operation.kept is not None and operation.kept.constant
        operation.results = [Value(_shape(var), operation, constant=known) for var in outvars]
        for index, value in enumerate(inputs):
            value.users.append((operation, index))
        return operation.results

    def _note(self, eqn: JaxprEqn, inputs: list[Value], around: Around) -> None:
        for value in inputs:
            if value.literal is not None and value.around is None:
                value.around, value.equation = around, eqn
                self.literals.append(value)


class _Arguments(dict[Any, Value]):
    """The values of variables; one that nothing made is an argument."""

    def __missing__(self, var: Any) -> Value:
        value = self[var] = Value(_shape(var))
        return value


def is_opened(eqn: JaxprEqn) -> bool:
    """Whether an equation is emitted as its contents, or may be without a change for XLA."""
    found = control(eqn)
    return concerns_us(eqn) or (isinstance(found, Call) and (found.is_jit or found.is_custom))


def _float(literal: Literal) -> float:
    """The number that a literal is; zero for an array."""
    return float(literal.val) if _shape(literal) == () else 0.0


def _shape(var: Any) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())
