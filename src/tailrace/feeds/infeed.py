"""The infeed: elements of a dataset, prefetched to the device one execution ahead.

    dataset ── Reader ──▶ block on the host ──▶ block on the device ──▶ program
               └────────── thread "tailrace-infeed" ──────────┘

While one execution runs, the thread reads and transfers the elements of the next. At most 1 +
`prefetch` blocks exist at a time, however long the dataset is: before it stages another block, the
thread waits for an execution that holds one to finish. Staged elements that were not used go back to
the reader, so nothing is lost or read twice, whatever runs next.

A dataset may block. Only the thread ever waits inside it; everyone else waits for the thread with a
`Patience`, which logs long waits and can have a limit. A read that the caller gave up on continues in
the thread, and the next use of the queue picks up its result.
"""

# pyright: reportUnknownMemberType=false, reportUnnecessaryIsInstance=false

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from tailrace.data.adapters import as_dataset
from tailrace.data.batches import Batches
from tailrace.devices.devices import local_replicas
from tailrace.errors import FeedError, OptionError, WaitStopped
from tailrace.feeds import buffers
from tailrace.feeds.background import STOP_S, Worker
from tailrace.feeds.device_dataset import IndexBlocks, resident_pays
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.feed import Block, Feed, Staged
from tailrace.feeds.reader import Reader
from tailrace.feeds.waiting import Patience
from tailrace.spans.span import counter, is_traced, span

LEAVE_S = 0.5
"""How long `rest` waits for an element, in seconds, before it abandons the read."""


