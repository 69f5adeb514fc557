"""Reading the equations that `marks.py` makes: what each asks for, None for any other equation."""

from __future__ import annotations

import dataclasses
from typing import Any

from tailrace.jaxprs.internals import JaxprEqn, Primitive
from tailrace.jaxprs.marks import (
    Tag,
    ambient_p,
    cross_replica_p,
    dequeue_p,
    gather_p,
    mark_p,
    unit_p,
)


@dataclasses.dataclass(frozen=True)
class Ambient:
    """A number that only the running program knows.

    Attributes:
        what: "key", "step", "microbatch" or "replica".
        call: which call of `tr.key()` it is.
        depth: how many loops are around the call.
    """

    what: str
    call: int
    depth: int


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """The forward or backward of a member of a stage.

    Attributes:
        program: what it computes.
        kind: "F" or "B".
        stage: which stage.
        member: which member of it.
    """

    program: Any
    kind: str
    stage: int
    member: int

    @property
    def who(self) -> tuple[str, int, int]:
        """Kind, stage and member."""
        return self.kind, self.stage, self.member


def is_made_by(eqn: JaxprEqn, primitive: Primitive) -> bool:
    """Whether an equation is one of a primitive that was defined with `internals.Primitive`."""
    return eqn.primitive is primitive


def tag_in(eqn: JaxprEqn) -> Tag | None:
    """The tag of a mark."""
    return eqn.params["tag"] if eqn.primitive is mark_p else None


def is_mark(eqn: JaxprEqn) -> bool:
    """Whether an equation is a mark."""
    return eqn.primitive is mark_p


def has_role(eqn: JaxprEqn, role: str) -> bool:
    """Whether an equation is a mark for something."""
    return eqn.primitive is mark_p and eqn.params["tag"].role == role


def queue_in(eqn: JaxprEqn) -> Any:
    """The infeed that a dequeue reads."""
    return eqn.params["queue"].queue if eqn.primitive is dequeue_p else None


def is_dequeue(eqn: JaxprEqn) -> bool:
    """Whether an equation reads an infeed."""
    return eqn.primitive is dequeue_p


def ambient_in(eqn: JaxprEqn) -> Ambient | None:
    """The number that an equation stands for."""
    return Ambient(**eqn.params) if eqn.primitive is ambient_p else None


def unit_in(eqn: JaxprEqn) -> Unit | None:
    """The unit of a pipeline that an equation calls."""
    return Unit(**eqn.params) if eqn.primitive is unit_p else None


def reduction_in(eqn: JaxprEqn) -> str | None:
    """ "mean" or "sum": how an equation reduces over replicas."""
    if eqn.primitive is not cross_replica_p:
        return None
    return "mean" if eqn.params["mean"] else "sum"


def gathered_in(eqn: JaxprEqn) -> int | None:
    """From how many replicas an equation gathers values."""
    return eqn.params["replicas"] if eqn.primitive is gather_p else None


def joins_replicas(eqn: JaxprEqn) -> bool:
    """Whether all replicas take part in an equation together."""
    return eqn.primitive in (cross_replica_p, gather_p)
