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

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tailrace.data.adapters import as_dataset
from tailrace.data.batches import Batches
from tailrace.data.positions.loader_state import State, changed, generators_of, loader_state
from tailrace.devices.devices import local_replicas
from tailrace.errors import DataExhausted, FeedError, OptionError
from tailrace.feeds import buffers
from tailrace.feeds.device_dataset import IndexBlocks, resident_pays
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.feed import Block, Feed, Staged
from tailrace.feeds.reader import Reader
from tailrace.feeds.staging import Order, Staging
from tailrace.feeds.waiting import Patience


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

    Raises:
        OptionError: `prefetch`, `resident` or `timeout_s` has an invalid value.
        DataError: the dataset breaks a rule, raises, ends too early or is too late; when it is read.

    >>> import tailrace as tr
    >>> infeed = tr.InfeedQueue([1.0, 2.0, 3.0])
    >>> infeed.spec().leaves[0].dtype
    dtype('float32')
    """

    instead_of_a_dataset = (
        "A queue feeds the loops of tr.compile; fit, evaluate and predict make one of their own. Give "
        "the dataset itself, which the queue has as .dataset."
    )
    """What `as_dataset` says where a queue is given as a dataset."""

    def __init__(
        self,
        dataset: object,
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
        self.dataset: Any = dataset
        self.prefetch = prefetch
        self.replicas: int | None = None
        self._resident = resident
        self._reader: Reader | None = None
        self._epoch: int | None = None
        self._staging = Staging(prefetch, Patience(timeout_s))
        self._taken = 0
        # How the first pass of a fit began, and the one under way: a resumed fit begins it again.
        self._first_pass: State = {}
        self._this_pass: State = {}
        self._counting: set[str] = set()
        self._noted: Reader | None = None
        self._lock = threading.RLock()
        self._closed = False

    @property
    def patience(self) -> Patience:
        """The limits of waits for data; the owner of the queue may replace them."""
        return self._staging.patience

    @patience.setter
    def patience(self, patience: Patience) -> None:
        self._staging.patience = patience

    # -- used by programs -----------------------------------------------------------------------

    def spec(self) -> ElementSpec:
        """The spec of an element, from the first one."""
        with self._lock:
            reader = self._open()
            if not reader.has_spec:  # settling would wait for staged blocks and transfer them again
                self._settle()
                self._staging.call(self._open, reader.fetch_first)
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
            staged = self._staging.take(self._open, self._order(count, sharding, room))
            self.reading = (self._epoch or 0, staged.first, count * staged.replicas)
            # Only now that the block is there: a take that timed out, or was interrupted, has taken
            # nothing.
            self._taken += count * staged.replicas
            # Prefetch now, not after the dispatch: on a GPU a dispatch may return only when most of the
            # execution is over, and the copy would no longer overlap with it.
            following = count if then is None else then
            if following:
                self._staging.prefetch(self._open, self._order(following, sharding, room))
            return staged

    def _order(self, count: int, sharding: jax.sharding.Sharding, room: int | None) -> Order:
        replicas = self.replicas or 1
        if isinstance(sharding, jax.sharding.NamedSharding):
            mesh: Any = sharding.mesh
            replicas = local_replicas(mesh)  # each process feeds its replicas
        return Order(count, replicas, sharding, count if room is None else room)

    def started(self, ticket: jax.Array | None) -> None:
        """Report that a block's execution was dispatched; `ticket` is ready when it has finished."""
        with self._lock:
            if not self._closed:
                self._staging.started(ticket)

    def put_back(self, staged: Staged, used: int) -> None:
        """Return the elements a program did not read; `used` counts those it read on all replicas."""
        with self._lock:
            self._settle()
            self._staging.returned()
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
            return self._staging.call(self._open, self._open().available, at_most)

    def need(self, count: int) -> None:
        """Raise the error that reading the next `count` elements would raise; they are kept."""
        with self._lock:
            self._settle()
            self._staging.call(self._open, self._open().available, count, True)

    @property
    def restartable(self) -> bool:
        """Whether the dataset can be read again from its start."""
        return as_dataset(self.dataset).restartable

    @property
    def continues(self) -> bool:
        """Whether another pass would continue where this one stopped, with what was read ahead."""
        return as_dataset(self.dataset).continues

    def get_state(self) -> dict[str, Any]:
        """The position of programs in the dataset, as JSON; prefetched elements count as unread."""
        with self._lock:
            # By what programs have taken, not by what the reader has read: a resumed fit reads the
            # difference again.
            reader = self._open()
            return {"elements": self._taken, **reader.state_at(self._taken), **self._pass_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Seek to the position of `get_state`, in an equal dataset read from its start."""
        with self._lock:
            self._settle()
            # In the thread: a dataset that cannot seek is read up to there, and may block meanwhile.
            self._staging.call(self._open, self._open().go_to, state)
            self._taken = int(state["elements"])

    def _pass_state(self) -> dict[str, Any]:
        """Random numbers and counters: of the first pass of this fit, of this one, and as they are."""
        source, reader = as_dataset(self.dataset), self._open()
        if source.fast is not None:
            return {}
        self._note_pass()
        now = loader_state(source.origin)
        # A pass that is not begun yet begins as things are now.
        before = {**self._first_pass, **self._this_pass}
        return {
            "first": generators_of(self._first_pass),
            "began": self._this_pass,
            "now": changed(now, before),
            "ended": reader.ended,
        }

    def _note_pass(self) -> None:
        """Take down how the current pass began; numbers only if they change from pass to pass."""
        reader = self._reader
        if reader is None or not reader.began or reader is self._noted:
            return
        self._noted = reader
        if not self._first_pass:
            self._first_pass = reader.began
        found = changed(reader.began, self._first_pass)
        self._counting |= set(found) - set(generators_of(found))
        self._this_pass = {
            **found,
            **{name: reader.began[name] for name in self._counting if name in reader.began},
        }

    def go_on_from(self, position: Mapping[str, Any]) -> None:
        """Count on from a fit that is resumed: which numbers change from pass to pass is known."""
        self._note_pass()
        first, began = position["first"], position["began"]
        self._counting |= set(began) - set(generators_of(began))
        self._first_pass = {**self._first_pass, **first}
        self._noted = None
        self._note_pass()

    def check_kind(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of another kind of dataset; `set_state` skips as many elements of any."""
        with self._lock:
            self._staging.call(self._open, self._open().check_kind, state)

    @property
    def position(self) -> int:
        """The number of elements given to programs so far."""
        return self._taken

    # -- lifetime -------------------------------------------------------------------------------

    def restart(self, dataset: object = None, epoch: int | None = None) -> None:
        """Restart with the same dataset or another; `epoch` sets the order of shuffled `tr.batches`."""
        with self._lock:
            if dataset is None or dataset is self.dataset:
                self._settle()
            else:  # another dataset: do not wait for whatever the old one blocks on
                self._leave()
                self._staging.forget_late()
            self.dataset = self.dataset if dataset is None else dataset
            self._note_pass()
            self._reader, self._epoch, self._taken = None, epoch, 0

    def pass_by(self, dataset: object, passes: int, epoch: int = 0) -> None:
        """Read `passes` passes over a dataset again, this one first: the next may depend on them."""
        for number in range(passes):
            self.drain()
            self.restart(dataset, epoch + number + 1)

    def drain(self) -> None:
        """Read the pass over the dataset to its end; what is left of it is dropped."""
        with self._lock:
            self._settle()
            self._staging.call(self._open, self._open().read_to_end)

    def begin_passes(self, dataset: object, passes: int) -> None:
        """Begin `passes` passes over a dataset, and drop them, as fits of earlier versions did."""
        for epoch in range(passes):
            self.restart(dataset, epoch)
            with contextlib.suppress(DataExhausted):  # an empty one has been begun too
                self.spec()

    def adopt(self, other: InfeedQueue) -> None:
        """Continue with the dataset of another queue, from its current position."""
        with self._lock:
            # Not settled: what the dataset before blocks on is nobody's any more.
            self._leave()
            self._staging.forget_late()
            other._settle()
            # With the reader: elements that it has buffered belong to the dataset, and would be lost.
            self.dataset, self._reader, self._epoch = other.dataset, other._reader, other._epoch
            self._taken = other._taken
            self._first_pass, self._this_pass = other._first_pass, other._this_pass
            self._counting, self._noted = other._counting, other._noted

    def pad(self, found: int, count: int) -> None:
        """Repeat the last of the next `found` elements until there are `count` of them."""
        with self._lock:
            self._settle()
            reader = self._open()
            self._staging.call(self._open, reader.available, found, True)
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
            # Stopped outside the lock: the dataset that the thread is reading may itself use the queue.
            thread, blocked = self._staging.release()
        if thread is not None:
            thread.stop(0.0) if blocked else thread.stop()
        buffers.trim()

    def leave(self) -> None:
        """Like `rest`, and give up the pass over the dataset, as a `for` loop that ends does."""
        self.rest()
        if self._reader is not None and self._reader.has_spec:
            self._reader.close()

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

    # -- inside ---------------------------------------------------------------------------------

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

    def _settle(self) -> None:
        """Return what was read ahead to the reader: its position is then that of the programs."""
        self._staging.settle(self._open)

    def _leave(self) -> None:
        """Return what was read ahead; a read that blocks is abandoned, to be picked up later."""
        if self._reader is not None:
            self._staging.leave(self._reader)
