"""The one way to follow a program through its loops, branches and calls.

A visitor runs a program equation by equation on values of its own kind: arrays that are being traced,
numbers, flags. Subclasses fill in a hook for each kind of equation; `control.py` has what they get.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from tailrace.jaxprs import internals
from tailrace.jaxprs.control import Call, Cond, Inner, Scan, While, control
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, Literal
from tailrace.jaxprs.walk import Position

Value = TypeVar("Value")
Around = TypeVar("Around")


class Visitor(abc.ABC, Generic[Value, Around]):
    """Runs programs on values of any kind.

    `Around` is what a visitor hands down from a program to those inside it (a frame, say); `here` is
    the position of an equation.
    """

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        inputs: Sequence[Value],
        around: Around,
        position: Position = (),
    ) -> list[Value]:
        """The results of a program."""
        known: dict[Any, Any] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = self.constant(const, var)
        known.update(zip(jaxpr.invars, inputs, strict=True))
        self.run_equations(jaxpr.eqns, known, around, position)
        return [self._read(known, var) for var in jaxpr.outvars]

    def run_inner(
        self, inner: Inner, inputs: Sequence[Value], around: Around, here: Position
    ) -> list[Value]:
        """The results of a program inside the equation at `here`."""
        return self.run(inner.jaxpr, inner.consts, inputs, around, (*here, inner.number))

    def run_equations(
        self,
        equations: Sequence[JaxprEqn],
        known: dict[Any, Any],
        around: Around,
        position: Position = (),
        first: int = 0,
    ) -> None:
        """Run equations whose values so far are in `known`, and add theirs.

        `position` is that of the program they are in, and `first` the index of the first in it.
        """
        for index, eqn in enumerate(equations, start=first):
            here = (*position, index)
            inputs = [self._read(known, var) for var in eqn.invars]
            with self.context(eqn):
                outputs = self._equation(eqn, inputs, around, here)
                outputs = self.made(eqn, inputs, outputs, around, here)
            known.update(zip(eqn.outvars, outputs, strict=True))

    def _read(self, known: dict[Any, Any], var: Any) -> Any:
        return self.constant(var.val, var) if isinstance(var, Literal) else known[var]

    def _equation(
        self, eqn: JaxprEqn, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        if not self.enters(eqn, here):
            return self.plain(eqn, inputs, around, here)
        found = control(eqn)
        if isinstance(found, Scan):
            return self.scan(found, inputs, around, here)
        if isinstance(found, While):
            return self.while_loop(found, inputs, around, here)
        if isinstance(found, Cond):
            return self.cond(found, inputs, around, here)
        if isinstance(found, Call):
            return self.call(found, inputs, around, here)
        return self.opaque(eqn, inputs, around, here)

    # -- hooks ----------------------------------------------------------------------------------

    def constant(self, value: Any, var: Any) -> Any:
        """The value of a constant or a literal; `var` has its form."""
        return value

    def context(self, eqn: JaxprEqn) -> AbstractContextManager[Any]:
        """What is entered while an equation is run."""
        return contextlib.nullcontext()

    def enters(self, eqn: JaxprEqn, here: Position) -> bool:
        """Whether an equation's programs are followed; otherwise it is `plain`."""
        return True

    def made(
        self,
        eqn: JaxprEqn,
        inputs: list[Value],
        outputs: list[Value],
        around: Around,
        here: Position,
    ) -> list[Value]:
        """Called behind each equation; what it returns are the equation's results."""
        return outputs

    @abc.abstractmethod
    def plain(
        self, eqn: JaxprEqn, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        """An equation that is not followed."""

    def opaque(
        self, eqn: JaxprEqn, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        """An equation without programs that can be followed."""
        return self.plain(eqn, inputs, around, here)

    @abc.abstractmethod
    def scan(self, scan: Scan, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """A loop whose length is known."""

    @abc.abstractmethod
    def while_loop(
        self, loop: While, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        """A loop whose length is not."""

    @abc.abstractmethod
    def cond(self, cond: Cond, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """A choice between programs."""

    @abc.abstractmethod
    def call(self, call: Call, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """A call: jit, checkpoint, a function with its own derivative, a unit of a pipeline."""


class Emitter(Visitor[Any, Around]):
    """A visitor of values that are traced or computed: it emits a program once more.

    Equations keep their names and source lines. Loops, branches and calls are emitted again around
    what their programs become; a function with a derivative of its own becomes its contents.
    """

    def context(self, eqn: JaxprEqn) -> AbstractContextManager[Any]:
        """The equation's names and source lines."""
        return internals.equation_context(eqn)

    @abc.abstractmethod
    def enters(self, eqn: JaxprEqn, here: Position) -> bool:
        """Whether something in an equation changes; otherwise it is emitted whole."""

    def plain(self, eqn: JaxprEqn, inputs: list[Any], around: Around, here: Position) -> list[Any]:
        """The equation as it is."""
        return internals.bind_again(eqn, inputs)

    def scan(self, scan: Scan, inputs: list[Any], around: Around, here: Position) -> list[Any]:
        """The loop around its new body."""
        return scan.again(self._function(scan.body, around, here), inputs)

    def while_loop(
        self, loop: While, inputs: list[Any], around: Around, here: Position
    ) -> list[Any]:
        """The loop around its new condition and body."""
        parts = [self._function(inner, around, here) for inner in loop.inside]
        return loop.again(parts[0], parts[1], inputs)

    def cond(self, cond: Cond, inputs: list[Any], around: Around, here: Position) -> list[Any]:
        """The choice between its new branches."""
        return cond.again([self._function(one, around, here) for one in cond.branches], inputs)

    def call(self, call: Call, inputs: list[Any], around: Around, here: Position) -> list[Any]:
        """The contents, recomputed where they were."""
        return call.again(self._function(call.program, around, here), inputs)

    def _function(self, inner: Inner, around: Around, here: Position) -> Any:
        return lambda values: self.run_inner(inner, values, around, here)
