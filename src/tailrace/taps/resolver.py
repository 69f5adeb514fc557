"""Replaces Tailrace's own equations in a program that will run: marks, dequeues, keys, reductions."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.errors import ProgramError
from tailrace.jaxprs.internals import JaxprEqn
from tailrace.jaxprs.marks import FORWARD, Tag
from tailrace.jaxprs.own_equations import (
    Ambient,
    ambient_in,
    gathered_in,
    queue_in,
    reduction_in,
    tag_in,
)
from tailrace.jaxprs.replica_reductions import reduced
from tailrace.taps.frame import Counter, Frame

OnMark = Callable[[Tag, list[jax.Array], Frame], list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Resolver:
    """Replaces Tailrace's equations in a program that will run.

    Attributes:
        on_mark: called for marks that require an action.
        replica_axis: the mesh axis of the replicas; None for one replica.
    """

    on_mark: OnMark | None = None
    replica_axis: str | None = None

    def resolve(
        self, eqn: JaxprEqn, inputs: list[jax.Array], frame: Frame
    ) -> list[jax.Array] | None:
        """The results of a Tailrace equation; None for any other."""
        if (tag := tag_in(eqn)) is not None:
            return self._mark(tag, inputs, frame)
        if (queue := queue_in(eqn)) is not None:
            return frame.blocks[queue].take()
        if (ambient := ambient_in(eqn)) is not None:
            return [_number(ambient, frame)]
        if (reduction := reduction_in(eqn)) is not None:
            return [reduced(inputs[0], self.replica_axis, reduction == "mean")]
        if (replicas := gathered_in(eqn)) is not None:
            return [self._gathered(inputs[0], replicas)]
        return None

    def _mark(self, tag: Tag, inputs: list[jax.Array], frame: Frame) -> list[jax.Array]:
        if tag.role == "loop":
            # The frame belongs to the body of this loop alone, so the loops beside it do not see
            # the counter.
            frame.counters = (*frame.counters, Counter(tag.payload, inputs[0]))
            return inputs
        # A recomputation repeats what was sent already. Marks of gradients appear there for the
        # first time.
        replayed = frame.replaying and tag.direction == FORWARD
        if self.on_mark is None or replayed:
            return inputs
        return self.on_mark(tag, inputs, frame)

    def _gathered(self, value: jax.Array, replicas: int) -> jax.Array:
        """The values of all replicas; if one replica is replayed alone, its value is used for all."""
        if self.replica_axis is None:
            # The program was traced for several replicas: shapes must stay as they are.
            return jnp.broadcast_to(value, (replicas, *value.shape))
        return lax.all_gather(value, self.replica_axis)


def _number(ambient: Ambient, frame: Frame) -> jax.Array:
    what = ambient.what
    # Fewer loops around it than when it was traced. The counters of the wrong loops would still
    # give a key, but the same one in every iteration.
    if len(frame.counters) < ambient.depth:
        raise ProgramError(
            f"tr.{what}() is called in a tr.repeat or tr.while_loop that is itself differentiated, "
            f"and differentiation moved it out of the loop. Take the gradient inside the loop body, "
            f"or make the key outside and carry it through the loop."
        )
    if what == "key":
        return frame.fold_key(ambient.call)
    if what == "replica":
        return jnp.asarray(frame.ambient.replica, jnp.int32)
    return frame.step() if what == "step" else frame.microbatch()
