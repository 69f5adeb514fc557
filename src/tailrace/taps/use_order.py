"""The order in which a step uses its parameters: from the input of the model to its output.

Trees of parameters are sorted by name, which says nothing about the model. The program does: the first
layer is the one whose parameters meet the element first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tailrace.jaxprs.control import Cond, While, control
from tailrace.jaxprs.internals import Atom, Jaxpr, JaxprEqn, Var, variables
from tailrace.jaxprs.own_equations import is_mark, tag_in

PREFIX = "param/"

MADE_FOR_EACH = ("param", "grad", "accumulated", "reduced", "update")
"""Kinds of which there is one tensor for each parameter, under the parameter's name."""


def use_order(programs: Iterable[Sequence[JaxprEqn]]) -> list[str]:
    """The names of parameters, in the order of their first use.

    Args:
        programs: a traced step and the programs in it. In the first one that marks parameters, their
            uses are looked for.
    """
    for equations in programs:
        marks = {eqn.outvars[0]: name for eqn in equations if (name := _parameter(eqn)) is not None}
        if marks:
            return list(dict.fromkeys(_uses(equations, marks)))
    return []


def _parameter(eqn: JaxprEqn) -> str | None:
    tag = tag_in(eqn)
    named = tag is not None and tag.role == "value" and tag.name.startswith(PREFIX)
    return tag.name.removeprefix(PREFIX) if tag is not None and named else None


def _uses(equations: Sequence[JaxprEqn], names: Mapping[Var, str]) -> Iterator[str]:
    """The parameters that equations use, by the variables that hold them; some more than once."""
    known = dict(names)
    for eqn in equations:
        operands = variables(eqn.invars)
        held = [known[var] for var in operands if var in known]
        if not held:
            continue
        if inside := list(_inside(eqn)):
            for jaxpr, outer in inside:
                pairs = zip(outer, jaxpr.invars, strict=False)
                yield from _uses(
                    jaxpr.eqns,
                    {
                        one: known[var]
                        for var, one in pairs
                        if isinstance(var, Var) and var in known
                    },
                )
        # A cast or a transposed weight is not yet a use: all parameters may be cast before the first
        # layer runs.
        elif is_mark(eqn) or (len(set(held)) == 1 and all(var in known for var in operands)):
            known.update(dict.fromkeys(eqn.outvars, held[0]))
        else:
            yield from held


def _inside(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[Atom]]]:
    """The programs in an equation, each with the operands that it is given."""
    found = control(eqn)
    if found is None:
        return
    if isinstance(found, While):
        _, consts, carry = found.split(eqn.invars)
        yield found.body.jaxpr, [*consts, *carry]
        return
    operands = found.split(eqn.invars)[1] if isinstance(found, Cond) else eqn.invars
    for inner in found.inside:
        yield inner.jaxpr, operands
