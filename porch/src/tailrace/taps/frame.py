"""What a stretch of a program reads from outside and yields to outside while it is re-emitted."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Emissions = OrderedDict
"""Values by key. JAX sorts the keys of a plain dict, and queues have no order."""


class Emission(NamedTuple):
    """A value on its way out of the program.

    `valid` says which entries were really made: None when all were, otherwise booleans over the
    leading (loop) dims. It is there when a branch or a while loop stands around the value.
    """

    value: Any
    valid: Any = None


@dataclasses.dataclass(frozen=True)
class Ambient:
    """What the running program alone knows; the same for the whole of it.

    Attributes:
        key: the random key of the program, from its seed.
        first_step: the number of the first step of this execution.
        replica: the number of the replica that computes.
    """

    key: Any
    first_step: Any
    replica: Any


@dataclasses.dataclass(frozen=True)
class Trip:
    """How far a loop runs whose length is data: numbers that only the running program knows.

    Attributes:
        count: how many passes it makes, of those that it has room for.
        first: the step of its first pass, which tells in which passes periodic taps look.
    """

    count: Any
    first: Any


@dataclasses.dataclass(frozen=True)
class Counter:
    """A loop made by Tailrace that is being run: its length and where it stands."""

    length: int | None
    value: Any


@dataclasses.dataclass
class Block:
    """Elements of one infeed, stacked along the first dim, and how many were taken so far."""

    leaves: tuple[Any, ...]
    position: Any = 0

    def take(self) -> list[Any]:
        """The next element."""
        return [leaf[0] for leaf in self.take_many(1)]

    def take_many(self, count: int) -> tuple[Any, ...]:
        """The next `count` elements, still stacked."""
        start, self.position = self.position, self.position + count
        if isinstance(start, int):
            return tuple(leaf[start : start + count] for leaf in self.leaves)
        # Behind a while loop, the running program alone knows where it stands.
        return tuple(lax.dynamic_slice_in_dim(leaf, start, count) for leaf in self.leaves)


@dataclasses.dataclass
class Frame:
    """The surroundings of one stretch of program: a loop body, a branch, the whole.

    Attributes:
        ambient: what the running program alone knows.
        blocks: the elements to take from, by infeed.
        counters: the Tailrace loops around, outermost first.
        steps_before: passes of outermost loops that this execution ran before.
        replaying: whether a forward pass is only repeated for the backward pass.
        observing: whether periodic values are wanted in this pass.
        trip: how far the outermost loop runs, if its length is data.
        emitted: what leaves, by key.
        rows: of what leaves such a loop, one row for every so many passes; by key.
    """

    ambient: Ambient
    blocks: dict[Any, Block] = dataclasses.field(default_factory=dict)
    counters: tuple[Counter, ...] = ()
    steps_before: Any = 0
    replaying: bool = False
    observing: bool = True
    trip: Trip | None = None
    emitted: Emissions[Hashable, Emission] = dataclasses.field(default_factory=Emissions)
    rows: dict[Hashable, int] = dataclasses.field(default_factory=dict)

    def inner(self, blocks: dict[Any, Block] | None = None, **changes: Any) -> Frame:
        """The frame of a stretch inside this one: same surroundings, own blocks and emissions."""
        blocks = self.blocks if blocks is None else blocks
        return dataclasses.replace(self, blocks=blocks, emitted=Emissions(), **changes)

    def emit(self, key: Hashable, value: Any, valid: Any = None) -> None:
        """Send a value out under `key`."""
        self.emitted[key] = Emission(value, valid)

    def take(self, each: Any, looks: Any, once: Any, period: int) -> None:
        """Emissions of a loop inside: with one row a pass, one row a look, and without rows."""
        self.emitted.update(each | looks | once)
        if self.trip is not None and not self.counters:
            self.rows.update(dict.fromkeys(each, 1) | dict.fromkeys(looks, period))

    def step(self) -> Any:
        """The number of the step: first step of the execution + the outermost loop's counter."""
        first = jnp.asarray(self.ambient.first_step + self.steps_before, jnp.int32)
        return first + self.counters[0].value if self.counters else first

    def microbatch(self) -> Any:
        """The number of the microbatch in its step: the inner loops' counters, taken together."""
        number: Any = jnp.int32(0)
        for counter in self.counters[1:]:
            number = number * (counter.length or 1) + counter.value
        return number

    def fold_key(self, call: int) -> Any:
        """The random key of one call of `tr.key()`: the same whatever the schedule."""
        key = self.ambient.key
        for number in (self.step(), self.microbatch(), self.ambient.replica, call):
            key = jax.random.fold_in(key, number)
        return key
