"""The passes of a loop that is emitted again: how they are strung together, what is kept of each.

A loop of fixed length is a `lax.scan`. A loop whose length is data (a `Trip`) is a `lax.while_loop`
that writes what each pass emits into a row of a buffer; see `counted_loop`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.taps.counted_loop import run_counted, traced_once, zeros
from tailrace.taps.frame import Emission, Emissions, Trip


class Ran(NamedTuple):
    """What a loop leaves behind.

    Attributes:
        carry: what it carries, after the last pass.
        ys: what the loop itself stacks.
        each: emissions with one row a pass.
        looks: emissions with one row for each pass in which periodic taps look.
        once: emissions with one value in all.
    """

    carry: Any
    ys: Any
    each: Emissions[Any, Emission]
    looks: Emissions[Any, Emission]
    once: Emissions[Any, Emission]

    @property
    def emitted(self) -> Emissions[Any, Emission]:
        """All emissions."""
        return self.each | self.looks | self.once


@dataclasses.dataclass(frozen=True)
class Passes:
    """The passes of one loop.

    Attributes:
        one_pass: `one_pass(carry, x, observing)` returns the next carry and `(ys, emissions)`.
        reverse: whether the last pass comes first.
        unroll: how many passes `lax.scan` writes out.
        length: how many passes there are, or, with a `trip`, how many there is room for.
        collect: emissions of which one value in all is kept: their sum, or the last.
        trip: how far the loop runs, if that is data.
    """

    one_pass: Callable[[Any, Any, bool], Any]
    reverse: bool
    unroll: int
    length: int
    collect: Mapping[Any, str] | None = None
    trip: Trip | None = None

    def collecting(self, collect: Mapping[Any, str]) -> Passes:
        """Keep one entry in all, not one a pass, of the emissions named in `collect`."""
        return dataclasses.replace(self, collect=collect)

    def run(self, init: Any, xs: Any, period: int, observing: bool) -> Ran:
        """All passes; periodic values come from the last of every `period` of them."""
        if self.collect is None:
            return self._all(self.one_pass, init, xs, period, observing)
        traced, (_, (_, shapes)) = traced_once(
            lambda c, x: self.one_pass(c, x, observing), init, jax.tree.map(_first, xs)
        )
        kept = Emissions((k, jax.tree.map(zeros, shapes[k])) for k in self.collect if k in shapes)

        def one_pass(carry: Any, x: Any, looks: bool) -> Any:
            carry, kept = carry
            made = traced(carry, x) if looks == observing else self.one_pass(carry, x, looks)
            carry, (ys, emitted) = made
            after = Emissions()
            for key, old in kept.items():
                after[key] = collected(key, old, emitted.pop(key)) if key in emitted else old
            return (carry, after), (ys, emitted)

        ran = self._all(one_pass, (init, kept), xs, period, observing)
        carry, kept = ran.carry
        return ran._replace(carry=carry, once=kept)

    def _all(self, one_pass: Any, init: Any, xs: Any, period: int, observing: bool) -> Ran:
        if self.trip is not None:
            assert not self.reverse, "a loop over steps runs forwards"
            found = run_counted(one_pass, init, xs, self.length, self.trip, period, observing)
            return Ran(*found, Emissions())

        def scan(body: Any, carry: Any, xs: Any, length: int) -> Any:
            return lax.scan(
                body, carry, xs, length=length, reverse=self.reverse, unroll=self.unroll
            )

        if period == 1:
            body = lambda c, x: one_pass(c, x, observing)  # noqa: E731
            carry, (ys, emitted) = scan(body, init, xs, self.length)
            return Ran(carry, ys, emitted, Emissions(), Emissions())
        # A branch inside the loop would cost more than the observation: the last of every `period`
        # passes is written out instead, behind a loop over the others.
        groups, rest = divmod(self.length, period)
        assert not rest, "the caller cuts loops into multiples of the period"
        grouped = jax.tree.map(lambda x: x.reshape(groups, period, *x.shape[1:]), xs)

        def group(carry: Any, x: Any) -> Any:
            silent = jax.tree.map(lambda x: x[:-1], x)
            carry, (ys, emitted) = scan(
                lambda c, x: one_pass(c, x, False), carry, silent, period - 1
            )
            carry, (last_ys, last) = one_pass(carry, jax.tree.map(lambda x: x[-1], x), observing)
            every = Emissions((k, _append(e, last.pop(k))) for k, e in emitted.items())
            return carry, (_append(ys, last_ys), every, last)

        carry, (ys, every, last) = lax.scan(group, init, grouped, length=groups)
        flat = lambda x: x.reshape(self.length, *x.shape[2:])  # noqa: E731
        return Ran(carry, jax.tree.map(flat, ys), jax.tree.map(flat, every), last, Emissions())


def skipping(one_pass: Callable[..., Any], is_good: Callable[[Any], Any]) -> Callable[..., Any]:
    """A pass that changes nothing of what it carries if what it emits is not good."""

    def run(before: Any, x: Any, observing: bool) -> Any:
        after, (ys, emitted) = one_pass(before, x, observing)
        # The choice must not be fused with what it chooses from: XLA would round the update otherwise
        # than it does in a program without a guard.
        after = lax.optimization_barrier(after)
        good = is_good(emitted)
        kept = jax.tree.map(lambda old, new: jnp.where(good, new, old), before, after)
        return kept, (ys, emitted)

    return run


def _append(many: Any, one: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), many, one)


def _first(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def collected(key: Any, old: Emission, new: Emission, ours: bool = True) -> Emission:
    """What is kept of two passes: their sum, or the later one in which the value was made."""
    if ours and key[0].collect == "sum":
        return jax.tree.map(jnp.add, old, new)
    if new.valid is None:
        return new
    return Emission(
        jax.tree.map(lambda o, n: jnp.where(like(new.valid, n), n, o), old.value, new.value),
        jnp.logical_or(old.valid, new.valid),
    )


def like(made: Any, value: Any) -> Any:
    """Flags over the leading dims of a value, fit to be broadcast over the others."""
    return made.reshape(made.shape + (1,) * (value.ndim - made.ndim))


def both(made: Any, valid: Any) -> Any:
    """Flags over the leading dims, and flags over more of them: both must be up."""
    return jnp.logical_and(like(made, valid), valid)
