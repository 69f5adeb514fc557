"""The infeed of a model that is called: each call hands over the elements of one execution."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax

from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.infeed import InfeedQueue, Staged

AHEAD = 8
"""The elements of so many portions are on their way at a time: one copy does not fill the way."""

SMALL_BYTES = 1 << 16
"""What is smaller travels with the call of the program, which takes less than moving it first."""


class CallFeed(InfeedQueue):
    """Feeds what `hand` was given last; there is nothing to read ahead, and so no thread."""

    def __init__(self, spec: ElementSpec) -> None:
        super().__init__([], prefetch=0)
        self._form = spec
        self._arrays: list[Any] = []
        self._waiting: deque[tuple[int, int]] = deque()
        self._travelling: deque[Staged] = deque()

    def spec(self) -> ElementSpec:
        """The form of an element."""
        return self._form

    def hand(self, arrays: list[Any], counts: Sequence[int] = ()) -> None:
        """The elements of the next execution, stacked.

        Args:
            arrays: the elements.
            counts: how many each `take` will ask for; none: the first takes them all.
        """
        self._arrays = arrays
        self._waiting = deque(itertools.pairwise(itertools.accumulate(counts, initial=0)))
        self._travelling.clear()

    def take(
        self, count: int, sharding: Any, *, then: int | None = None, room: int | None = None
    ) -> Staged:
        """Those elements. The caller's memory may be used: the call waits for the end.

        For one device they stay on the host here, and travel with the call of the program: moving
        them first costs as much again as the rest of a short call. In portions they are moved,
        which goes on while others are computed.
        """
        if self._waiting or self._travelling:
            return self._portion(sharding)
        host, self._arrays = self._arrays, []
        replicas = self.replicas or 1
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return Staged(host, tuple(host), count, replicas)
        shaped = [array.reshape(count, replicas, *array.shape[1:]) for array in host]
        return Staged(host, tuple(jax.device_put(shaped, sharding)), count, replicas)

    def _portion(self, device: Any) -> Staged:
        sent = []
        while self._waiting and len(self._travelling) + len(sent) < AHEAD:
            start, stop = self._waiting.popleft()
            sent.append([array[start:stop] for array in self._arrays])
        # All at once: each call costs as much as a small copy.
        large = [leaf for host in sent for leaf in host if leaf.nbytes >= SMALL_BYTES]
        moved = iter(jax.device_put(large, device) if large else ())
        for host in sent:
            leaves = tuple(leaf if leaf.nbytes < SMALL_BYTES else next(moved) for leaf in host)
            self._travelling.append(Staged(host, leaves, len(host[0]), 1))
        if not self._waiting:
            self._arrays = []
        return self._travelling.popleft()

    def started(self, ticket: Any) -> None:
        """Nothing to do: what was handed over is used once."""

    def put_back(self, staged: Staged, used: int) -> None:
        """What was not used is let go of; the caller still has it."""

    def elements_of(self, block: Any) -> Any:
        """The elements that rows of a block stand for: themselves."""
        return block

    def rest(self) -> None:
        """Nothing runs."""

    def __repr__(self) -> str:
        return f"CallFeed({', '.join(self._form.paths)})"
