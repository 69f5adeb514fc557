"""Readers for the equations that `marks.py` emits; they return None for any other equation."""

from __future__ import annotations

import dataclasses
from typing import Any

from tailrace.jaxprs.internals import ClosedJaxpr, JaxprEqn, Primitive
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
    """A number that is known only at run time.

    Attributes:
        what: "key", "step", "microbatch" or "replica".
        call: the number of the `tr.key()` call.
        depth: the number of loops around the call.
    """

    what: str
    call: int
    depth: int


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """The forward or backward of a member of a stage.

    Attributes:
        program: the program it calls.
        kind: "F" or "B".
        stage: the index of the stage.
        member: the index of the member within the stage.
    """

    program: ClosedJaxpr
    kind: str
    stage: int
    member: int

    @property
    def who(self) -> tuple[str, int, int]:
        """Kind, stage and member."""
        return self.kind, self.stage, self.member


def is_made_by(eqn: JaxprEqn, primitive: Primitive) -> bool:
    """Whether an equation applies `primitive`."""
    return eqn.primitive is primitive


def tag_in(eqn: JaxprEqn) -> Tag | None:
    """The tag of a mark."""
    return eqn.params["tag"] if eqn.primitive is mark_p else None


def is_mark(eqn: JaxprEqn) -> bool:
    """Whether an equation is a mark."""
    return eqn.primitive is mark_p


def has_role(eqn: JaxprEqn, role: str) -> bool:
    """Whether an equation is a mark with this role."""
    return eqn.primitive is mark_p and eqn.params["tag"].role == role


def named_for_stage(eqn: JaxprEqn, stage: int) -> JaxprEqn:
    """A mark whose value several stages compute, for one of them; any other equation unchanged."""
    tag = tag_in(eqn)
    if tag is None:
        return eqn
    return eqn.replace(params={**eqn.params, "tag": dataclasses.replace(tag, payload=stage)})


def queue_in(eqn: JaxprEqn) -> Any:
    """The infeed that a dequeue reads."""
    # Held weakly: JAX's caches keep parameters alive, and would keep a dataset alive with its queue.
    return eqn.params["queue"].queue if eqn.primitive is dequeue_p else None


def is_dequeue(eqn: JaxprEqn) -> bool:
    """Whether an equation reads an infeed."""
    return eqn.primitive is dequeue_p


def ambient_in(eqn: JaxprEqn) -> Ambient | None:
    """The run-time number that an equation represents."""
    return Ambient(**eqn.params) if eqn.primitive is ambient_p else None


def unit_in(eqn: JaxprEqn) -> Unit | None:
    """The unit of a pipeline that an equation calls."""
    return Unit(**eqn.params) if eqn.primitive is unit_p else None


def reduction_in(eqn: JaxprEqn) -> str | None:
    """The reduction over replicas that an equation performs: "mean" or "sum"."""
    if eqn.primitive is not cross_replica_p:
        return None
    return "mean" if eqn.params["mean"] else "sum"


def gathered_in(eqn: JaxprEqn) -> int | None:
    """The number of replicas that an equation gathers values from."""
    return eqn.params["replicas"] if eqn.primitive is gather_p else None


def joins_replicas(eqn: JaxprEqn) -> bool:
    """Whether an equation is a collective over all replicas."""
    # JAX's own collectives need the name of a mesh axis, and that of replicas exists only in the
    # emitted program.
    return eqn.primitive in (cross_replica_p, gather_p)
