"""The elements of one call, as blocks for its dispatches."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax

from tailrace.devices.devices import Device
from tailrace.feeds import dispatch_table
from tailrace.feeds.feed import Staged

SMALL_BYTES = 1 << 16
"""Smaller arrays are passed to the program directly, which is faster than a separate transfer."""


class CallBlocks:
    """The elements of one call, one block per dispatch.

    If a call is dispatched whole on one device, its elements stay on the host and are passed to the
    program: a separate transfer would double the time of a short call. The elements of portions are
    transferred ahead, while earlier portions compute.

    Args:
        arrays: the elements of the call, stacked. The caller's memory may be used: a call waits for
            its end.
        counts: the number of elements of each portion; empty if the first block takes all.
        sharding: their sharding.
        replicas: the number of replicas that share them.
    """

    def __init__(
        self,
        arrays: list[Any],
        counts: Sequence[int],
        sharding: jax.sharding.Sharding | Device,
        replicas: int,
    ) -> None:
        self._arrays, self._sharding, self._replicas = arrays, sharding, replicas
        self._waiting = deque(itertools.pairwise(itertools.accumulate(counts, initial=0)))
        self._travelling: deque[Staged] = deque()

    def take(self, count: int) -> Staged:
        """The block of the next dispatch; `count` elements per replica."""
        if self._waiting or self._travelling:
            return self._portion()
        host = self._arrays
        if not isinstance(self._sharding, jax.sharding.NamedSharding):
            return Staged(host, tuple(host), count, self._replicas)
        shaped = [array.reshape(count, self._replicas, *array.shape[1:]) for array in host]
        device = tuple(jax.device_put(shaped, self._sharding))
        return Staged(host, device, count, self._replicas)

    def _portion(self) -> Staged:
        sent = []
        # No more than these travel at a time: each is a copy of its elements on the device.
        while self._waiting and len(self._travelling) + len(sent) < dispatch_table.PORTIONS_AHEAD:
            start, stop = self._waiting.popleft()
            sent.append([array[start:stop] for array in self._arrays])
        # In one call: each has a fixed cost as large as a small copy.
        large = [leaf for host in sent for leaf in host if leaf.nbytes >= SMALL_BYTES]
        moved = iter(jax.device_put(large, self._sharding) if large else ())
        for host in sent:
            leaves = tuple(leaf if leaf.nbytes < SMALL_BYTES else next(moved) for leaf in host)
            self._travelling.append(Staged(host, leaves, len(host[0]), 1))
        return self._travelling.popleft()