class InfeedQueue(Feed):
    """A queue that feeds the elements of a dataset to programs.

    Args:
        dataset: any iterable of array trees, `tr.batches(...)`, a `tf.data.Dataset`, a `grain`
            dataset or a PyTorch `DataLoader`.
        prefetch: the number of executions staged ahead of the running one; 0 reads on demand.
        resident: whether to keep the arrays of `tr.batches` on the device, so that only indices are
            transferred. None: on an accelerator, if they are small.
        timeout_s: the longest wait for one element; `tr.errors.DataTimeout` then names it. None: no
            limit. A wait of more than 30 s is logged in any case.

    Attributes:
        patience: the limits of waits for data; the owner of the queue may replace it.

    Raises:
        OptionError: `prefetch`, `resident` or `timeout_s` has a value it may not have.
        DataError: the dataset breaks a rule, raises, ends too early or is too late; when it is read.

    >>> infeed = InfeedQueue([1.0, 2.0, 3.0])
    >>> infeed.spec().leaves[0].dtype
    dtype('float32')
    """

    def __init__(
        self,
        dataset: Any,
        prefetch: int = 1,
        *,
        resident: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise OptionError(
                f"prefetch counts the executions staged ahead and must be an integer of at least 0. "
                f"Received: prefetch={prefetch!r}. Use 1 unless memory is short."
            )
        if resident is not None and not isinstance(resident, bool):
            raise OptionError(f"resident is True, False or None. Received: resident={resident!r}.")
        if resident and not isinstance(dataset, Batches):
            raise OptionError(
                f"resident=True needs arrays that can be indexed: a dataset made by tr.batches. "
                f"Received: {type(dataset).__name__}. Leave resident out, or use tr.batches."
            )
        if resident and jax.process_count() > 1:
            raise OptionError(
                "resident=True keeps one dataset on all devices, but each process has a different "
                "dataset. Leave resident out."
            )
        self.dataset = dataset
        self.prefetch = prefetch
        self.patience = Patience(timeout_s)
        self.replicas: int | None = None
        self._resident = resident
        self._reader: Reader | None = None
        self._epoch: int | None = None
        self._staged: deque[tuple[tuple[int, Any, int | None], Future[Staged]]] = deque()
        self._late: tuple[Any, Future[Any]] | None = None  # a read that the caller gave up on
        self._running: deque[Any] = deque()
        self._handed = 0  # blocks taken whose execution has not been reported yet
        self._taken = 0
        self._thread: Worker | None = None
        self._lock = threading.RLock()
        self._closed = False

    # -- used by programs -----------------------------------------------------------------------

    def spec(self) -> ElementSpec:
        """The spec of an element, from the first one."""
        with self._lock:
            reader = self._open()
            if not reader.has_spec:  # settling would wait for staged blocks and transfer them again
                self._settle()
                self._in_thread(reader.fetch_first)
            return reader.spec()

    def take(
        self,
        count: int,
        sharding: jax.sharding.Sharding,
        *,
        then: int | None = None,
        room: int | None = None,
    ) -> Staged:
        """The next `count` elements per replica, on the device.

        Args:
            count: elements per replica.
            sharding: a `jax.sharding.NamedSharding` that shards dim 1 over replicas, or a device.
            then: the `count` of the next call (0 for none), to prefetch it. None assumes the same
                again.
            room: the number of rows of the arrays on the device, if more than `count`; the content of
                the other rows is unspecified.
        """
        with self._lock:
            self._check_open()
            key = (count, sharding, room)
            if not self._staged or self._staged[0][0] != key:
                self._settle()
                self._stage(*key)
            future = self._staged[0][1]
            if is_traced():
                counter("infeed depth", self._depth())
            with span("dataset wait", elements=count):
                self._wait_for(future)  # popped only afterwards: an interrupt here loses nothing
            self._staged.popleft()
            staged = future.result()
            # Between this and `started` the block is alive without an execution that could be waited
            # for.
            self._handed = 1
            self.reading = (self._epoch or 0, staged.first, count * staged.replicas)
            self._taken += count * staged.replicas
            # Prefetch now, not after the dispatch: on a GPU a dispatch may return only when most of the
            # execution is over, and the copy would no longer overlap with it.
            following = count if then is None else then
            if following:
                for _ in range(self.prefetch - len(self._staged)):
                    self._stage(following, sharding, room)
            return staged

    def started(self, ticket: Any) -> None:
        """Report that a block's execution was dispatched; `ticket` is ready when it has finished."""
        with self._lock:
            if self._closed:
                return
            self._running.append(ticket)
            self._handed = 0

    def put_back(self, staged: Staged, used: int) -> None:
        """Return the elements a program did not read; `used` counts those it read on all replicas."""
        with self._lock:
            self._settle()
            self._handed = 0
            unused = staged.unused(used)
            self._open().put_back(unused)
            self._taken -= len(unused[0])

    def elements_of(self, block: Block) -> Block:
        """The elements of a staged block, on the host; its rows may be indices."""
        with self._lock:
            return self._open().elements_of(block)

    def remaining(self, at_most: int) -> int:
        """How many of the next `at_most` elements exist (they are read ahead and kept)."""
        with self._lock:
            self._settle()
            return self._in_thread(self._open().available, at_most)

    def need(self, count: int) -> None:
        """Raise the error that reading the next `count` elements would raise; they are kept."""
        with self._lock:
            self._settle()
            self._in_thread(self._open().available, count, True)

    @property
    def restartable(self) -> bool:
        """Whether the dataset can be read again from its start."""
        return as_dataset(self.dataset).restartable

    def get_state(self) -> dict[str, Any]:
        """The position of programs in the dataset, as JSON; prefetched elements count as unread."""
        with self._lock:
            return {"elements": self._taken, **self._open().state_at(self._taken)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Seek to the position of `get_state`, in an equal dataset read from its start."""
        with self._lock:
            self._settle()
            self._open().go_to(state)
            self._taken = int(state["elements"])

    @property
    def position(self) -> int:
        """The number of elements given to programs so far."""
        return self._taken

    # -- lifetime -------------------------------------------------------------------------------

    def restart(self, dataset: Any = None, epoch: int | None = None) -> None:
        """Restart with the same dataset or another; `epoch` sets the order of shuffled `tr.batches`."""
        with self._lock:
            if dataset is None or dataset is self.dataset:
                self._settle()
            else:  # another dataset: do not wait for whatever the old one blocks on
                self._leave()
                if self._late is not None and self._thread is not None:
                    # It is stuck in the old dataset: a new thread takes over.
                    self._thread.stop(0.0)
                    self._thread = None
                self._late = None
            self.dataset = self.dataset if dataset is None else dataset
            self._reader, self._epoch, self._taken = None, epoch, 0

    def start_epoch(self, dataset: Any, epoch: int) -> None:
        """Read a dataset from the start of an epoch; a one-shot iterator continues where it is."""
        if self.restartable:
            self.restart(dataset, epoch)

    def adopt(self, other: InfeedQueue) -> None:
        """Continue with the dataset of another queue, from its current position."""
        with self._lock:
            self._settle()
            other._settle()
            # With the reader: elements that it has buffered belong to the dataset, and would be lost.
            self.dataset, self._reader, self._epoch = other.dataset, other._reader, other._epoch
            self._taken = other._taken

    def pad(self, found: int, count: int) -> None:
        """Repeat the last of the next `found` elements until there are `count` of them."""
        with self._lock:
            self._settle()
            reader = self._open()
            self._in_thread(reader.available, found, True)
            block = reader.read(found)  # already buffered in the reader: this does not block
            if found:
                fill = [leaf[-1:].repeat(count - found, axis=0) for leaf in block]
            else:  # another process has elements left, and this one must take part in its steps
                fill = [np.zeros((count, *leaf.shape[1:]), leaf.dtype) for leaf in block]
            # In this order: what is put back last is read first.
            reader.put_back(fill)
            reader.put_back(block)

    def rest(self) -> None:
        """Stop the thread and release staged blocks; the queue can be used again."""
        with self._lock:
            self._leave()
            thread, self._thread = self._thread, None
            # Tickets of executions keep arrays alive; a queue at rest should hold nothing on the
            # device.
            self._running.clear()
            blocked = self._late is not None
        if thread is not None:
            thread.stop(0.0) if blocked else thread.stop()
        buffers.trim()

    def close(self) -> None:
        """Stop the thread. A closed queue cannot be used again."""
        self.rest()
        self._closed = True
        self._reader = None

    def __enter__(self) -> InfeedQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"InfeedQueue({as_dataset(self.dataset).name}, prefetch={self.prefetch})"

    # -- staging --------------------------------------------------------------------------------

    def _open(self) -> Reader:
        self._check_open()
        if self._reader is None:
            resident = self._resident
            if resident is None:
                resident = isinstance(self.dataset, Batches) and resident_pays(self.dataset)
            blocks = IndexBlocks(self.dataset) if resident else None
            self._reader = Reader(self.dataset, self._epoch, blocks)
        return self._reader

    def _check_open(self) -> None:
        if self._closed:
            raise FeedError("This InfeedQueue is closed and feeds no program. Make a new one.")

    def _stage(self, count: int, sharding: jax.sharding.Sharding, room: int | None) -> None:
        reader = self._open()
        future = self._worker().submit(self._stage_now, reader, count, sharding, room)
        self._staged.append(((count, sharding, room), future))

    def _stage_now(
        self, reader: Reader, count: int, sharding: jax.sharding.Sharding, room: int | None
    ) -> Staged:
        """In the thread: wait for a free block, read elements into it, transfer it."""
        # Memory is bounded here, not by the length of the queue: a block is free only when its
        # execution has ended, which a dispatch does not wait for.
        while self._running and self._blocks_alive() > self.prefetch:
            with span("room wait"):
                _wait(self._running.popleft())
        replicas = self.replicas or 1
        if isinstance(sharding, jax.sharding.NamedSharding):
            mesh: Any = sharding.mesh
            replicas = local_replicas(mesh)  # each process feeds its replicas
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
                device = reader.to_device(shaped, sharding, count if room is None else room)
        except BaseException:
            reader.put_back(host)
            raise
        return Staged(host, device, count, replicas, first)

    def _blocks_alive(self) -> int:
        """The number of blocks in memory: in flight, taken, and staged."""
        return len(self._running) + self._handed + self._depth()

    def _depth(self) -> int:
        """The number of staged blocks that are ready."""
        return sum(future.done() for _, future in list(self._staged))

    def _settle(self) -> None:
        """Return all staged blocks to the reader, so that its position is that of the programs."""
        if self._late is not None:
            reader, future = self._late
            self._wait_for(future)
            self._late = None
            if reader is self._reader:
                self._take_back(future)
        # Blocks that are still being read are waited for, others cancelled: an element that was read is
        # in a block, and only the block can give it back.
        while self._staged:
            future = self._staged[-1][1]  # last one first: each block is put back before the others
            if not future.cancel():
                self._wait_for(future)
                self._take_back(future)
            self._staged.pop()

    def _leave(self) -> None:
        """Like `_settle`, but a read that blocks is abandoned, to be picked up later."""
        if self._late is not None:
            return
        reader = self._reader
        if reader is None:
            return
        # A wait for the device always ends; only a dataset may block forever.
        blocks = Patience(stopped=lambda: reader.waited_s() > LEAVE_S)
        patience, self.patience = self.patience, blocks
        try:
            self._settle()
        except WaitStopped:
            # The thread runs one call at a time: this block is being read, later ones were cancelled.
            self._late = (self._reader, self._staged.popleft()[1])
        finally:
            self.patience = patience

    def _take_back(self, future: Future[Any]) -> None:
        if future.exception() is None and isinstance(future.result(), Staged):
            assert self._reader is not None
            self._reader.put_back(future.result().host)

    def _in_thread(self, read: Callable[..., Any], *args: Any) -> Any:
        """Call a function that may block in the dataset, on the thread."""
        own = self._thread is None
        worker = self._worker()
        future = worker.submit(read, *args)
        try:
            self._wait_for(future)
        except BaseException:
            if not future.cancel():
                self._late = (self._reader, future)
            raise
        finally:
            if own:  # started for this call only: a caller that never takes a block keeps no thread
                self._thread = None
                worker.stop(0.0 if self._late else STOP_S)
        return future.result()

    def _wait_for(self, future: Future[Any]) -> None:
        self.patience.wait_for(future, self._open())

    def _worker(self) -> Worker:
        if self._thread is None:
            self._thread = Worker("tailrace-infeed")
        return self._thread


def _wait(ticket: Any) -> None:
    try:
        jax.block_until_ready(ticket)
    except Exception:
        # The execution failed; its caller gets the exception. Only its memory matters here.
        return
