"""The inputs and emissions of a part of a program while it is emitted again."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.trees import Tree

Emissions = OrderedDict
"""Values by key. Not a plain dict: JAX sorts the keys of one, and queues have no order."""

Scalar = jax.Array | int
"""A number that may be known only at run time."""


class Emission(NamedTuple):
    """A value that leaves the program.

    `valid` flags the entries that were computed: None if all were, otherwise booleans over the leading
    (loop) dims. A value inside a branch or a while loop has it.
    """

    value: Tree
    valid: jax.Array | None = None


Emitted = Emissions[Any, Emission]
"""The emissions of a part of a program."""


@dataclasses.dataclass(frozen=True)
class Ambient:
    """Values known only at run time; the same for the whole program.

    Attributes:
        key: the random key of the program, from its seed.
        first_step: the index of the first step of this execution.
        replica: the index of this replica.
        sharded: whether tensors are sharded over devices, and must not be flattened.
    """

    key: jax.Array
    first_step: Scalar
    replica: Scalar
    sharded: bool = False


@dataclasses.dataclass(frozen=True)
class Trip:
    """The length of a loop whose length is data: values known only at run time.

    Attributes:
        count: the number of iterations, at most the loop's capacity.
        first: the step of its first iteration, which determines the steps that periodic taps observe.
    """

    count: jax.Array
    first: jax.Array


@dataclasses.dataclass(frozen=True)
class Counter:
    """A Tailrace loop that is being emitted: its length and its counter."""

    length: int | None
    value: jax.Array


@dataclasses.dataclass
class Block:
    """Elements of one infeed, stacked along the first dim, and the number taken so far."""

    leaves: tuple[jax.Array, ...]
    position: Scalar = 0

    def take(self) -> list[jax.Array]:
        """The next element."""
        return [leaf[0] for leaf in self.take_many(1)]

    def take_many(self, count: int) -> tuple[jax.Array, ...]:
        """The next `count` elements, still stacked."""
        # A Python number as long as no while loop came before: slices are then static.
        start, self.position = self.position, self.position + count
        if isinstance(start, int):
            return tuple(leaf[start : start + count] for leaf in self.leaves)
        # After a while loop, the position is known only at run time.
        return tuple(lax.dynamic_slice_in_dim(leaf, start, count) for leaf in self.leaves)


@dataclasses.dataclass
class Frame:
    """The environment of one part of a program: a loop body, a branch, or the whole.

    Attributes:
        ambient: values known only at run time.
        blocks: the elements to take, by infeed.
        counters: the Tailrace loops around, outermost first.
        steps_before: iterations of outermost loops that this execution ran before.
        replaying: whether this is a forward pass repeated for the backward pass.
        observing: whether this iteration emits periodic values.
        trip: the length of the outermost loop, if it is data.
        widened: what casts to a wider dtype were cast from, with their results, by the id of those.
        emitted: the emissions, by key.
        rows: for emissions of such a loop, the period of iterations per row; by key.
    """

    ambient: Ambient
    blocks: dict[Any, Block] = dataclasses.field(default_factory=dict)
    counters: tuple[Counter, ...] = ()
    steps_before: Scalar = 0
    replaying: bool = False
    observing: bool = True
    trip: Trip | None = None
    widened: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    emitted: Emitted = dataclasses.field(default_factory=Emissions)
    rows: dict[Hashable, int] = dataclasses.field(default_factory=dict)

    def inner(self, blocks: dict[Any, Block] | None = None, **changes: Any) -> Frame:
        """The frame of a part inside this one: same environment, separate blocks and emissions."""
        blocks = self.blocks if blocks is None else blocks
        return dataclasses.replace(self, blocks=blocks, emitted=Emissions(), **changes)

    def emit(self, key: Hashable, value: Tree, valid: jax.Array | None = None) -> None:
        """Emit a value under `key`."""
        self.emitted[key] = Emission(value, valid)

    def take(self, each: Emitted, looks: Emitted, once: Emitted, period: int) -> None:
        """Add the emissions of an inner loop: one row per iteration, one per look, and without rows."""
        self.emitted.update(each | looks | once)
        if self.trip is not None and not self.counters:
            self.rows.update(dict.fromkeys(each, 1) | dict.fromkeys(looks, period))

    def step(self) -> jax.Array:
        """The index of the step: the execution's first step plus the outermost loop's counter."""
        first = jnp.asarray(self.ambient.first_step + self.steps_before, jnp.int32)
        return first + self.counters[0].value if self.counters else first

    def microbatch(self) -> jax.Array:
        """The index of the microbatch in its step, from the counters of the inner loops."""
        number = jnp.int32(0)
        # Nested loops over microbatches count like digits: the outer one is the more significant.
        for counter in self.counters[1:]:
            number = number * (counter.length or 1) + counter.value
        return number

    def fold_key(self, call: int) -> jax.Array:
        """The random key of one call of `tr.key()`; independent of the schedule."""
        key = self.ambient.key
        # What the key depends on, and nothing else: not the device, the stage or the number of
        # steps in an execution. So it is the same in every schedule, and in a recomputation.
        for number in (self.step(), self.microbatch(), self.ambient.replica, call):
            key = jax.random.fold_in(key, number)
        return key
