"""What a program reads elements from: a feed.

A traced program names its feeds; a dispatch gets a block of elements for each. `InfeedQueue` reads
blocks from a dataset. `HandedFeed` is for callers that have the elements themselves: they give the
block to the dispatch, and the feed only says what elements look like.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np

from tailrace.errors import FeedError
from tailrace.feeds.elements import ElementSpec

Block = list[np.ndarray]
"""Elements stacked leaf by leaf, on the host."""


@dataclasses.dataclass(eq=False)
class Staged:
    """The elements of one execution: on the host, and on the device.

    Attributes:
        host: the elements, stacked over all replicas of this process.
        device: the same on the device, possibly with room for more rows.
        count: how many there are for each replica.
        replicas: how many replicas share them.
        first: the number of the first one in its dataset; -1 if that is unknown.
    """

    host: Block
    device: tuple[Any, ...]
    count: int
    replicas: int
    first: int = -1

    @property
    def room(self) -> int:
        """How many elements for each replica the arrays on the device have room for."""
        return len(self.device[0]) if self.device else self.count

    def cut(self, count: int) -> Staged:
        """The first `count` elements for each replica, without room for more."""
        host = [leaf[: count * self.replicas] for leaf in self.host]
        device = tuple(leaf[:count] for leaf in self.device)
        return Staged(host, device, count, self.replicas, self.first)

    def unused(self, used: int) -> Block:
        """What is left on the host after the first `used` elements (over all replicas)."""
        return [leaf[used:] for leaf in self.host]


class Feed(abc.ABC):
    """Elements for programs, or what is known of elements that callers hand over."""

    replicas: int | None = None
    """The number of replicas that share the elements; None before the first use."""

    reading: tuple[int, int, int] | None = None
    """Of the block taken last: epoch, number of its first element, how many; None if unknown."""

    @abc.abstractmethod
    def spec(self) -> ElementSpec:
        """The form of an element."""

    @abc.abstractmethod
    def take(
        self, count: int, sharding: Any, *, then: int | None = None, room: int | None = None
    ) -> Staged:
        """The next `count` elements for each replica, on the device."""

    def bind_replicas(self, replicas: int) -> None:
        """A feed hands out its elements to one number of replicas for good."""
        self.check_replicas(replicas)
        self.replicas = replicas

    def check_replicas(self, replicas: int) -> None:
        """Refuse a number of replicas other than the one the feed is bound to."""
        if self.replicas is not None and self.replicas != replicas:
            raise FeedError(
                f"An infeed belongs to the number of replicas it was first used with, because they "
                f"share out its elements in turn. This one was used with {self.replicas}, and now "
                f"with {replicas}. Make another InfeedQueue for the other program."
            )

    @abc.abstractmethod
    def started(self, ticket: Any) -> None:
        """Say that a block runs, and which array will be ready when it is used up."""

    @abc.abstractmethod
    def put_back(self, staged: Staged, used: int) -> None:
        """Return what a program did not read; `used` counts elements over all replicas."""

    @abc.abstractmethod
    def elements_of(self, block: Any) -> Any:
        """The elements that rows of a staged block on the host stand for, on the host."""

    @abc.abstractmethod
    def rest(self) -> None:
        """End threads and let go of what is staged; the feed can be used again."""


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
        self, count: int, sharding: Any, *, then: int | None = None, room: int | None = None
    ) -> Staged:
        """There is nothing to take: the caller of the dispatch has the elements."""
        del sharding, then, room
        raise FeedError(f"This feed has no elements of its own. Hand {count} over to the dispatch.")

    def started(self, ticket: Any) -> None:
        """Nothing waits for blocks here."""

    def put_back(self, staged: Staged, used: int) -> None:
        """The caller still has what a failed dispatch did not use."""

    def rest(self) -> None:
        """There is no thread to end."""

    def elements_of(self, block: Any) -> Any:
        """The elements that a block on the host stands for; rows may be numbers of a dataset."""
        return [leaf.elements() if hasattr(leaf, "elements") else leaf for leaf in block]

    def __repr__(self) -> str:
        return f"HandedFeed({', '.join(self._spec.paths)})"
