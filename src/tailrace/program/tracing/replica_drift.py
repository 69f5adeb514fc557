"""Which values differ between replicas, found from the program alone, before it runs.

Elements and keys differ between replicas; everything computed from them does too, until
`tr.cross_replica_mean` or `tr.cross_replica_sum` makes it equal again. A program must return equal
values: parameters that drift apart are the classic, silent error of data-parallel training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.errors import ReplicaError
from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, Literal, primitives
from tailrace.jaxprs.marks import ambient_p, cross_replica_p, dequeue_p, gather_p, mark_p
from tailrace.jaxprs.walk import Position, tag_of, walk
from tailrace.program.tracing.trace import Traced


def check_in_step(traced: Traced, may_differ: Sequence[bool] | None = None) -> None:
    """Refuse a program that would return different values on different replicas.

    Args:
        traced: the program.
        may_differ: which of its results each replica has its own of.
    """
    may_differ = may_differ or [False] * len(traced.out_names)
    differs = Differing().of(traced.jaxpr, [False] * len(traced.jaxpr.invars))
    for name, varies, may in zip(traced.out_names, differs, may_differ, strict=True):
        if varies and not may:
            raise ReplicaError(
                f"What a replicated program returns must be equal on all replicas, but "
                f"{name or 'its result'!r} is computed from each replica's own elements and would "
                f"drift apart. Average the gradients: tr.cross_replica_mean(grads), or "
                f"tr.optimizers.cross_replica(optimizer). To read a value of each replica, send it "
                f"to an outfeed."
            )


class Differing:
    """Follows through a program what differs between replicas.

    Attributes:
        at: for each equation, which of its results differ.
    """

    def __init__(self) -> None:
        self.at: dict[Position, list[bool]] = {}

    def of(self, jaxpr: Jaxpr, inputs: Sequence[bool], position: Position = ()) -> list[bool]:
        """Which results of a program differ, if these of its inputs do."""
        differs: dict[Any, bool] = dict(zip(jaxpr.invars, inputs, strict=True))
        for index, eqn in enumerate(jaxpr.eqns):
            here = (*position, index)
            given = [not isinstance(v, Literal) and differs.get(v, False) for v in eqn.invars]
            self.at[here] = self._equation(eqn, given, here)
            differs.update(zip(eqn.outvars, self.at[here], strict=True))
        return [not isinstance(v, Literal) and differs.get(v, False) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, given: list[bool], here: Position) -> list[bool]:
        every = [any(given)] * len(eqn.outvars)
        if eqn.primitive is dequeue_p:
            return [True] * len(eqn.outvars)
        if eqn.primitive is ambient_p:
            return [eqn.params["what"] in ("key", "replica")]
        if eqn.primitive in (cross_replica_p, gather_p):
            return [False]
        if eqn.primitive is mark_p and eqn.params["tag"].role == "equal at the end":
            return [False] * len(eqn.outvars)
        if eqn.primitive is primitives.scan_p:
            return self._scan(eqn, given, here)
        if eqn.primitive is primitives.while_p:
            return self._while(eqn, given, here)
        if eqn.primitive is primitives.cond_p:
            return self._cond(eqn, given, here)
        called = internals.contents(eqn)
        return every if called is None else self.of(called[1], given, (*here, called[0]))

    def _scan(self, eqn: JaxprEqn, given: list[bool], here: Position) -> list[bool]:
        body = eqn.params["jaxpr"].jaxpr
        consts, carried = internals.scan_sizes(eqn)
        carry = given[consts : consts + carried]
        while True:
            inputs = [*given[:consts], *carry, *given[consts + carried :]]
            out = self.of(body, inputs, (*here, 0))
            grown = [a or b for a, b in zip(carry, out[:carried], strict=True)]
            if grown == carry:
                return [*carry, *out[carried:]]
            carry = grown

    def _while(self, eqn: JaxprEqn, given: list[bool], here: Position) -> list[bool]:
        params = eqn.params
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        carry = given[tests + consts :]
        while True:
            (test,) = self.of(params["cond_jaxpr"].jaxpr, [*given[:tests], *carry], (*here, 0))
            body = params["body_jaxpr"].jaxpr
            inputs = [*given[tests : tests + consts], *carry]
            out = self.of(body, inputs, (*here, 1))
            if test:
                _refuse_joint_acts(body, "a while loop", "condition")
            grown = [test or a or b for a, b in zip(carry, out, strict=True)]
            if grown == carry:
                return carry
            carry = grown

    def _cond(self, eqn: JaxprEqn, given: list[bool], here: Position) -> list[bool]:
        chosen, *operands = given
        results = []
        for number, branch in enumerate(eqn.params["branches"]):
            if chosen:
                _refuse_joint_acts(branch.jaxpr, "a branch", "predicate")
            results.append(self.of(branch.jaxpr, operands, (*here, number)))
        return [chosen or any(each) for each in zip(*results, strict=True)]


def _refuse_joint_acts(jaxpr: Jaxpr, where: str, what: str) -> None:
    """Refuse what all replicas must do together, in code that only some of them run."""
    remedy = f"Make the {what} equal first, with tr.cross_replica_mean or tr.cross_replica_sum"
    for place in walk(jaxpr.eqns):
        if place.equation.primitive in (cross_replica_p, gather_p):
            raise ReplicaError(
                f"A reduction over replicas stands in {where} whose {what} differs between "
                f"replicas: some would wait for others that never come. {remedy}."
            )
        tag = tag_of(place)
        if tag is not None and tag.role == "outfeed":
            raise ReplicaError(
                f"An outfeed is enqueued in {where} whose {what} differs between replicas: an "
                f"element has one value from each of them, and some would have none. {remedy}, or "
                f"enqueue outside and send along whether the value counts."
            )
