"""Emitting a traced program once more, with its marks resolved and chosen values sent out.

The rewriter runs a jaxpr as JAX would, equation by equation, under whatever trace is current
(that of `jit`, usually), and so writes a new program. On the way

* a dequeue becomes a slice of the elements that were staged for this execution,
* a key or a counter becomes arithmetic on the program's own numbers,
* an enqueue, and every value that a tap asks for, becomes an extra output: stacked by the loops
  around it, flagged where a branch stands around it,
* everything else is emitted as it was, with its names and source lines.

Programs inside equations that need none of this are emitted whole, untouched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.devices import devices
from tailrace.errors import ProgramError
from tailrace.jaxprs import convolutions, internals
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, primitives
from tailrace.jaxprs.marks import (
    FORWARD,
    Tag,
    ambient_p,
    cross_replica_p,
    dequeue_p,
    gather_p,
    mark_p,
    queue_of,
)
from tailrace.jaxprs.walk import Position, concerns_us, elements_read, loop_tag
from tailrace.taps.counted_loop import zeros
from tailrace.taps.frame import Block, Counter, Emission, Emissions, Frame
from tailrace.taps.loop_passes import Passes, both, collected, guarded
from tailrace.taps.wanted import FiniteKey, RawKey, Wanted, condense, fine


@dataclasses.dataclass
class Rewriter:
    """How a program is emitted again; see the module's text.

    Attributes:
        wanted: the values to send out, by the position of their equation.
        on_mark: called for marks that something must be done about, in the running program.
        replica_axis: the mesh axis of the replicas, None where there is one replica.
        replicas: how many there are.
        period: the outermost loop observes periodic values in every `period`-th pass only.
    """

    wanted: dict[Position, list[Wanted]] = dataclasses.field(default_factory=dict)
    on_mark: Callable[[Tag, list[Any], Frame], list[Any]] | None = None
    replica_axis: str | None = None
    replicas: int = 1
    period: int = 1

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        inputs: Sequence[Any],
        frame: Frame,
        position: Position = (),
    ) -> list[Any]:
        """Emit `jaxpr` on `inputs`; extra outputs land in `frame`."""
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))
        self.run_equations(jaxpr.eqns, known, frame, position)
        return [internals.value_of(known, var) for var in jaxpr.outvars]

    def run_equations(
        self,
        equations: Sequence[JaxprEqn],
        known: dict[Any, Any],
        frame: Frame,
        position: Position = (),
        first: int = 0,
    ) -> None:
        """Emit equations whose values so far are in `known`, and add theirs."""
        for index, eqn in enumerate(equations, start=first):
            here = (*position, index)
            with internals.equation_context(eqn):
                outputs = self._equation(
                    eqn, [internals.value_of(known, v) for v in eqn.invars], frame, here
                )
            known.update(zip(eqn.outvars, outputs, strict=True))

    # -- one equation ---------------------------------------------------------------------------

    def _equation(
        self, eqn: JaxprEqn, inputs: list[Any], frame: Frame, here: Position
    ) -> list[Any]:
        outputs = self._emit(eqn, inputs, frame, here)
        for want in self.wanted.get(here, ()):
            if frame.observing or not want.periodic:
                frame.emit(RawKey((want,)), outputs[want.output])
        return outputs

    def _emit(self, eqn: JaxprEqn, inputs: list[Any], frame: Frame, here: Position) -> list[Any]:
        primitive = eqn.primitive
        if primitive is mark_p:
            return self._mark(eqn.params["tag"], inputs, frame)
        if primitive is dequeue_p:
            return frame.blocks[queue_of(eqn)].take()
        if primitive is ambient_p:
            return [_ambient(eqn, frame)]
        if primitive is cross_replica_p:
            return [self._cross_replica(inputs[0], eqn.params["mean"])]
        if primitive is gather_p:
            return [self._gather(inputs[0], eqn.params["replicas"])]
        if not self._touches(eqn, here):
            room = convolutions if devices.platform() == "cpu" else internals
            return room.bind_again(eqn, inputs)
        if primitive is primitives.scan_p:
            return self._scan(eqn, inputs, frame, here)
        if primitive is primitives.while_p:
            return self._while(eqn, inputs, frame, here)
        if primitive is primitives.cond_p:
            return self._cond(eqn, inputs, frame, here)
        return self._inline(eqn, inputs, frame, here)

    def _touches(self, eqn: JaxprEqn, here: Position) -> bool:
        inside = any(position[: len(here)] == here for position in self.wanted if position != here)
        return inside or concerns_us(eqn)

    def _mark(self, tag: Tag, inputs: list[Any], frame: Frame) -> list[Any]:
        if tag.role == "loop":
            frame.counters = (*frame.counters, Counter(tag.payload, inputs[0]))
            return inputs
        replayed = frame.replaying and tag.direction == FORWARD
        if self.on_mark is None or replayed:
            return inputs
        return self.on_mark(tag, inputs, frame)

    def _cross_replica(self, value: Any, mean: bool) -> Any:
        if self.replica_axis is None:
            return value
        return (lax.pmean if mean else lax.psum)(value, self.replica_axis)

    def _gather(self, value: Any, replicas: int) -> Any:
        """The values of all replicas; where one is replayed alone, its own stands for all."""
        if self.replica_axis is None:
            return jnp.broadcast_to(value, (replicas, *value.shape))
        return lax.all_gather(value, self.replica_axis)

    # -- programs inside equations --------------------------------------------------------------

    def _inline(self, eqn: JaxprEqn, inputs: list[Any], frame: Frame, here: Position) -> list[Any]:
        """`jit`, `remat`, custom derivatives: after differentiation they are their contents."""
        found = internals.contents(eqn)
        if found is None:
            raise ProgramError(
                f"A feed, key or observed value stands inside {eqn.primitive.name!r}, which "
                f"Tailrace cannot look into. Move it outside of that operation."
            )
        number, inner, consts = found
        replaying = frame.replaying
        if internals.is_replay(eqn):
            frame.replaying = True
            if internals.is_barrier(eqn):
                # What keeps XLA from merging the recomputation with the original it repeats.
                inputs = list(lax.optimization_barrier(tuple(inputs)))
        outputs = self.run(inner, consts, inputs, frame, (*here, number))
        frame.replaying = replaying
        return outputs

    def _scan(self, eqn: JaxprEqn, inputs: list[Any], frame: Frame, here: Position) -> list[Any]:
        params = eqn.params
        body = params["jaxpr"]
        consts, init, xs = _split(inputs, *internals.scan_sizes(eqn))
        length = params["length"]
        counts = elements_read(body.jaxpr.eqns)
        elements = {queue: frame.blocks[queue].take_many(length * n) for queue, n in counts.items()}
        numbers = jnp.arange(length, dtype=jnp.int32) if elements else None
        outermost = loop_tag(body.jaxpr) is not None and not frame.counters

        def one_pass(carry: Any, x: Any, observing: bool) -> Any:
            values, number = x
            blocks = {
                queue: Block(tuple(_rows(leaf, number, counts[queue]) for leaf in leaves))
                for queue, leaves in elements.items()
            }
            inside = frame.inner(blocks, observing=observing)
            inner_inputs = [*consts, *carry, *values]
            outputs = self.run(body.jaxpr, body.consts, inner_inputs, inside, (*here, 0))
            condense(inside)
            after, ys = _split(outputs, len(init))
            return after, (ys, inside.emitted)

        guarding = outermost and any(
            want.guard
            for position, wants in self.wanted.items()
            if position[: len(here)] == here
            for want in wants
        )

        collected = {
            RawKey((want,)): want.collect
            for position, wants in self.wanted.items()
            if position[: len(here)] == here
            for want in wants
            if want.collect != "stack"
        }
        start: Any = list(init)
        if guarding:
            one_pass, start = guarded(one_pass, self._is_good), (start, jnp.asarray(frame.stopped))
        trip = frame.trip if outermost else None
        over = Passes(one_pass, params["reverse"], params["unroll"], length, trip=trip)
        period = self.period if outermost else 1
        if collected and loop_tag(body.jaxpr) is not None:
            over = over.collecting(collected)
        ran = over.run(start, (list(xs), numbers), period, frame.observing)
        carry = ran.carry
        if guarding:
            carry, frame.stopped = carry
        frame.take(ran.each, ran.looks, ran.once, period)
        if outermost:
            frame.steps_before = frame.steps_before + (length if trip is None else trip.count)
        return [*carry, *ran.ys]

    def _is_good(self, emitted: Any) -> Any:
        """Whether no flag that a pass emitted is down, on any replica."""
        flags = [fine(e).all() for key, e in emitted.items() if isinstance(key, FiniteKey)]
        good = jnp.stack(flags).all()
        if self.replica_axis is not None:
            good = lax.pmin(good.astype(jnp.int32), self.replica_axis) > 0
        return good

    def _while(self, eqn: JaxprEqn, inputs: list[Any], frame: Frame, here: Position) -> list[Any]:
        params = eqn.params
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        cond_consts, body_consts, init = _split(
            inputs, params["cond_nconsts"], params["body_nconsts"]
        )
        tag = loop_tag(body.jaxpr)
        maximum: Any = tag.payload if tag else None
        counts = elements_read(body.jaxpr.eqns)
        before = {queue: frame.blocks[queue].position for queue in counts}
        elements = {
            queue: [
                leaf.reshape(maximum, count, *leaf.shape[1:])
                for leaf in frame.blocks[queue].take_many(maximum * count)
            ]
            for queue, count in counts.items()
        }

        def one_pass(passes: Any, carry: Any) -> Any:
            blocks = {
                queue: Block(tuple(lax.dynamic_index_in_dim(e, passes, 0, False) for e in leaves))
                for queue, leaves in elements.items()
            }
            inside = frame.inner(blocks)
            outputs = self.run(body.jaxpr, body.consts, [*body_consts, *carry], inside, (*here, 1))
            condense(inside)
            return outputs, inside.emitted

        def once(key: Hashable) -> bool:
            # Nobody knows how many passes the user's own loop will have: the last one is kept.
            return maximum is None or (isinstance(key, RawKey) and key[0].collect != "stack")

        def keep(passes: Any, kept: Any, emitted: dict[Hashable, Emission]) -> Any:
            put = lambda buffer, new: lax.dynamic_update_index_in_dim(buffer, new, passes, 0)  # noqa: E731
            return Emissions(
                (key, collected(key, old, emitted[key], maximum is not None))
                if once(key)
                else (key, jax.tree.map(put, old, emitted[key]))
                for key, old in kept.items()
            )

        shapes = jax.eval_shape(lambda carry: one_pass(jnp.int32(0), carry)[1], list(init))
        kept = Emissions(
            (key, jax.tree.map(lambda s, k=key: zeros(s, () if once(k) else (maximum,)), shape))
            for key, shape in shapes.items()
        )

        def go_on(state: Any) -> Any:
            return self.run(
                condition.jaxpr, condition.consts, [*cond_consts, *state[1]], frame, (*here, 0)
            )[0]

        def advance(state: Any) -> Any:
            passes, carry, kept = state
            carry, emitted = one_pass(passes, carry)
            return passes + 1, carry, keep(passes, kept, emitted)

        passes, carry, kept = lax.while_loop(go_on, advance, (jnp.int32(0), list(init), kept))
        for key, emission in kept.items():
            made = passes > 0 if once(key) else jnp.arange(maximum) < passes
            valid = made if emission.valid is None else both(made, emission.valid)
            frame.emit(key, emission.value, valid)
        for queue, count in counts.items():
            # What was not read is next in turn.
            frame.blocks[queue].position = before[queue] + passes * count
        if tag is not None and not frame.counters:
            frame.steps_before = frame.steps_before + passes
        return list(carry)

    def _cond(self, eqn: JaxprEqn, inputs: list[Any], frame: Frame, here: Position) -> list[Any]:
        index, *operands = inputs
        branches = eqn.params["branches"]

        def run_branch(number: int, operands: Sequence[Any]) -> Any:
            branch = branches[number]
            inside = frame.inner()
            outputs = self.run(branch.jaxpr, branch.consts, list(operands), inside, (*here, number))
            condense(inside)
            return outputs, Emissions(
                (key, Emission(e.value, jnp.array(True) if e.valid is None else e.valid))
                for key, e in inside.emitted.items()
            )

        shapes: Emissions[Hashable, Any] = Emissions()
        for number in range(len(branches)):
            shapes.update(jax.eval_shape(lambda ops, n=number: run_branch(n, ops)[1], operands))

        def complete(number: int) -> Callable[..., Any]:
            def branch(*operands: Any) -> Any:
                outputs, emitted = run_branch(number, operands)
                absent = {k: jax.tree.map(zeros, s) for k, s in shapes.items() if k not in emitted}
                return outputs, Emissions((k, {**emitted, **absent}[k]) for k in shapes)

            return branch

        outputs, emitted = lax.switch(index, [complete(n) for n in range(len(branches))], *operands)
        frame.emitted.update(emitted)
        return list(outputs)


def _ambient(eqn: JaxprEqn, frame: Frame) -> Any:
    what, depth = eqn.params["what"], eqn.params["depth"]
    if len(frame.counters) < depth:
        raise ProgramError(
            f"tr.{what}() is called in a tr.repeat or tr.while_loop that is itself differentiated, "
            f"and differentiation moved it out of the loop. Take the gradient inside the loop body, "
            f"or make the key outside and carry it through the loop."
        )
    if what == "key":
        return frame.fold_key(eqn.params["call"])
    if what == "replica":
        return jnp.asarray(frame.ambient.replica, jnp.int32)
    return frame.step() if what == "step" else frame.microbatch()


def _split(values: Sequence[Any], *sizes: int) -> list[list[Any]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(list(values[start : start + size]))
        start += size
    return [*parts, list(values[start:])]


def _rows(leaf: Any, number: Any, count: int) -> Any:
    """The `count` rows of one pass.

    Cut out pass by pass: given another shape before the loop, all rows would be copied by XLA.
    """
    if not len(leaf):  # of a loop without passes, which is traced all the same
        return jnp.zeros((count, *leaf.shape[1:]), leaf.dtype)
    return lax.dynamic_slice_in_dim(leaf, number * count, count)
