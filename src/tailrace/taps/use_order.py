"""The order in which a step uses its parameters: from the input of the model to its output.

Trees of parameters are sorted by name, which says nothing about the model. The program does: the first
layer is the one whose parameters are combined with the element first.
"""

from __future__ import annotations

from tailrace.jaxprs.control import Call, Cond, Scan, While
from tailrace.jaxprs.internals import Atom, Jaxpr, JaxprEqn
from tailrace.jaxprs.own_equations import is_mark, tag_in
from tailrace.jaxprs.visitor import Visitor
from tailrace.jaxprs.walk import Position

PREFIX = "param/"

MADE_FOR_EACH = ("param", "grad", "accumulated", "reduced", "update")
"""Kinds of which there is one tensor for each parameter, under the parameter's name."""

Held = str | None
"""The origin of a value: one parameter, by name; constants alone (empty); or anything else (None)."""


class UseOrder(Visitor[Held, None]):
    """Follows parameters from the marks that name them to their first use.

    Attributes:
        names: the names of the parameters, in the order of their first use.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._used: dict[str, None] = {}
        self.run(jaxpr, [None] * len(jaxpr.constvars), [None] * len(jaxpr.invars), None)
        self.names = list(self._used)

    def constant(self, value: object, var: Atom) -> Held:
        """It depends on no parameter."""
        return ""

    def plain(self, eqn: JaxprEqn, inputs: list[Held], around: None, here: Position) -> list[Held]:
        """One operation; a mark of a parameter names what it marks."""
        if is_mark(eqn):
            tag = tag_in(eqn)
            # The other marks are identities: they pass on what they mark.
            named = tag is not None and tag.role == "value" and tag.name.startswith(PREFIX)
            return [tag.name.removeprefix(PREFIX)] if tag is not None and named else inputs
        found = dict.fromkeys(filter(None, inputs))
        # A cast or a transposed weight is not yet a use: all parameters may be cast before the first
        # layer runs.
        if inputs and None not in inputs and len(found) <= 1:
            return [next(iter(found), "")] * len(eqn.outvars)
        self._used.update(found)
        return [None] * len(eqn.outvars)

    def call(self, call: Call, inputs: list[Held], around: None, here: Position) -> list[Held]:
        """The contents of the call, inlined."""
        return self.run_inner(call.program, inputs, around, here)

    def scan(self, scan: Scan, inputs: list[Held], around: None, here: Position) -> list[Held]:
        """One iteration of the body."""
        # Once is enough: the order of first uses is that of the first iteration. Rows of a stacked
        # parameter are that parameter.
        return self.run_inner(scan.body, inputs, around, here)

    def while_loop(
        self, loop: While, inputs: list[Held], around: None, here: Position
    ) -> list[Held]:
        """One iteration of the body."""
        _, consts, carry = loop.split(inputs)
        return self.run_inner(loop.body, [*consts, *carry], around, here)

    def cond(self, cond: Cond, inputs: list[Held], around: None, here: Position) -> list[Held]:
        """All branches; a result is a parameter if all of them return that one."""
        _, operands = cond.split(inputs)
        results = [self.run_inner(one, operands, around, here) for one in cond.branches]
        return [each[0] if len(set(each)) == 1 else None for each in zip(*results, strict=True)]
