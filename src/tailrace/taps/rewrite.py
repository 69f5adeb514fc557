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
import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.devices import devices
from tailrace.errors import ProgramError
from tailrace.jaxprs import convolutions, internals
from tailrace.jaxprs.control import Call, Cond, Inner, Scan, While
from tailrace.jaxprs.free_numbers import FreeNumbers
from tailrace.jaxprs.internals import JaxprEqn
from tailrace.jaxprs.marks import FORWARD, Tag
from tailrace.jaxprs.operations import name_of
from tailrace.jaxprs.own_equations import (
    Ambient,
    ambient_in,
    gathered_in,
    queue_in,
    reduction_in,
    tag_in,
)
from tailrace.jaxprs.replica_reductions import reduced
from tailrace.jaxprs.visitor import Visitor
from tailrace.jaxprs.walk import (
    Position,
    by_surrounding,
    concerns_us,
    elements_read,
    loop_tag,
    walk,
)
from tailrace.taps.counted_loop import traced_once, zeros
from tailrace.taps.frame import Block, Counter, Emission, Emissions, Frame
from tailrace.taps.loop_passes import Passes, both, collected, skipping
from tailrace.taps.wanted import FiniteKey, RawKey, Wanted, condense, fine

OnMark = Callable[[Tag, list[Any], Frame], list[Any]]


@dataclasses.dataclass(frozen=True)
class Resolver:
    """What becomes of the equations that Tailrace made, in a program that runs.

    Attributes:
        on_mark: called for marks that something must be done about.
        replica_axis: the mesh axis of the replicas, None where there is one replica.
    """

    on_mark: OnMark | None = None
    replica_axis: str | None = None

    def resolve(self, eqn: JaxprEqn, inputs: list[Any], frame: Frame) -> list[Any] | None:
        """The results of such an equation; None for any other."""
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

    def _mark(self, tag: Tag, inputs: list[Any], frame: Frame) -> list[Any]:
        if tag.role == "loop":
            frame.counters = (*frame.counters, Counter(tag.payload, inputs[0]))
            return inputs
        replayed = frame.replaying and tag.direction == FORWARD
        if self.on_mark is None or replayed:
            return inputs
        return self.on_mark(tag, inputs, frame)

    def _gathered(self, value: Any, replicas: int) -> Any:
        """The values of all replicas; where one is replayed alone, its own stands for all."""
        if self.replica_axis is None:
            return jnp.broadcast_to(value, (replicas, *value.shape))
        return lax.all_gather(value, self.replica_axis)


