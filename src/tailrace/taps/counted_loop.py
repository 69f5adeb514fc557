"""A loop whose number of passes is an argument of the program, not part of it.

One executable then serves executions of every length up to its capacity. `lax.scan` cannot do this:
its length is static. So the loop is a `lax.while_loop`, and what each pass emits is written into row
i of a buffer with as many rows as there is room for:

    while i < count:  carry, emitted = one_pass(carry, xs[i]);  buffer[i] = emitted;  i += 1

Periodic taps look at steps period-1, 2 period-1, ... Which passes those are is data too, so that
reductions are made under a branch, and their rows are written under one:

    look = (step + 1) % period == 0
    carry, emitted = one_pass(carry, xs[i], look);  if look:  looks[k] = emitted;  k += 1

The body is traced once: the shapes of the buffers come from the traced program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.jaxprs import internals
from tailrace.taps.frame import Emissions, Trip

OnePass = Callable[[Any, Any, Any], Any]


class Looks(NamedTuple):
    """Periodic taps: in every how many steps they look, and which emissions are theirs."""

    period: int
    are_of: Callable[[Any], bool]


def run_counted(
    one_pass: OnePass, init: Any, xs: Any, room: int, trip: Trip, looks: Looks | bool
) -> tuple[Any, Any, Any, Any]:
    """The first `trip.count` of `room` passes: carry, ys, emissions of each pass, and of looks.

    Args:
        one_pass: `one_pass(carry, x, look)` returns the next carry and `(ys, emissions)`.
        init: what the first pass starts from.
        xs: what each pass gets, stacked: `room` rows.
        room: the most passes.
        trip: how many there are, and the step of the first.
        looks: the periodic taps; True or False: all passes have a look, or none.
    """
    periodic = looks if isinstance(looks, Looks) else None

    def look_at(index: Any) -> Any:
        return looks if periodic is None else (trip.first + index + 1) % periodic.period == 0

    def at(carry: Any, index: Any) -> Any:
        x = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), xs)
        return one_pass(carry, x, look_at(index))

    start = jnp.int32(0)
    init = jax.tree.map(jnp.asarray, init)
    run, (_, (ys, emitted)) = _traced(at, init, start)
    seen = [key for key in emitted if periodic is not None and periodic.are_of(key)]
    most_looks = 0 if periodic is None else looks_in(room, periodic.period)
    kept = jax.tree.map(lambda s: zeros(s, (room,)), (ys, _without(emitted, seen)))
    rows = jax.tree.map(lambda s: zeros(s, (most_looks,)), _only(emitted, seen))

    def advance(state: Any) -> Any:
        index, number, carry, kept, rows = state
        carry, (ys, emitted) = run(carry, index)
        kept = _put(kept, (ys, _without(emitted, seen)), index)
        if seen:
            look = look_at(index)
            rows = lax.cond(look, _put, lambda rows, *_: rows, rows, _only(emitted, seen), number)
            number = number + look.astype(jnp.int32)
        return index + 1, number, carry, kept, rows

    _, _, carry, (ys, each), rows = lax.while_loop(
        lambda state: state[0] < trip.count, advance, (start, start, init, kept, rows)
    )
    return carry, ys, each, rows


def _only(emitted: Any, keys: Sequence[Any]) -> Any:
    return Emissions((key, emitted[key]) for key in keys)


def _without(emitted: Any, keys: Sequence[Any]) -> Any:
    return Emissions((key, value) for key, value in emitted.items() if key not in keys)


def looks_in(passes: int, period: int) -> int:
    """The most looks that so many passes can have, whatever the step of the first."""
    return -(-passes // period)


def looks_between(first: int, count: int, period: int) -> range:
    """The steps of an execution in which periodic taps look.

    >>> list(looks_between(5, 20, 10)), list(looks_between(5, 3, 10))
    ([9, 19], [])
    """
    start = first + period - 1 - first % period
    return range(start, first + count, period)


def zeros(shape: Any, lead: tuple[Any, ...] = ()) -> Any:
    """Zeros of a shape, with further dims in front."""
    return jnp.zeros((*lead, *shape.shape), shape.dtype)


def _put(buffers: Any, rows: Any, index: Any) -> Any:
    return jax.tree.map(
        lambda buffer, row: lax.dynamic_update_index_in_dim(buffer, row, index, 0), buffers, rows
    )


def _traced(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """A function traced once: what calls emit from now on, and the form of its result."""
    closed, form = jax.make_jaxpr(function, return_shape=True)(*args)
    run = internals.jaxpr_as_fun(closed)
    structure = jax.tree.structure(form)

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(structure, run(*jax.tree.leaves(args)))

    return call, form
