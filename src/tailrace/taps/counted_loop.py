"""A loop whose length is an argument of the program, not part of it.

One executable then serves executions of every length up to its capacity. `lax.scan` cannot do this: its
length is static. So the loop is a `lax.while_loop`, and the emissions of each iteration are written to
row i of a buffer with as many rows as the capacity:

    while i < count:  carry, emitted = one_pass(carry, xs[i]);  buffer[i] = emitted;  i += 1

Periodic taps observe steps period-1, 2 period-1, ... A branch in every iteration would cost more than
the observation, so iterations without one run in an inner loop:

    while i < count:
        while i < min(count, next look):  silent pass
        if i < count:                     pass with a look, row k of the buffers of looks

The digest of gradients is of the last step alone. That is one more look, by the same body:

    while i < count:
        while i < min(count - 1, next look):  silent pass
        pass with a look, row k;  k += 1 if a periodic look is due

The body is traced twice, once silent and once with a look, and never again: shapes are taken from the
traced programs. Tracing it a third time for its shapes would double the work at each nesting level.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.trees import Tree
from tailrace.jaxprs import internals
from tailrace.taps.frame import Emissions, Emitted, Trip

OnePass = Callable[[Tree, Tree, bool], Any]
"""Takes the carry, one row of `xs`, and whether to observe; returns the carry and `(ys, emissions)`."""


@dataclasses.dataclass(frozen=True)
class Looks:
    """The iterations of a loop that observe.

    Attributes:
        period: the last of every `period`; 0 for none.
        last: whether the last one does in any case.
    """

    period: int
    last: bool = False

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.period > 0 or self.last


def run_counted(
    one_pass: OnePass, init: Tree, xs: Tree, room: int, trip: Trip | None, looks: Looks
) -> tuple[Tree, Tree, Emitted, Emitted]:
    """Run the first `trip.count` of `room` iterations: carry, ys, emissions of each, and of looks.

    Without a `trip` it is all of them, and only the last one may observe.
    """
    count: Any = room if trip is None else trip.count
    # Python's `True` is no number to JAX.
    period, ending = looks.period, int(looks.last)
    assert trip is not None or not period, "rows of looks depend on the first step"

    def at(index: jax.Array) -> Tree:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), xs)

    start = jnp.int32(0)
    # Python numbers have no dtype of their own, and the carry of a while loop must keep its dtype.
    init = jax.tree.map(jnp.asarray, init)
    # If every iteration is observed, the silent body is the observing one.
    always = period == 1 or (looks.last and not period and room == 1)
    quiet, form = traced_once(lambda c, i: one_pass(c, at(i), always), init, start)
    _, (ys, each) = form
    kept = jax.tree.map(lambda s: zeros(s, (room,)), (ys, each))

    def silent(state: Tree) -> Tree:
        index, carry, kept = state
        carry, made = quiet(carry, index)
        return index + 1, carry, _put(kept, made, index)

    if always or not looks.any:
        _, carry, (ys, each) = lax.while_loop(
            lambda state: state[0] < count, silent, (start, init, kept)
        )
        return carry, ys, each, Emissions()

    # What only the observing body emits gets a buffer with one row per look, not per iteration.
    loud, form = traced_once(lambda c, i: one_pass(c, at(i), True), init, start)
    _, (_, all_made) = form
    # The last iteration writes a row too, if no periodic look is due in it: one that is not counted.
    rows = looks_in(room, period) + ending if period else 0
    seen = Emissions(
        (key, jax.tree.map(lambda s: zeros(s, (rows,)), shape))
        for key, shape in all_made.items()
        if key not in each
    )

    def ahead(index: jax.Array) -> jax.Array:
        """The number of iterations before the next periodic look."""
        # Looks are at fixed steps of the training, not of this execution: an execution may start in the
        # middle of a period.
        assert trip is not None
        return period - 1 - (trip.first + index) % period

    def look(state: Tree) -> Tree:
        index, number, carry, kept, seen = state
        carry, (ys, emitted) = loud(carry, index)
        every = Emissions((key, emitted[key]) for key in each)
        now = Emissions((key, emitted[key]) for key in seen)
        kept, seen = _put(kept, (ys, every), index), _put(seen, now, number)
        due = jnp.int32(ahead(index) == 0 if period else 0)
        return index + 1, number + due, carry, kept, seen

    def group(state: Tree) -> Tree:
        index, number, carry, kept, seen = state
        stop = count - ending
        if period:
            stop = jnp.minimum(stop, index + ahead(index))
        else:
            index = start  # there is one group, of a length that XLA may know
        index, carry, kept = lax.while_loop(
            lambda state: state[0] < stop, silent, (index, carry, kept)
        )
        state = (index, number, carry, kept, seen)
        if looks.last:
            return look(state)
        # The count may end before the next look. One branch per period costs little, and less than a
        # loop of one pass or none (GPT-2 small on an H200: 0.26 and 0.37 ms a step at every(10)).
        return lax.cond(index < count, look, lambda state: state, state)

    # Hidden from XLA, which would unroll a loop over one group. Outside of a loop it may round
    # differently, and the last step must have the bits that it has inside a longer execution.
    end = lax.optimization_barrier(jnp.int32(count)) if trip is None else count
    _, _, carry, (ys, each), seen = lax.while_loop(
        lambda state: state[0] < end, group, (start, start, init, kept, seen)
    )
    return carry, ys, each, seen


def looks_in(passes: int, period: int) -> int:
    """The most looks that `passes` iterations can contain, whatever the step of the first."""
    return -(-passes // period)


def looks_between(first: int, count: int, period: int) -> range:
    """The steps of an execution that periodic taps observe.

    >>> list(looks_between(5, 20, 10)), list(looks_between(5, 3, 10))
    ([9, 19], [])
    """
    start = first + period - 1 - first % period
    return range(start, first + count, period)


def zeros(shape: jax.ShapeDtypeStruct, lead: tuple[Any, ...] = ()) -> jax.Array:
    """Zeros of a shape, with additional leading dims."""
    return jnp.zeros((*lead, *shape.shape), shape.dtype)


def _put(buffers: Tree, rows: Tree, index: jax.Array) -> Tree:
    return jax.tree.map(
        lambda buffer, row: lax.dynamic_update_index_in_dim(buffer, row, index, 0), buffers, rows
    )


def traced_once(function: Callable[..., Tree], *args: Tree) -> tuple[Callable[..., Tree], Tree]:
    """Trace a function once: a function that emits the traced program, and the result's shapes."""
    closed, form = jax.make_jaxpr(function, return_shape=True)(*args)
    # What the function closes over becomes constants of the trace.
    run = internals.jaxpr_as_fun(closed)
    structure = jax.tree.structure(form)

    def call(*args: Tree) -> Tree:
        return jax.tree.unflatten(structure, run(*jax.tree.leaves(args)))

    return call, form
