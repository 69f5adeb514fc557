"""The single traversal of a program through its loops, branches and calls.

A visitor interprets a program equation by equation on values of some type: traced arrays, numbers,
flags. Subclasses implement a hook for each kind of equation; `control.py` defines the objects that the
hooks receive.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from tailrace.jaxprs import internals
from tailrace.jaxprs.control import Call, Cond, Inner, Scan, While, control
from tailrace.jaxprs.internals import Atom, Jaxpr, JaxprEqn, Literal, Var
from tailrace.jaxprs.walk import Position

Value = TypeVar("Value")
Around = TypeVar("Around")


class Visitor(abc.ABC, Generic[Value, Around]):
    """Interprets programs on values of any type.

    `Around` is context that a visitor passes down from a program to its inner programs (a frame, say);
    `here` is the position of an equation.
    """

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        inputs: Sequence[Value],
        around: Around,
        position: Position = (),
    ) -> list[Value]:
        """Interpret a program; returns its results."""
        known: dict[Var, Value] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = self.constant(const, var)
        known.update(zip(jaxpr.invars, inputs, strict=True))
        self.run_equations(jaxpr.eqns, known, around, position)
        return [self._read(known, var) for var in jaxpr.outvars]

    def run_inner(
        self, inner: Inner, inputs: Sequence[Value], around: Around, here: Position
    ) -> list[Value]:
        """Interpret a program inside the equation at `here`; returns its results."""
        return self.run(inner.jaxpr, inner.consts, inputs, around, (*here, inner.number))

    def run_equations(
        self,
        equations: Sequence[JaxprEqn],
        known: dict[Var, Value],
        around: Around,
        position: Position = (),
        first: int = 0,
    ) -> None:
        """Interpret equations whose operands are in `known`, and add their results to it.

        `position` is that of the program that contains them, `first` the index of the first one in it.
        """
        for index, eqn in enumerate(equations, start=first):
            # A position, not `id(eqn)`: JAX shares one inner program between equal calls.
            here = (*position, index)
            inputs = [self._read(known, var) for var in eqn.invars]
            with self.context(eqn):
                outputs = self._equation(eqn, inputs, around, here)
                outputs = self.made(eqn, inputs, outputs, around, here)
            # Results that are never read have a variable too (`_` in the printed program), so that
            # counts agree; `strict` finds a hook that returns too few.
            known.update(zip(eqn.outvars, outputs, strict=True))

    def _read(self, known: dict[Var, Value], var: Atom) -> Value:
        return self.constant(var.val, var) if isinstance(var, Literal) else known[var]

    def _equation(
        self, eqn: JaxprEqn, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        # Asked first, because most equations need not be entered, and reading them costs time.
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

    def constant(self, value: Any, var: Atom) -> Value:
        """The value of a constant or a literal; `var.aval` has its shape and dtype."""
        return value

    def context(self, eqn: JaxprEqn) -> AbstractContextManager[Any]:
        """A context manager to enter while an equation is interpreted."""
        return contextlib.nullcontext()

    def enters(self, eqn: JaxprEqn, here: Position) -> bool:
        """Whether to descend into an equation's programs; otherwise it is `plain`."""
        return True

    def made(
        self,
        eqn: JaxprEqn,
        inputs: list[Value],
        outputs: list[Value],
        around: Around,
        here: Position,
    ) -> list[Value]:
        """Called after each equation; returns the equation's results, possibly changed."""
        return outputs

    @abc.abstractmethod
    def plain(
        self, eqn: JaxprEqn, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        """An equation that is not entered."""

    # Equations that are not entered and those that cannot be entered differ for a rewriter: the latter
    # may hold something of ours that it must refuse. To all others they are the same.
    def opaque(
        self, eqn: JaxprEqn, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        """An equation without programs that can be entered."""
        return self.plain(eqn, inputs, around, here)

    @abc.abstractmethod
    def scan(self, scan: Scan, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """A loop whose length is known at compile time."""

    @abc.abstractmethod
    def while_loop(
        self, loop: While, inputs: list[Value], around: Around, here: Position
    ) -> list[Value]:
        """A loop whose length is known only at run time."""

    @abc.abstractmethod
    def cond(self, cond: Cond, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """A choice between branches."""

    @abc.abstractmethod
    def call(self, call: Call, inputs: list[Value], around: Around, here: Position) -> list[Value]:
        """A call: jit, checkpoint, a function with a custom derivative, a unit of a pipeline."""


class Emitter(Visitor[Any, Around]):
    """A visitor whose values are arrays, traced or concrete: it emits the program again.

    Equations keep their names and source lines. Loops, branches and calls are emitted around the
    rewritten programs; a function with a custom derivative is inlined, because programs are rewritten
    after differentiation, when its rule has been applied already.

    Attributes:
        keeps_jits: whether a jit is emitted as one, not inlined; see `Call.again`.
    """

    keeps_jits = False

    def context(self, eqn: JaxprEqn) -> AbstractContextManager[Any]:
        """Keep the equation's name stack and source lines."""
        return internals.equation_context(eqn)

    @abc.abstractmethod
    def enters(self, eqn: JaxprEqn, here: Position) -> bool:
        """Whether something inside an equation changes; otherwise it is emitted whole."""

    def plain(self, eqn: JaxprEqn, inputs: list[Any], around: Around, here: Position) -> list[Any]:
        """Emit the equation unchanged."""
        return internals.bind_again(eqn, inputs)

    def scan(self, scan: Scan, inputs: list[Any], around: Around, here: Position) -> list[Any]:
        """Emit the loop with its rewritten body."""
        return scan.again(self._function(scan.body, around, here), inputs)

    def while_loop(
        self, loop: While, inputs: list[Any], around: Around, here: Position
    ) -> list[Any]:
        """Emit the loop with its rewritten condition and body."""
        parts = [self._function(inner, around, here) for inner in loop.inside]
        return loop.again(parts[0], parts[1], inputs)

    def cond(self, cond: Cond, inputs: list[Any], around: Around, here: Position) -> list[Any]:
        """Emit the choice with its rewritten branches."""
        return cond.again([self._function(one, around, here) for one in cond.branches], inputs)

    def call(self, call: Call, inputs: list[Any], around: Around, here: Position) -> list[Any]:
        """Emit the rewritten contents, under `jax.checkpoint` if they were."""
        function = self._function(call.program, around, here)
        return call.again(function, inputs, jitted=self.keeps_jits)

    def _function(self, inner: Inner, around: Around, here: Position) -> Any:
        return lambda values: self.run_inner(inner, values, around, here)
