"""Feeds: the sources that programs read elements from.

A traced program refers to its feeds; each dispatch gets a block of elements from each of them.
`InfeedQueue` reads blocks from a dataset. `HandedFeed` is for callers that have the elements: they pass
the block to the dispatch, and the feed only describes the elements.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.devices.shardings import without_mesh
from tailrace.errors import FeedError
from tailrace.feeds.elements import ElementSpec

if TYPE_CHECKING:
    from tailrace.devices.devices import Device

Block = list[np.ndarray]
"""Elements on the host, stacked leaf by leaf."""


@dataclasses.dataclass(eq=False)
class Staged:
    """The elements of one execution, on the host and on the device.

    Attributes:
        host: the elements, stacked over all replicas of this process.
        device: the same on the device, possibly padded with unused rows.
        count: the number of elements per replica.
        replicas: the number of replicas that share them.
        first: the index of the first element in its dataset; -1 if unknown.
    """

    host: Block
    device: tuple[Any, ...]
    count: int
    replicas: int
    first: int = -1

    @property
    def room(self) -> int:
        """The number of elements per replica that the arrays on the device have room for."""
        return len(self.device[0]) if self.device else self.count

    def cut(self, count: int) -> Staged:
        """The first `count` elements per replica, without padding."""
        host = [leaf[: count * self.replicas] for leaf in self.host]
        # Rows are elements of a replica on the device, and of all replicas on the host.
        with without_mesh():
            device = tuple(leaf[:count] for leaf in self.device)
        return Staged(host, device, count, self.replicas, self.first)

    def padded(self, room: int) -> Staged:
        """The same elements, in arrays on the device with room for more."""
        missing = room - self.room
        if missing <= 0:
            return self
        with without_mesh():
            wide = [jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)]) for x in self.device]
        where = [leaf.sharding for leaf in self.device]
        return dataclasses.replace(self, device=tuple(jax.device_put(wide, where)))

    def unused(self, used: int) -> Block:
        """The elements on the host after the first `used` (over all replicas)."""
        return [leaf[used:] for leaf in self.host]


class Feed(abc.ABC):
    """A source of elements for programs, or the description of elements that callers pass in."""

    replicas: int | None = None
    """The number of replicas that share the elements; None before the first use."""

    reading: tuple[int, int, int] | None = None
    """The last block taken: epoch, index of its first element, number of elements; None if unknown."""

    @abc.abstractmethod
    def spec(self) -> ElementSpec:
        """The form of an element."""

    @abc.abstractmethod
    def take(
        self,
        count: int,
        sharding: jax.sharding.Sharding | Device,
        *,
        then: int | None = None,
        room: int | None = None,
    ) -> Staged:
        """The next `count` elements per replica, on the device."""

    def bind_replicas(self, replicas: int) -> None:
        """Bind the feed to a number of replicas, for its lifetime."""
        self.check_replicas(replicas)
        self.replicas = replicas

    def check_replicas(self, replicas: int) -> None:
        """Raise an error for a number of replicas other than the bound one."""
        if self.replicas is not None and self.replicas != replicas:
            raise FeedError(
                f"An infeed belongs to the number of replicas it was first used with, because they "
                f"share out its elements in turn. This one was used with {self.replicas}, and now "
                f"with {replicas}. Make another InfeedQueue for the other program."
            )

    @abc.abstractmethod
    def started(self, ticket: jax.Array | None) -> None:
        """Report that a block's execution was dispatched; `ticket` is ready when it has finished."""

    @abc.abstractmethod
    def put_back(self, staged: Staged, used: int) -> None:
        """Return the elements a program did not read; `used` counts those it read on all replicas."""

    @abc.abstractmethod
    def elements_of(self, block: list[Any]) -> Block:
        """The elements of a staged block, on the host; its rows may be indices."""

    @abc.abstractmethod
    def rest(self) -> None:
        """Stop threads and release staged blocks; the feed can be used again."""


class HandedFeed(Feed):
    """A feed whose blocks come with each dispatch.

    Args:
        spec: the form of an element.
    """

    def __init__(self, spec: ElementSpec) -> None:
        self._spec = spec

    def spec(self) -> ElementSpec:
        """The form of an element."""
        return self._spec

    def take(
        self,
        count: int,
        sharding: jax.sharding.Sharding | Device,
        *,
        then: int | None = None,
        room: int | None = None,
    ) -> Staged:
        """Raise an error: the caller of the dispatch has the elements."""
        del sharding, then, room
        raise FeedError(f"This feed holds no elements. Pass {count} to the dispatch.")

    def started(self, ticket: jax.Array | None) -> None:
        """Do nothing: no thread waits for blocks here."""

    def put_back(self, staged: Staged, used: int) -> None:
        """Do nothing: the caller still has the elements that a failed dispatch did not use."""

    def rest(self) -> None:
        """Do nothing: there is no thread."""

    def elements_of(self, block: list[Any]) -> Block:
        """The elements of a block on the host; its rows may be indices into a dataset."""
        # A front end may hand over rows of a dataset by number; it knows how to read them.
        return [leaf.elements() if hasattr(leaf, "elements") else leaf for leaf in block]

    def __repr__(self) -> str:
        return f"HandedFeed({', '.join(self._spec.paths)})"
