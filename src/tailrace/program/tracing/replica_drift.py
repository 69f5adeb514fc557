"""Static analysis of which values differ between replicas, before the program runs.

Elements and keys differ between replicas, and so does everything computed from them, until
`tr.cross_replica_mean` or `tr.cross_replica_sum` makes it equal again. A program must return equal
values: parameters that drift apart are the classic, silent error of data-parallel training.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.errors import ReplicaError
from tailrace.jaxprs.control import Call, Cond, Scan, While
from tailrace.jaxprs.internals import Atom, Jaxpr, JaxprEqn
from tailrace.jaxprs.own_equations import ambient_in, has_role, is_dequeue, joins_replicas
from tailrace.jaxprs.visitor import Visitor
from tailrace.jaxprs.walk import Position, tag_of, walk
from tailrace.program.tracing.trace import Traced


def check_in_step(traced: Traced, may_differ: Sequence[bool] | None = None) -> None:
    """Refuse a program that would return different values on different replicas.

    Args:
        traced: the program.
        may_differ: for each result, whether it may differ between replicas.
    """
    may_differ = may_differ or [False] * len(traced.out_names)
    differs = Differing().of(traced.jaxpr, traced.consts, [False] * len(traced.jaxpr.invars))
    for name, varies, may in zip(traced.out_names, differs, may_differ, strict=True):
        if varies and not may:
            raise ReplicaError(
                f"What a replicated program returns must be equal on all replicas, but "
                f"{name or 'its result'!r} is computed from each replica's own elements and would "
                f"drift apart. Average the gradients: tr.cross_replica_mean(grads), or "
                f"tr.optimizers.cross_replica(optimizer). To read a value of each replica, send it "
                f"to an outfeed."
            )


class Differing(Visitor[bool, None]):
    """Propagates through a program whether values differ between replicas: True if one does.

    Attributes:
        at: for each equation, a flag per result.
    """

    def __init__(self) -> None:
        self.at: dict[Position, list[bool]] = {}

    def of(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[bool]) -> list[bool]:
        """Flags of a program's results, from flags of its inputs."""
        return self.run(jaxpr, consts, inputs, None)

    def constant(self, value: object, var: Atom) -> bool:
        """Constants are equal on all replicas."""
        return False

    def made(
        self, eqn: JaxprEqn, inputs: list[bool], outputs: list[bool], around: None, here: Position
    ) -> list[bool]:
        """Remember the flags."""
        self.at[here] = outputs
        return outputs

    def plain(self, eqn: JaxprEqn, inputs: list[bool], around: None, here: Position) -> list[bool]:
        """A result differs if any operand does; elements and keys always do."""
        differs = any(inputs) or is_dequeue(eqn)
        if (ambient := ambient_in(eqn)) is not None:
            # The step and the microbatch are the same on all replicas.
            differs = ambient.what in ("key", "replica")
        # The second is a promise of the function that marks it: accumulators differ within a step, and
        # are reduced and cleared at its end.
        if joins_replicas(eqn) or has_role(eqn, "equal at the end"):
            differs = False
        return [differs] * len(eqn.outvars)

    def call(self, call: Call, inputs: list[bool], around: None, here: Position) -> list[bool]:
        """Analyze the called program."""
        return self.run_inner(call.program, inputs, around, here)

    def scan(self, scan: Scan, inputs: list[bool], around: None, here: Position) -> list[bool]:
        """A carried value that differs after any iteration differs in all (a fixed point)."""
        consts, carry, xs = scan.split(inputs)
        # Flags only ever grow, so this ends after at most one round per carried value; mostly two.
        while True:
            out = self.run_inner(scan.body, [*consts, *carry, *xs], around, here)
            after, ys = scan.split_results(out)
            grown = [a or b for a, b in zip(carry, after, strict=True)]
            if grown == carry:
                return [*carry, *ys]
            carry = grown

    def while_loop(
        self, loop: While, inputs: list[bool], around: None, here: Position
    ) -> list[bool]:
        """The same; all results differ if the number of iterations does."""
        tests, consts, carry = loop.split(inputs)
        while True:
            (test,) = self.run_inner(loop.condition, [*tests, *carry], around, here)
            out = self.run_inner(loop.body, [*consts, *carry], around, here)
            # Asked in every round: the condition may differ only through what the body does to the
            # carry.
            if test:
                _refuse_joint_acts(loop.body.jaxpr, "a while loop", "condition")
            grown = [test or a or b for a, b in zip(carry, out, strict=True)]
            if grown == carry:
                return carry
            carry = grown

    def cond(self, cond: Cond, inputs: list[bool], around: None, here: Position) -> list[bool]:
        """A result differs if it does in any branch, or if the choice differs."""
        chosen, operands = cond.split(inputs)
        results = []
        for branch in cond.branches:
            if chosen:
                _refuse_joint_acts(branch.jaxpr, "a branch", "predicate")
            results.append(self.run_inner(branch, operands, around, here))
        return [chosen or any(each) for each in zip(*results, strict=True)]


def _refuse_joint_acts(jaxpr: Jaxpr, where: str, what: str) -> None:
    """Refuse collective operations in code that only some replicas run."""
    remedy = f"Make the {what} equal first, with tr.cross_replica_mean or tr.cross_replica_sum"
    for place in walk(jaxpr.eqns):
        if joins_replicas(place.equation):
            raise ReplicaError(
                f"A reduction over replicas is inside {where} whose {what} differs between "
                f"replicas: some would wait for others that never come. {remedy}."
            )
        tag = tag_of(place)
        if tag is not None and tag.role == "outfeed":
            raise ReplicaError(
                f"An outfeed is enqueued in {where} whose {what} differs between replicas: an "
                f"element has one value from each of them, and some would have none. {remedy}, or "
                f"enqueue outside and send along whether the value counts."
            )