@dataclasses.dataclass
class Rewriter(Visitor[Any, Frame]):
    """How a program is emitted again; see the module's text.

    Attributes:
        wanted: the values to send out, by the position of their equation.
        on_mark: called for marks that something must be done about, in the running program.
        replica_axis: the mesh axis of the replicas, None where there is one replica.
        replicas: how many there are.
        period: the outermost loop observes periodic values in every `period`-th pass only.
        free: the literals that are arguments of the program.
    """

    wanted: dict[Position, list[Wanted]] = dataclasses.field(default_factory=dict)
    on_mark: OnMark | None = None
    replica_axis: str | None = None
    replicas: int = 1
    period: int = 1
    free: FreeNumbers = dataclasses.field(default_factory=FreeNumbers)

    def __post_init__(self) -> None:
        self.arguments: Sequence[Any] = ()
        """What stands for the free literals in the program that is being emitted."""
        self._inside = by_surrounding(self.wanted)
        self._resolver = Resolver(self.on_mark, self.replica_axis)

    def sends(self, eqn: JaxprEqn, here: Position) -> bool:
        """Whether something leaves from an equation or from inside it, as far as can be told."""
        return (
            here in self.wanted
            or here in self._inside
            or any(
                (tag := tag_in(place.equation)) is not None and tag.role not in ("value", "loop")
                for place in walk([eqn])
            )
        )

    # -- one equation ---------------------------------------------------------------------------

    def context(self, eqn: JaxprEqn) -> AbstractContextManager[Any]:
        """The equation's names and source lines."""
        return internals.equation_context(eqn)

    def constant(self, value: Any, var: Any) -> Any:
        """A constant; of a free literal, the argument that stands for it."""
        place = self.free.places.get(id(var))
        return value if place is None else self.arguments[place]

    def enters(self, eqn: JaxprEqn, here: Position) -> bool:
        """Whether something in the equation is wanted, ours, or an argument."""
        return here in self._inside or id(eqn) in self.free.around or concerns_us(eqn)

    def made(
        self,
        eqn: JaxprEqn,
        inputs: list[Any],
        outputs: list[Any],
        around: Frame,
        here: Position,
    ) -> list[Any]:
        """Send out what is wanted of the equation's results, as they are once changed."""
        wants = self.wanted.get(here, ())
        for want in wants:
            if want.change is not None:
                outputs = list(outputs)
                outputs[want.output] = want.change(outputs[want.output], around.step())
        for want in wants:
            if want.change is None and (around.observing or not want.periodic):
                around.emit(RawKey((want,)), outputs[want.output])
        return outputs

    def plain(self, eqn: JaxprEqn, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """The equation as it is; on a CPU, a convolution in the form that its library takes."""
        room = convolutions if devices.platform() == "cpu" else internals
        return room.bind_again(eqn, inputs)

    def opaque(self, eqn: JaxprEqn, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """One of our own equations; any other with something of ours inside is refused."""
        outputs = self._resolver.resolve(eqn, inputs, around)
        if outputs is None:
            raise ProgramError(
                f"A feed, key or observed value stands inside {name_of(eqn)!r}, which "
                f"Tailrace cannot look into. Move it outside of that operation."
            )
        return outputs

    # -- programs inside equations --------------------------------------------------------------

    def call(self, call: Call, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """`jit`, `remat`, custom derivatives: after differentiation they are their contents."""
        replaying = around.replaying
        if call.is_replay:
            around.replaying = True
            if call.is_barrier:
                # What keeps XLA from merging the recomputation with the original it repeats.
                inputs = list(lax.optimization_barrier(tuple(inputs)))
        outputs = self.run_inner(call.program, inputs, around, here)
        around.replaying = replaying
        return outputs

    def scan(self, scan: Scan, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """A loop, with what leaves it stacked; the outermost also observes and counts."""
        frame, body, length = around, scan.body.jaxpr, scan.length
        consts, init, xs = scan.split(inputs)
        counts = elements_read(body.eqns)
        elements = {queue: frame.blocks[queue].take_many(length * n) for queue, n in counts.items()}
        numbers = jnp.arange(length, dtype=jnp.int32) if elements else None
        is_ours = loop_tag(body) is not None
        outermost = is_ours and not frame.counters

        def one_pass(carry: Any, x: Any, observing: bool) -> Any:
            values, number = x
            blocks = {
                queue: Block(tuple(_rows(leaf, number, counts[queue]) for leaf in leaves))
                for queue, leaves in elements.items()
            }
            inside = frame.inner(blocks, observing=observing)
            outputs = self.run_inner(scan.body, [*consts, *carry, *values], inside, here)
            condense(inside)
            after, ys = scan.split_results(outputs)
            return after, (ys, inside.emitted)

        wants = self._inside.get(here, ())
        collected = {RawKey((want,)): want.collect for want in wants if want.collect != "stack"}
        guards = [want for want in wants if want.guard] if outermost else []
        if guards and all(want.skips for want in guards):
            one_pass = skipping(one_pass, self._is_good)
        trip = frame.trip if outermost else None
        over = Passes(one_pass, scan.reverse, scan.unroll, length, trip=trip)
        period = self.period if outermost else 1
        if collected and is_ours:
            over = over.collecting(collected)
        ran = over.run(init, (xs, numbers), period, frame.observing)
        frame.take(ran.each, ran.looks, ran.once, period)
        if outermost:
            frame.steps_before = frame.steps_before + (length if trip is None else trip.count)
        return [*ran.carry, *ran.ys]

    def _is_good(self, emitted: Any) -> Any:
        """Whether no flag that a pass emitted is down, on any replica."""
        flags = [fine(e).all() for key, e in emitted.items() if isinstance(key, FiniteKey)]
        good = jnp.stack(flags).all()
        if self.replica_axis is not None:
            good = lax.pmin(good.astype(jnp.int32), self.replica_axis) > 0
        return good

    def while_loop(
        self, loop: While, inputs: list[Any], around: Frame, here: Position
    ) -> list[Any]:
        """A loop whose length is not known; what leaves it has room for the most passes."""
        frame = around
        cond_consts, body_consts, init = loop.split(inputs)
        tag = loop_tag(loop.body.jaxpr)
        maximum: Any = tag.payload if tag else None
        counts = elements_read(loop.body.jaxpr.eqns)
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
            outputs = self.run_inner(loop.body, [*body_consts, *carry], inside, here)
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

        # Traced once: to be traced for its shapes first, loops inside loops would double every time.
        once_traced, (_, shapes) = traced_once(one_pass, jnp.int32(0), init)
        kept = Emissions(
            (key, jax.tree.map(lambda s, k=key: zeros(s, () if once(k) else (maximum,)), shape))
            for key, shape in shapes.items()
        )

        def go_on(state: Any) -> Any:
            return self.run_inner(loop.condition, [*cond_consts, *state[1]], frame, here)[0]

        def advance(state: Any) -> Any:
            passes, carry, kept = state
            carry, emitted = once_traced(passes, carry)
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

    def cond(self, cond: Cond, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """A choice; what leaves its branches is flagged."""
        frame, (index, operands) = around, cond.split(inputs)

        def run_branch(branch: Inner, operands: list[Any]) -> Any:
            inside = frame.inner()
            outputs = self.run_inner(branch, operands, inside, here)
            condense(inside)
            return outputs, Emissions(
                (key, Emission(e.value, jnp.array(True) if e.valid is None else e.valid))
                for key, e in inside.emitted.items()
            )

        shapes: Emissions[Hashable, Any] = Emissions()
        branches = []
        for branch in cond.branches:
            run, (_, emitted) = traced_once(functools.partial(run_branch, branch), operands)
            shapes.update(emitted)
            branches.append(run)

        def complete(run: Callable[..., Any], operands: Any) -> Any:
            outputs, emitted = run(operands)
            return outputs, Emissions(
                (key, emitted[key] if key in emitted else jax.tree.map(zeros, shape))
                for key, shape in shapes.items()
            )

        complete_ones = [functools.partial(complete, run) for run in branches]
        outputs, emitted = lax.switch(index, complete_ones, operands)
        frame.emitted.update(emitted)
        return list(outputs)


def _number(ambient: Ambient, frame: Frame) -> Any:
    what = ambient.what
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


def _rows(leaf: Any, number: Any, count: int) -> Any:
    """The `count` rows of one pass.

    Cut out pass by pass: given another shape before the loop, all rows would be copied by XLA.
    """
    if not len(leaf):  # of a loop without passes, which is traced all the same
        return jnp.zeros((count, *leaf.shape[1:]), leaf.dtype)
    return lax.dynamic_slice_in_dim(leaf, number * count, count)
