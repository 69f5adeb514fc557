"""The iterations of a loop that is emitted again, and which of their emissions are kept.

A loop of fixed length is a `lax.scan`. A loop whose length is data (a `Trip`) is a `lax.while_loop`
that writes the emissions of each iteration to a row of a buffer; see `counted_loop`.

Emissions leave a loop in one of three ways, and the choice decides what they cost. Stacked, one row per
iteration: the default. Periodic, one row per `period` iterations: the iterations in between do not
compute them at all. Collected, one value per loop (a sum, or the last one): they become part of the
carry, so that memory does not grow with the length of the loop. What is both, a digest of the last
iteration, is in the carry and computed by the iterations that observe.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.taps.counted_loop import Looks, OnePass, run_counted, traced_once, zeros
from tailrace.taps.frame import Emission, Emissions, Emitted, Trip
from tailrace.taps.wanted import RawKey, is_collected


class Ran(NamedTuple):
    """The results of a loop.

    Attributes:
        carry: the carry after the last iteration.
        ys: the stacked outputs of the original loop.
        each: emissions with one row per iteration.
        looks: emissions with one row per iteration that periodic taps observe.
        once: emissions with a single value.
    """

    carry: Tree
    ys: Tree
    each: Emitted
    looks: Emitted
    once: Emitted

    @property
    def emitted(self) -> Emitted:
        """All emissions."""
        return self.each | self.looks | self.once


@dataclasses.dataclass(frozen=True)
class Passes:
    """The iterations of one loop.

    Attributes:
        one_pass: `one_pass(carry, x, observing)` returns the next carry and `(ys, emissions)`.
        reverse: whether it runs from the last iteration to the first.
        unroll: how many iterations `lax.scan` unrolls.
        length: the number of iterations, or, with a `trip`, the capacity.
        collects: whether it may have emissions of which a single value is kept.
        keeps_start: whether the initial carry must not be overwritten: it is used afterwards.
        trip: the length of the loop, if it is data.
    """

    one_pass: OnePass
    reverse: bool
    unroll: int
    length: int
    collects: bool = False
    keeps_start: bool = False
    trip: Trip | None = None

    def run(self, init: Tree, xs: Tree, looks: Looks) -> Ran:
        """Emit all iterations; periodic values come from those that `looks` says."""
        if not self.collects:
            return self._all(self.one_pass, init, xs, looks)
        # Collected values join the carry, which needs an initial value of the right shape before the
        # first iteration. The body is traced for it, and that trace is then used as the body: tracing
        # it twice would double the time at each level of nested loops.
        traced, (_, (_, shapes)) = traced_once(
            lambda c, x: self.one_pass(c, x, looks.any), init, jax.tree.map(_first, xs)
        )
        kept = Emissions((k, jax.tree.map(zeros, s)) for k, s in shapes.items() if is_collected(k))

        def one_pass(carry: Tree, x: Tree, observing: bool) -> Any:
            carry, kept = carry
            # The trace above is of one kind of iteration; the other kind is traced here.
            known = observing == looks.any
            made = traced(carry, x) if known else self.one_pass(carry, x, observing)
            carry, (ys, emitted) = made
            after = Emissions()
            for key, old in kept.items():
                # A silent iteration does not emit them all: the old one stays.
                after[key] = collected(key, old, emitted.pop(key)) if key in emitted else old
            return (carry, after), (ys, emitted)

        ran = self._all(one_pass, (init, kept), xs, looks)
        carry, kept = ran.carry
        return ran._replace(carry=carry, once=kept)

    def _all(self, one_pass: OnePass, init: Tree, xs: Tree, looks: Looks) -> Ran:
        period = looks.period
        # With a period, a loop of fixed length ends with a look anyway. So a look at the last iteration
        # alone is a period as long as the loop. Not on a CPU: there XLA may round differently outside
        # of a loop, and an iteration must have the same bits wherever its execution ends.
        if looks.last and not period and devices.platform() != "cpu":
            period = self.length
        ending = looks.last and not period and self.length > 1
        if self.trip is not None or ending:
            assert not self.reverse, "a loop over steps runs forwards"
            found = run_counted(one_pass, init, xs, self.length, self.trip, looks)
            return Ran(*found, Emissions())

        def scan(body: Callable[[Tree, Tree], Any], carry: Tree, xs: Tree, length: int) -> Any:
            return lax.scan(
                body, carry, xs, length=length, reverse=self.reverse, unroll=self.unroll
            )

        if period < 2:
            body = lambda c, x: one_pass(c, x, looks.any)  # noqa: E731
            first: Tree = None
            # The loop overwrites its carry, of which XLA would make a copy first. The first iteration
            # outside of it leaves another one instead.
            apart = self.keeps_start and self.length > 1 and devices.platform() != "cpu"
            assert not (apart and self.reverse), "a loop over steps runs forwards"
            if apart:
                init, first = alone(body)(init, jax.tree.map(lambda x: x[0], xs))
                xs = jax.tree.map(lambda x: x[1:], xs)
            carry, made = scan(body, init, xs, self.length - apart)
            if apart:
                made = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, made)
            ys, emitted = made
            return Ran(carry, ys, emitted, Emissions(), Emissions())
        # A branch in every iteration would cost more than the observation. Instead, each group of
        # `period` iterations is a loop over the silent ones, then one observed iteration.
        groups, rest = divmod(self.length, period)
        assert not rest, "the caller cuts loops into multiples of the period"
        grouped = jax.tree.map(lambda x: x.reshape(groups, period, *x.shape[1:]), xs)

        def group(carry: Tree, x: Tree) -> Any:
            silent = jax.tree.map(lambda x: x[:-1], x)
            carry, (ys, emitted) = scan(
                lambda c, x: one_pass(c, x, False), carry, silent, period - 1
            )
            # The last of the group: periodic taps keep steps n-1, 2n-1, ...
            look = alone(lambda c, x: one_pass(c, x, True))
            carry, (last_ys, last) = look(carry, jax.tree.map(lambda x: x[-1], x))
            every = Emissions((k, _append(e, last.pop(k))) for k, e in emitted.items())
            return carry, (_append(ys, last_ys), every, last)

        carry, (ys, every, last) = lax.scan(group, init, grouped, length=groups)
        # Rows of every iteration come back as [groups, period, ...]; users expect [length, ...].
        flat = lambda x: x.reshape(self.length, *x.shape[2:])  # noqa: E731
        return Ran(carry, jax.tree.map(flat, ys), jax.tree.map(flat, every), last, Emissions())


def alone(body: Callable[[Tree, Tree], Any]) -> Callable[[Tree, Tree], Any]:
    """An iteration outside of the loop, with the same bits as inside.

    XLA must not fuse it with what follows: a loss that is also written to the row of another array may
    be summed in another order.
    """
    return lambda carry, x: lax.optimization_barrier(body(carry, x))


def skipping(one_pass: OnePass, is_good: Callable[[Emitted], jax.Array]) -> OnePass:
    """An iteration that leaves the carry unchanged if its emissions are not good."""

    def run(before: Tree, x: Tree, observing: bool) -> Any:
        after, (ys, emitted) = one_pass(before, x, observing)
        # Without the barrier, XLA would fuse the select with the update and round the update
        # differently from a program without a guard. Both must give the same bits.
        after = lax.optimization_barrier(after)
        good = is_good(emitted)
        kept = jax.tree.map(lambda old, new: jnp.where(good, new, old), before, after)
        return kept, (ys, emitted)

    return run


def _append(many: Tree, one: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), many, one)


def _first(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def collected(key: Any, old: Emission, new: Emission, ours: bool = True) -> Emission:
    """Combine a value over two iterations: their sum, or the later one in which it was computed."""
    if ours and isinstance(key, RawKey) and key[0].collect == "sum":
        return jax.tree.map(jnp.add, old, new)
    made = new.valid
    if made is None:
        return new
    assert old.valid is not None, "a loop carries emissions of one form"
    return Emission(
        jax.tree.map(lambda o, n: jnp.where(like(made, n), n, o), old.value, new.value),
        jnp.logical_or(old.valid, made),
    )


def like(made: jax.Array, value: jax.Array) -> jax.Array:
    """Flags over the leading dims of a value, reshaped so that they broadcast over the others."""
    return made.reshape(made.shape + (1,) * (value.ndim - made.ndim))


def both(made: jax.Array, valid: jax.Array) -> jax.Array:
    """The conjunction of flags over the leading dims and flags over more of them."""
    return jnp.logical_and(like(made, valid), valid)
