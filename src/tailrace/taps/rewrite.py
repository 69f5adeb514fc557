"""Emits a traced program again, with its marks resolved and selected values as outputs.

The rewriter interprets a jaxpr equation by equation under the current trace (usually that of `jit`),
and so produces a new program. On the way

* a dequeue becomes a slice of the elements that were staged for this execution,
* a key or a counter becomes arithmetic on the program's arguments,
* an enqueue, and every value that a tap selects, becomes an extra output: stacked by the loops
  around it, with a validity flag inside a branch,
* everything else is emitted unchanged, with its names and source lines.

Inner programs that need none of this are emitted whole, unchanged.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.errors import ProgramError
from tailrace.jaxprs import convolutions, internals
from tailrace.jaxprs.boundaries import Boundaries, bounded
from tailrace.jaxprs.control import Call, Cond, Inner, Scan, While
from tailrace.jaxprs.free_numbers import FreeNumbers
from tailrace.jaxprs.internals import Atom, JaxprEqn
from tailrace.jaxprs.operations import is_widening, name_of
from tailrace.jaxprs.own_equations import tag_in
from tailrace.jaxprs.visitor import Visitor
from tailrace.jaxprs.walk import (
    Position,
    by_surrounding,
    concerns_us,
    elements_read,
    loop_tag,
    walk,
)
from tailrace.taps.counted_loop import Looks, OnePass, traced_once, zeros
from tailrace.taps.frame import Block, Emission, Emissions, Emitted, Frame
from tailrace.taps.loop_passes import Passes, skipping
from tailrace.taps.resolver import OnMark, Resolver
from tailrace.taps.wanted import FiniteKey, RawKey, Wanted, condense, fine, looks_of
from tailrace.taps.while_passes import run_while

MANY = 1024
"""Statistics of this many elements are loops of their own, with which XLA fuses what they read."""


@dataclasses.dataclass
class Rewriter(Visitor[Any, Frame]):
    """Emits a program again; see the module docstring.

    Attributes:
        wanted: the values to emit, by the position of their equation.
        on_mark: called for marks that require an action in the running program.
        replica_axis: the mesh axis of the replicas; None for one replica.
        replicas: the number of replicas.
        period: the outermost loop emits periodic values only in every `period`-th iteration.
        free: the literals that become arguments of the program.
        bounds: the results that XLA must not fuse through.
        fast_convolutions: whether convolutions are emitted in the form that is fastest on a CPU.
    """

    wanted: dict[Position, list[Wanted]] = dataclasses.field(default_factory=dict)
    on_mark: OnMark | None = None
    replica_axis: str | None = None
    replicas: int = 1
    period: int = 1
    free: FreeNumbers = dataclasses.field(default_factory=FreeNumbers)
    bounds: Boundaries = dataclasses.field(default_factory=dict)
    fast_convolutions: bool = True

    def __post_init__(self) -> None:
        self.arguments: Sequence[Any] = ()
        """The arguments that replace the free literals in the emitted program."""
        # A look-up table: whether an equation contains a wanted one is asked for every equation.
        self._inside = by_surrounding(self.wanted)
        self._around_bounds = by_surrounding(self.bounds)
        # On a CPU a value is read where it is.
        wants = (want for found in self.wanted.values() for want in found)
        self._narrows = devices.platform() != "cpu" and any(want.widens for want in wants)
        self._resolver = Resolver(self.on_mark, self.replica_axis)

    def sends(self, eqn: JaxprEqn, here: Position) -> bool:
        """Whether an equation, or something inside it, may emit a value."""
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
        """Keep the equation's name stack and source lines."""
        return internals.equation_context(eqn)

    def constant(self, value: object, var: Atom) -> Any:
        """A constant; for a free literal, the argument that replaces it."""
        # By identity: two literals of equal value may differ in whether they can be arguments.
        place = self.free.places.get(id(var))
        return value if place is None else self.arguments[place]

    def enters(self, eqn: JaxprEqn, here: Position) -> bool:
        """Whether something inside the equation is wanted, ours, an argument, or a boundary."""
        wanted = here in self._inside or here in self._around_bounds
        return wanted or id(eqn) in self.free.around or concerns_us(eqn)

    def made(
        self,
        eqn: JaxprEqn,
        inputs: list[Any],
        outputs: list[Any],
        around: Frame,
        here: Position,
    ) -> list[Any]:
        """Apply requested changes to the equation's results, then emit the requested ones."""
        # Changes first, whatever the order of the taps: what is observed is what the program
        # continues with.
        wants = self.wanted.get(here, ())
        if self._narrows and is_widening(eqn):
            # With the value itself: an id is of an object only as long as that exists.
            around.widened[id(outputs[0])] = (outputs[0], inputs[0])
        for index in self.bounds.get(here, ()):
            outputs = list(outputs)
            outputs[index] = bounded(outputs[index], around.ambient.first_step)
        for want in wants:
            if want.change is not None:
                outputs = list(outputs)
                outputs[want.output] = want.change(outputs[want.output], around.step())
        for want in wants:
            if want.change is None and (around.observing or not want.sparse):
                read = _read_by(want, outputs[want.output], around)
                if not (want.widens and read.size >= MANY):
                    read = _aside(read, around.ambient.first_step)
                around.emit(RawKey((want,)), read)
        return outputs

    def plain(self, eqn: JaxprEqn, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """Emit the equation unchanged; on a CPU, a convolution in its fastest form."""
        # Asked of the devices that were chosen, not of JAX's default: a CPU program may run beside
        # a GPU.
        fast = self.fast_convolutions and devices.platform() == "cpu"
        room = convolutions if fast else internals
        return room.bind_again(eqn, inputs)

    def opaque(self, eqn: JaxprEqn, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """Resolve one of our equations; refuse any other that has one of ours inside."""
        outputs = self._resolver.resolve(eqn, inputs, around)
        if outputs is None:
            raise ProgramError(
                f"A feed, key or observed value is inside {name_of(eqn)!r}, which "
                f"Tailrace cannot look into. Move it outside of that operation."
            )
        return outputs

    # -- programs inside equations --------------------------------------------------------------

    def call(self, call: Call, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """Inline `jit`, `remat` and custom derivatives: differentiation is over."""
        # In a recomputation, enqueues and prints must not happen a second time.
        replaying = around.replaying
        if call.is_replay:
            around.replaying = True
            if call.is_barrier:
                # Keeps XLA from merging the recomputation with the computation it repeats, which would
                # keep the activations in memory after all.
                inputs = list(lax.optimization_barrier(tuple(inputs)))
        outputs = self.run_inner(call.program, inputs, around, here)
        # Put back: what follows the recomputation in the same frame is not repeated.
        around.replaying = replaying
        return outputs

    def scan(self, scan: Scan, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """Emit a loop with its emissions stacked; the outermost also observes and counts steps."""
        frame, body, length = around, scan.body.jaxpr, scan.length
        consts, init, xs = scan.split(inputs)
        # All elements of the loop are taken at once, and each iteration slices its rows: the position
        # in the block is then a Python number, also after the loop.
        counts = elements_read(body.eqns)
        elements = {queue: frame.blocks[queue].take_many(length * n) for queue, n in counts.items()}
        numbers = jnp.arange(length, dtype=jnp.int32) if elements else None
        is_ours = loop_tag(body) is not None
        outermost = is_ours and not frame.counters

        def one_pass(carry: Tree, x: Tree, observing: bool) -> Any:
            values, number = x
            blocks = {
                queue: Block(tuple(_rows(leaf, number, counts[queue]) for leaf in leaves))
                for queue, leaves in elements.items()
            }
            inside = frame.inner(blocks, observing=observing)
            outputs = self.run_inner(scan.body, [*consts, *carry, *values], inside, here)
            # Reduced inside the loop, so that whole tensors are never stacked over its iterations.
            condense(inside)
            after, ys = scan.split_results(outputs)
            return after, (ys, inside.emitted)

        # A sum or a last value is kept in the carry of our loops. In a user's scan it is stacked like
        # any other value, and reduced over the layers afterwards.
        wants = self._inside.get(here, ())
        collects = is_ours and any(want.collect != "stack" for want in wants)
        # A guard that stops wins: then the host goes back, and nothing is skipped on the device.
        guards = [want for want in wants if want.guard] if outermost else []
        each_pass: OnePass = one_pass
        if guards and all(want.skips for want in guards):
            each_pass = skipping(one_pass, self._is_good)
        trip = frame.trip if outermost else None
        keeps = any(not want.skips for want in guards)
        over = Passes(each_pass, scan.reverse, scan.unroll, length, collects, keeps, trip=trip)
        looks = looks_of(wants, self.period) if outermost else Looks(int(frame.observing))
        ran = over.run(init, (xs, numbers), looks)
        frame.take(ran.each, ran.looks, ran.once, looks.period)
        if outermost:
            frame.steps_before = frame.steps_before + (length if trip is None else trip.count)
        return [*ran.carry, *ran.ys]

    def _is_good(self, emitted: Emitted) -> jax.Array:
        """Whether all flags that an iteration emitted are true, on every replica."""
        flags = [fine(e).all() for key, e in emitted.items() if isinstance(key, FiniteKey)]
        good = jnp.stack(flags).all()
        # All replicas must agree: one that skips alone would drift from the others.
        if self.replica_axis is not None:
            good = lax.pmin(good.astype(jnp.int32), self.replica_axis) > 0
        return good

    def while_loop(
        self, loop: While, inputs: list[Any], around: Frame, here: Position
    ) -> list[Any]:
        """Emit a loop of unknown length; buffers of its emissions have room for the most iterations."""
        frame = around
        cond_consts, body_consts, init = loop.split(inputs)
        tag = loop_tag(loop.body.jaxpr)
        most: Any = tag.payload if tag else None
        counts = elements_read(loop.body.jaxpr.eqns)
        # `take_many` below takes the most that the loop can read; what it has not read is given back.
        before = {queue: frame.blocks[queue].position for queue in counts}
        elements = {
            queue: [
                leaf.reshape(most, count, *leaf.shape[1:])
                for leaf in frame.blocks[queue].take_many(most * count)
            ]
            for queue, count in counts.items()
        }

        def one_pass(number: jax.Array, carry: Tree) -> Any:
            blocks = {
                queue: Block(tuple(lax.dynamic_index_in_dim(e, number, 0, False) for e in leaves))
                for queue, leaves in elements.items()
            }
            inside = frame.inner(blocks)
            outputs = self.run_inner(loop.body, [*body_consts, *carry], inside, here)
            condense(inside)
            return outputs, inside.emitted

        def go_on(carry: Tree) -> jax.Array:
            return self.run_inner(loop.condition, [*cond_consts, *carry], frame, here)[0]

        passes, carry, emitted = run_while(go_on, one_pass, init, most)
        frame.emitted.update(emitted)
        for queue, count in counts.items():
            # Elements that the loop did not read come next.
            frame.blocks[queue].position = before[queue] + passes * count
        if tag is not None and not frame.counters:
            frame.steps_before = frame.steps_before + passes
        return carry

    def cond(self, cond: Cond, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """Emit a choice; emissions of its branches get a validity flag."""
        frame, (index, operands) = around, cond.split(inputs)

        def run_branch(branch: Inner, operands: list[Any]) -> Any:
            inside = frame.inner()
            outputs = self.run_inner(branch, operands, inside, here)
            condense(inside)
            return outputs, Emissions(
                (key, Emission(e.value, jnp.array(True) if e.valid is None else e.valid))
                for key, e in inside.emitted.items()
            )

        # All branches of a `switch` must return the same tree: a branch fills in zeros, flagged as not
        # computed, for what only the others emit.
        shapes: Emissions[Hashable, Any] = Emissions()
        branches = []
        for branch in cond.branches:
            run, (_, emitted) = traced_once(functools.partial(run_branch, branch), operands)
            shapes.update(emitted)
            branches.append(run)

        def complete(run: Callable[..., Tree], operands: list[Any]) -> Any:
            outputs, emitted = run(operands)
            return outputs, Emissions(
                (key, emitted[key] if key in emitted else jax.tree.map(zeros, shape))
                for key, shape in shapes.items()
            )

        complete_ones = [functools.partial(complete, run) for run in branches]
        outputs, emitted = lax.switch(index, complete_ones, operands)
        frame.emitted.update(emitted)
        return list(outputs)


def _read_by(want: Wanted, value: Any, around: Frame) -> Any:
    """The value that a reduction reads: a narrower one with the same numbers, if there is one.

    The gradient of a parameter that is cast to bfloat16 is a cast of what a product has left in
    memory. XLA computes that cast inside the kernels of the optimizer; statistics of its result
    would have it written to memory as well.
    """
    if not isinstance(value, jax.Array):
        return jnp.asarray(value)  # a literal of the program
    return around.widened.get(id(value), (None, value))[1] if want.widens else value


def _aside(value: Any, known: Any) -> Any:
    """A value as a tap reads it, so that XLA's CPU compiler compiles its other readers as without it.

    XLA computes a cheap value again in each kernel that reads it, but only if all its readers can be
    fused with it. One that cannot, such as the carry of a loop, would have it written to memory; a
    product in memory is rounded before it is added to something. A select can be fused with anything,
    and the compiler does not know which way it goes; `known` is a number of the running program that is
    not negative.
    """
    if devices.platform() != "cpu" or not isinstance(known, jax.Array):
        return value
    return jnp.where(known >= 0, value, jnp.zeros((), value.dtype))


def _rows(leaf: jax.Array, number: jax.Array, count: int) -> jax.Array:
    """The `count` rows of one iteration.

    Sliced in each iteration: reshaped before the loop, all rows would be copied by XLA.
    """
    if not len(leaf):  # a loop of length 0 is still traced
        return jnp.zeros((count, *leaf.shape[1:]), leaf.dtype)
    return lax.dynamic_slice_in_dim(leaf, number * count, count)
