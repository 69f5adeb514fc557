"""Blocks that a thread reads ahead for an infeed: staged, used, put back, or abandoned.

Only the thread ever waits inside a dataset. It runs one call at a time, in order, so a reader is never
used by two threads; whatever changes the reader's position settles first, which returns blocks that
were read ahead.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from tailrace.base.spans.span import counter, is_traced, span
from tailrace.errors import WaitStopped
from tailrace.feeds.background import STOP_S, P, T, Worker
from tailrace.feeds.feed import Staged
from tailrace.feeds.reader import Reader
from tailrace.feeds.waiting import Patience

LEAVE_S = 0.5
"""How long `leave` waits for an element, in seconds, before it abandons the read."""

Opening = Callable[[], Reader]
"""Returns the reader of a dataset, and opens it if necessary."""


@dataclasses.dataclass(frozen=True)
class Order:
    """The description of a block; a block that was read ahead is used only if it matches.

    Attributes:
        count: elements per replica.
        replicas: the replicas that this process feeds.
        sharding: the sharding of the elements, or a device.
        room: the number of rows of the arrays on the device.
    """

    count: int
    replicas: int
    sharding: Any
    room: int


class Staging:
    """The blocks of one infeed between its dataset and its programs.

    It does not hold the reader, which comes with each call as a function that opens it if necessary: a
    queue that is dropped must free its blocks at once, not when a cycle of references is collected.

    Args:
        prefetch: the number of blocks staged ahead of the running execution.
        patience: the limits of waits for data.

    Attributes:
        patience: the limits of waits for data; the owner of the queue may replace it.
        staged: the blocks that were read ahead, in order, each with its description.
        running: the tickets of executions that may still read a block.
    """

    def __init__(self, prefetch: int, patience: Patience) -> None:
        self.patience = patience
        self._prefetch = prefetch
        self.staged: deque[tuple[Order, Future[Staged]]] = deque()
        self._late: tuple[Reader, Future[Any]] | None = None  # a read that the caller gave up on
        self.running: deque[Any] = deque()
        self._handed = 0  # blocks taken whose execution has not been reported yet
        # Held while a staged block becomes a taken one, and that a running one: the thread, which
        # counts them, must not find it in both places, or in none.
        self._counting = threading.Lock()
        self._thread: Worker | None = None

    def take(self, reader: Opening, order: Order) -> Staged:
        """The next block; waits for it."""
        # Read ahead for another program or another length: put back and read again, in the new form.
        if not self.staged or self.staged[0][0] != order:
            self.settle(reader)
            self._stage(reader, order)
        future = self.staged[0][1]
        if is_traced():
            counter("infeed depth", self._depth())
        with span("dataset wait", elements=order.count):
            # Popped only afterwards: an interrupt here loses nothing.
            self._wait_for(reader, future)
        with self._counting:
            self.staged.popleft()
            staged = future.result()
            # Until `started` the block is alive without an execution that could be waited for.
            self._handed = 1
        return staged

    def prefetch(self, reader: Opening, order: Order) -> None:
        """Stage blocks like this until `prefetch` of them are ahead."""
        for _ in range(self._prefetch - len(self.staged)):
            self._stage(reader, order)

    def started(self, ticket: jax.Array | None) -> None:
        """Called after the dispatch of the taken block; `ticket` is ready when it has finished."""
        with self._counting:
            self.running.append(ticket)
            self._handed = 0

    def settle(self, reader: Opening) -> None:
        """Return all staged blocks to the reader, so that its position is that of the programs."""
        if self._late is not None:
            late, future = self._late
            self._wait_for(reader, future)
            self._late = None
            # The queue may read another dataset by now: elements of the old one must not go into it.
            if late is reader():
                _take_back(late, future)
        # Blocks that are still being read are waited for, others cancelled: an element that was read is
        # in a block, and only the block can give it back.
        while self.staged:
            future = self.staged[-1][1]  # last one first: each block is put back before the others
            if not future.cancel():
                self._wait_for(reader, future)
                _take_back(reader(), future)
            self.staged.pop()

    def returned(self) -> None:
        """Called when the taken block comes back without an execution."""
        self._handed = 0

    def leave(self, reader: Reader) -> None:
        """Like `settle`, but a read that blocks is abandoned, to be picked up later."""
        if self._late is not None:
            return
        # A wait for the device always ends; only a dataset may block forever.
        blocks = Patience(stopped=lambda: reader.waited_s() > LEAVE_S)
        patience, self.patience = self.patience, blocks
        try:
            self.settle(lambda: reader)
        except WaitStopped:
            # The thread runs one call at a time: this block is being read, later ones were cancelled.
            self._late = (reader, self.staged.popleft()[1])
        finally:
            self.patience = patience

    def forget_late(self) -> None:
        """Give up on a read that blocks in a dataset that is no longer used."""
        if self._late is not None and self._thread is not None:
            # It is stuck in that dataset: a new thread takes over.
            self._thread.stop(0.0)
            self._thread = None
        self._late = None

    def release(self) -> tuple[Worker | None, bool]:
        """Release arrays; returns the thread to stop, and whether it is blocked in the dataset."""
        thread, self._thread = self._thread, None
        # Tickets of executions keep arrays alive; a queue at rest should hold nothing on the device.
        self.running.clear()
        return thread, self._late is not None

    def call(self, reader: Opening, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that may block in the dataset, on the thread."""
        own = self._thread is None
        worker = self.worker()
        future = worker.submit(read, *args, **kwargs)
        try:
            self._wait_for(reader, future)
        except BaseException:
            if not future.cancel():
                self._late = (reader(), future)
            raise
        finally:
            if own:  # started for this call only: a caller that never takes a block keeps no thread
                self._thread = None
                worker.stop(0.0 if self._late else STOP_S)
        return future.result()

    # -- inside ---------------------------------------------------------------------------------

    def _stage(self, reader: Opening, order: Order) -> None:
        future = self.worker().submit(self._stage_now, reader(), order)
        self.staged.append((order, future))

    def _stage_now(self, reader: Reader, order: Order) -> Staged:
        """In the thread: wait for a free block, read elements into it, transfer it."""
        # Memory is bounded here, not by the length of the queue: a block is free only when its
        # execution has ended, which a dispatch does not wait for.
        self._wait_for_room()
        count, replicas, sharding = order.count, order.replicas, order.sharding
        # In the thread, before the read: another block may be read ahead while this one is in use.
        first = reader.number
        with span("dataset read", elements=count * replicas):
            host = reader.read(count * replicas)
        try:
            if isinstance(sharding, jax.sharding.NamedSharding):
                shaped = [leaf.reshape(count, replicas, *leaf.shape[1:]) for leaf in host]
            else:
                shaped = host
            with span("infeed copy", bytes=sum(leaf.nbytes for leaf in shaped)):
                device = reader.to_device(shaped, sharding, order.room)
        except BaseException:
            reader.put_back(host)
            raise
        return Staged(host, device, count, replicas, first)

    def _wait_for_room(self) -> None:
        """Wait for executions until one more block may be in memory."""
        while True:
            with self._counting:
                if not self.running or self._blocks_alive() <= self._prefetch:
                    return
                oldest = self.running.popleft()
            with span("room wait"):
                _wait(oldest)

    def _blocks_alive(self) -> int:
        """The number of blocks in memory: in flight, taken, and staged."""
        return len(self.running) + self._handed + self._depth()

    def _depth(self) -> int:
        """The number of staged blocks that are ready."""
        return sum(future.done() for _, future in list(self.staged))

    def _wait_for(self, reader: Opening, future: Future[Any]) -> None:
        self.patience.wait_for(future, reader())

    def worker(self) -> Worker:
        """The thread that reads; started when it is first needed."""
        if self._thread is None:
            self._thread = Worker("tailrace-infeed")
        return self._thread


def _take_back(reader: Reader, future: Future[Any]) -> None:
    """Return the elements of an unused block to the reader, if the call read one."""
    if future.exception() is None and isinstance(future.result(), Staged):
        reader.put_back(future.result().host)


def _wait(ticket: jax.Array | None) -> None:
    try:
        jax.block_until_ready(ticket)
    except Exception:
        # The execution failed; its caller gets the exception. Only its memory matters here.
        return
