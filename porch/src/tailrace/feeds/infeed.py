"""The infeed: elements of a dataset, staged on the device one execution ahead.

    dataset ── Reader ──▶ block on the host ──▶ block on the device ──▶ program
               └────────── thread "tailrace-infeed" ──────────┘

While one execution runs, the thread reads and moves the elements of the next. At most
1 + `prefetch` blocks exist at a time, however long the dataset: before it stages another, the thread
waits until an execution that holds one is over. What was staged and not used goes back to the reader,
so nothing is lost and nothing is read twice, whatever is executed next.

A dataset may block. Only the thread ever waits inside it; everyone else waits for the thread, with
`patience`: it notes what is late, and can have a limit. A reading that was given up goes on in the
thread, and what it reads is taken up by the next use of the queue.
"""

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
from tailrace.feeds.device_dataset import ResidentReader, resident_pays
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.feed import Block, Feed, Staged
from tailrace.feeds.reader import Reader
from tailrace.feeds.waiting import Patience
from tailrace.spans.span import counter, is_traced, span

LEAVE_S = 0.5
"""How long a queue that is put to rest waits for an element, before it leaves it behind."""


class InfeedQueue(Feed):
    """A queue that feeds the elements of a dataset to programs.

    Args:
        dataset: any iterable of array trees, `tr.batches(...)`, a `tf.data.Dataset`, a `grain`
            dataset or a PyTorch `DataLoader`.
        prefetch: how many executions are staged ahead of the one that runs; 0 reads only when asked.
        resident: whether arrays given by `tr.batches` are kept on the device whole, so that only
            indices travel. None decides: on an accelerator, if they are small.
        timeout_s: the longest wait for one element, which `tr.errors.DataTimeout` then names. None: no
            limit. A wait of more than 30 s is noted either way.

    Attributes:
        patience: how waits for data end; what drives the queue may give it another one.

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
        if resident and not isinstance(dataset, Batches):
            raise OptionError(
                f"resident=True needs arrays that can be indexed: a dataset made by tr.batches. "
                f"Received: {type(dataset).__name__}. Leave resident out, or use tr.batches."
            )
        if resident and jax.process_count() > 1:
            raise OptionError(
                "resident=True keeps one dataset on all devices, but each process has a dataset of "
                "its own. Leave resident out."
            )
        self.dataset = dataset
        self.prefetch = prefetch
        self.patience = Patience(timeout_s)
        self.replicas: int | None = None
        self._resident = resident
        self._reader: Reader | ResidentReader | None = None
        self._epoch: int | None = None
        self._staged: deque[tuple[tuple[int, Any, int | None], Future[Staged]]] = deque()
        self._late: tuple[Any, Future[Any]] | None = None  # a reading that was given up
        self._running: deque[Any] = deque()
        self._handed = 0  # blocks taken, of which nobody has said yet that they run
        self._taken = 0
        self._thread: Worker | None = None
        self._lock = threading.RLock()
        self._closed = False

    # -- what programs use ----------------------------------------------------------------------

    def spec(self) -> ElementSpec:
        """The form of an element, learnt from the first one."""
        with self._lock:
            reader = self._open()
            if not reader.has_spec:  # or what is staged would be waited for, and moved again
                self._settle()
                self._in_thread(reader.fetch_first)
            return reader.spec()

    def take(
        self, count: int, sharding: Any, *, then: int | None = None, room: int | None = None
    ) -> Staged:
        """The next `count` elements for each replica, on the device.

        Args:
            count: elements per replica.
            sharding: a `jax.sharding.NamedSharding` that spreads dim 1 over replicas, or a device.
            then: what will be taken next (0: nothing), so that it can be staged meanwhile. None
                guesses the same again.
            room: for how many the arrays on the device have room, if for more; what is in the
                other rows is not said.
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
                self._wait_for(future)  # an interrupt here leaves the block where it is
            self._staged.popleft()
            staged = future.result()
            self._handed = 1
            self.reading = (self._epoch or 0, staged.first, count * staged.replicas)
            self._taken += count * staged.replicas
            # Now, not once the block runs: on a GPU a dispatch returns when most of it is over.
            following = count if then is None else then
            if following:
                for _ in range(self.prefetch - len(self._staged)):
                    self._stage(following, sharding, room)
            return staged

    def started(self, ticket: Any) -> None:
        """Say that the block was handed over, and which array will be ready when it is used up."""
        with self._lock:
            if self._closed:
                return
            self._running.append(ticket)
            self._handed = 0

    def put_back(self, staged: Staged, used: int) -> None:
        """Return what a program did not read; `used` counts elements over all replicas."""
        with self._lock:
            self._settle()
            self._handed = 0
            unused = staged.unused(used)
            self._open().put_back(unused)
            self._taken -= len(unused[0])

    def elements_of(self, block: Block) -> Block:
        """The elements that rows of a staged block on the host stand for, on the host."""
        with self._lock:
            return self._open().elements_of(block)

    def remaining(self, at_most: int) -> int:
        """How many of the next `at_most` elements there are (they are read, and kept)."""
        with self._lock:
            self._settle()
            return self._in_thread(self._open().available, at_most)

    def need(self, count: int) -> None:
        """Raise what reading the next `count` elements raises, if anything; they are kept."""
        with self._lock:
            self._settle()
            self._in_thread(self._open().available, count, True)

    @property
    def restartable(self) -> bool:
        """Whether the dataset can be read again from its start."""
        return as_dataset(self.dataset).restartable

    def get_state(self) -> dict[str, Any]:
        """Where programs are in the dataset, as JSON can hold it; what was read ahead is unread."""
        with self._lock:
            return {"elements": self._taken, **self._open().state_at(self._taken)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to where `get_state` was called, in an equal dataset read from its start."""
        with self._lock:
            self._settle()
            self._open().go_to(state)
            self._taken = int(state["elements"])

    @property
    def position(self) -> int:
        """How many elements have been handed to programs so far."""
        return self._taken

    # -- life -----------------------------------------------------------------------------------

    def restart(self, dataset: Any = None, epoch: int | None = None) -> None:
        """Begin again: with the same dataset or another; `epoch` orders shuffled `tr.batches`."""
        with self._lock:
            if dataset is None or dataset is self.dataset:
                self._settle()
            else:  # another one: whatever the old one blocks on is no concern any more
                self._leave()
                if self._late is not None and self._thread is not None:
                    self._thread.stop(0.0)  # it waits inside the old one: a new thread reads
                    self._thread = None
                self._late = None
            self.dataset = self.dataset if dataset is None else dataset
            self._reader, self._epoch, self._taken = None, epoch, 0

    def start_epoch(self, dataset: Any, epoch: int) -> None:
        """Read a dataset from the start of an epoch; a one-shot iterator goes on where it is."""
        if self.restartable:
            self.restart(dataset, epoch)

    def adopt(self, other: InfeedQueue) -> None:
        """Go on with the dataset of another queue, from where that one stands."""
        with self._lock:
            self._settle()
            other._settle()
            self.dataset, self._reader, self._epoch = other.dataset, other._reader, other._epoch
            self._taken = other._taken

    def pad(self, found: int, count: int) -> None:
        """Repeat the last of the next `found` elements until there are `count` of them."""
        with self._lock:
            self._settle()
            reader = self._open()
            self._in_thread(reader.available, found, True)
            block = reader.read(found)  # they wait in the reader: nothing blocks here
            if found:
                fill = [leaf[-1:].repeat(count - found, axis=0) for leaf in block]
            else:  # another process has elements left, and this one computes along
                fill = [np.zeros((count, *leaf.shape[1:]), leaf.dtype) for leaf in block]
            reader.put_back(fill)
            reader.put_back(block)

    def rest(self) -> None:
        """End the thread and let go of what is staged; the queue can be used again."""
        with self._lock:
            self._leave()
            thread, self._thread = self._thread, None
            self._running.clear()
            blocked = self._late is not None
        if thread is not None:
            thread.stop(0.0) if blocked else thread.stop()
        buffers.trim()

    def close(self) -> None:
        """End the thread for good. A closed queue cannot be used again."""
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

    def _open(self) -> Reader | ResidentReader:
        self._check_open()
        if self._reader is None:
            resident = self._resident
            if resident is None:
                resident = isinstance(self.dataset, Batches) and resident_pays(self.dataset)
            make = ResidentReader if resident else Reader
            self._reader = make(self.dataset, self._epoch)
        return self._reader

    def _check_open(self) -> None:
        if self._closed:
            raise FeedError("This InfeedQueue is closed and feeds no program. Make a new one.")

    def _stage(self, count: int, sharding: Any, room: int | None) -> None:
        reader = self._open()
        future = self._worker().submit(self._stage_now, reader, count, sharding, room)
        self._staged.append(((count, sharding, room), future))

    def _stage_now(
        self, reader: Reader | ResidentReader, count: int, sharding: Any, room: int | None
    ) -> Staged:
        """In the thread: wait for room, read a block, move it."""
        while self._running and self._blocks_alive() > self.prefetch:
            with span("room wait"):
                _wait(self._running.popleft())
        replicas = self.replicas or 1
        if isinstance(sharding, jax.sharding.NamedSharding):
            mesh: Any = sharding.mesh
            replicas = local_replicas(mesh)  # each process feeds its own
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
        """How many blocks take memory: in executions, handed over, and staged."""
        return len(self._running) + self._handed + self._depth()

    def _depth(self) -> int:
        """How many blocks are staged, ready to be taken."""
        return sum(future.done() for _, future in list(self._staged))

    def _settle(self) -> None:
        """Bring the reader to where programs are: everything staged and not taken goes back."""
        if self._late is not None:
            reader, future = self._late
            self._wait_for(future)
            self._late = None
            if reader is self._reader:
                self._take_back(future)
        while self._staged:
            future = self._staged[-1][1]  # the last one first: blocks go back in front of others
            if not future.cancel():
                self._wait_for(future)
                self._take_back(future)
            self._staged.pop()

    def _leave(self) -> None:
        """Like `_settle`, but a reading that blocks is left behind, to be taken up later."""
        if self._late is not None:
            return
        reader = self._reader
        if reader is None:
            return
        # What waits for the device comes to an end; only a dataset may block for ever.
        blocks = Patience(stopped=lambda: reader.waited_s() > LEAVE_S)
        patience, self.patience = self.patience, blocks
        try:
            self._settle()
        except WaitStopped:
            # One thread does one thing at a time: this is the block it reads, others are cancelled.
            self._late = (self._reader, self._staged.popleft()[1])
        finally:
            self.patience = patience

    def _take_back(self, future: Future[Any]) -> None:
        if future.exception() is None and isinstance(future.result(), Staged):
            assert self._reader is not None
            self._reader.put_back(future.result().host)

    def _in_thread(self, read: Callable[..., Any], *args: Any) -> Any:
        """Call something that may wait for the dataset, where only the thread waits in it."""
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
            if own:  # nothing is staged: who never takes a block need not know of the thread
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
        # The execution failed; its caller has the exception. Here only its memory matters.
        return
