"""From Keras' batches to blocks on the device.

Keras' data adapters yield one batch at a time. An execution takes many: they are stacked, leaf by
leaf, into one block and transferred together; for long executions by a thread, while the previous
execution runs. Batches of another shape (often the last one) form a separate block.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import jax
import numpy as np

from tailrace.base.spans.span import span
from tailrace.base.trees import Tree
from tailrace.data.dtypes import check_numeric, narrowed, store_narrowed
from tailrace.errors import DataError, DataExhausted
from tailrace.feeds import dispatch_table
from tailrace.feeds.background import STOP_S, Worker
from tailrace.feeds.buffers import allocate
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.feed import HandedFeed, Staged
from tailrace.feeds.skipping import skip
from tailrace.feeds.transfer import put, with_room
from tailrace.feeds.waiting import Patience
from tailrace.keras.data.copied_batches import reads_ahead

Read = TypeVar("Read")


@dataclasses.dataclass(eq=False)
class Block:
    """Stacked batches of one shape, on the host and on the device."""

    form: Form
    count: int
    staged: Staged
    sharding: Any = None

    def on(self, sharding: jax.sharding.Sharding, replicas: int) -> Staged:
        """The block on `sharding`; transferred now if it was read before that was known."""
        if self.sharding != sharding:
            room = self.staged.room * replicas
            self.staged = moved(self.staged.host, self.count, replicas, sharding, room)
            self.sharding = sharding
        return self.staged


@dataclasses.dataclass(eq=False)
class Form:
    """The structure and shapes of batches, and their feed."""

    spec: ElementSpec
    order: tuple[int, ...]
    feed: HandedFeed

    def __post_init__(self) -> None:
        dtypes = [leaf.dtype for leaf in self.spec.leaves]
        # Once: `alone` is called for every batch of a small model.
        self.parts = list(zip(self.order, dtypes, self.spec.paths, strict=True))

    def alone(self, leaves: Sequence[Any]) -> tuple[np.ndarray, ...]:
        """The leaves of one batch as the elements of one iteration, not copied."""
        return tuple([narrowed(leaves[n], dtype, path)[None] for n, dtype, path in self.parts])


class Batches:
    """The batches of one Keras iterator, in blocks.

    Args:
        iterator: yields batches, as Keras' trainer passes them to its functions.
        shape: converts a batch to the element that programs see.
        forms: the forms seen so far, by structure, shapes and dtypes; kept by the caller.
        patience: the limits of waits for a batch. If there are any, a thread reads every batch.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        shape: Callable[[Any], Any],
        forms: dict[Any, Form],
        patience: Patience | None = None,
    ) -> None:
        self.iterator = iterator
        self._patience = patience or Patience()
        self._read, self._since = 0, 0.0
        self._next_batch = on_host(iterator)
        self._shape, self._forms = shape, forms
        self._ended = False
        # A batch that was read and is still to come: its size was asked for, or its form is
        # another.
        self._held: tuple[Any, list[Any], Any] | None = None
        self._worker: Worker | None = None
        self._ahead: Future[Block | None] | None = None
        # What is left of a block that was prefetched for a longer execution.
        self._rest: tuple[Form, list[np.ndarray]] | None = None
        self._bytes: int | None = None
        self._left = False  # a wait that was given up: what it was for may never come
        self.failure: Exception | None = None
        """The error of a read, while earlier batches are still to be delivered."""

    def bytes_per_batch(self) -> int:
        """The size of a batch, from the first one (which is not lost); 0 if there is none."""
        if self._bytes is None:
            # A read in this thread could not be interrupted: the dataset's `next` may block forever.
            first = self._waited(self._next) if self._patience.limited else self._next()
            self._held = first
            self._bytes = 0 if first is None else sum(leaf.nbytes for leaf in first[1])
        return self._bytes

    def take(
        self, count: int, replicas: int, sharding: jax.sharding.Sharding, ahead: int, room: int = 0
    ) -> Block | None:
        """Up to `count` batches of one shape; None at the end.

        Args:
            count: the most batches, over all replicas.
            replicas: the number of replicas that share the block.
            sharding: the sharding of the block.
            ahead: the number of batches to prefetch for the next call.
            room: the number of batches that the block has room for on the device, if more.
        """
        # A read that blocks cannot be interrupted: where waits can be stopped, a thread reads, and
        # this one waits.
        if self._ahead is None and self._patience.limited:
            self._ahead = self._submit(self._stage, count, replicas, sharding, room)
        with span("dataset wait", batches=count):
            if self._ahead is None:
                block = self._stage(count, replicas, sharding, room)
            else:
                self._wait_for(self._ahead)
                waiting, self._ahead = self._ahead, None
                block = waiting.result()
        if block is not None and block.count > count:  # read for an execution of another length
            # Nothing is lost: the rest is the beginning of the next block.
            self._rest = (block.form, [leaf[count:] for leaf in block.staged.host])
            part = [leaf[:count] for leaf in block.staged.host]
            block = self._moved(block.form, count, part, replicas, sharding, room)
        if ahead and block is not None and count >= dispatch_table.THREAD_FROM:
            self._ahead = self._submit(self._stage, ahead, replicas, sharding, room)
        return block

    def read_next(self) -> None:
        """Read the next batch now, for the next call."""
        if self._held is None and self._ahead is None and self._rest is None:
            self._held = self._next()

    def next_of(self, form: Form) -> tuple[np.ndarray, ...] | None:
        """The next batch as the elements of one iteration, if it has this form.

        None at the end of the data, for a batch of another form (which `take` then delivers), and while
        a thread reads: the long path, `take`, handles all of them.
        """
        if self._ahead is not None or self._rest is not None:
            return None
        following = self._next()
        if following is None or self._forms.get(following[0]) is not form:
            self._held = following
            return None
        return form.alone(following[1])

    def awaited(self) -> str:
        """What is awaited, for messages."""
        return f"batch {self._read} of the data ({type(self.iterator).__name__})"

    def waited_s(self) -> float:
        """For how long a batch has been awaited, in seconds; 0 if none is."""
        since = self._since
        return time.monotonic() - since if since else 0.0

    @property
    def reads_here(self) -> bool:
        """Whether the caller's thread reads; a wait for another thread has notes of its own."""
        return self._ahead is None and not self._patience.limited

    def _submit(self, read: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._worker is None:
            self._worker = Worker("tailrace-infeed-keras")
        return self._worker.submit(read, *args)

    def _waited(self, read: Callable[[], Read]) -> Read:
        """The result of a call that the thread makes, awaited with patience."""
        future = self._submit(read)
        self._wait_for(future)
        return future.result()

    def _wait_for(self, future: Future[Any]) -> None:
        self._left = True
        self._patience.wait_for(future, self)
        self._left = False

    def skip(self, count: int) -> None:
        """Read batches that were used before, and drop them."""
        done = itertools.count()

        def take(_: int) -> None:
            if self._waited(self._next) is None:
                raise too_short(next(done), count)
            next(done)

        skip(count, take, "batches")

    def close(self) -> None:
        """Stop the thread; prefetched batches are dropped."""
        waiting, self._ahead = self._ahead, None
        patience_s = 0.0 if self._left else STOP_S
        # A read that has not begun is cancelled. One that runs gets a moment: it may block for
        # ever.
        late = waiting is not None and not waiting.cancel() and not wait([waiting], patience_s).done
        if self._worker is not None:
            self._worker.stop(0.0 if late else patience_s)  # a blocked read is abandoned
            self._worker = None

    # -- inside ---------------------------------------------------------------------------------

    def _stage(
        self, count: int, replicas: int, sharding: jax.sharding.Sharding, room: int
    ) -> Block | None:
        if self._rest is not None:
            (form, rows), self._rest = self._rest, None
            if len(rows[0]) > count:
                self._rest = (form, [leaf[count:] for leaf in rows])
                rows = [leaf[:count] for leaf in rows]
            return self._moved(form, len(rows[0]), rows, replicas, sharding, room)
        first = self._next()
        if first is None:
            return None
        key, leaves, batch = first
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = form_of(batch, self._shape, self._forms.values())
        # Over replicas, even one batch has a place in a block.
        spread = isinstance(sharding, jax.sharding.NamedSharding)
        if max(count, room) == 1 and not spread:  # transferred with the call, as in Keras
            alone = form.alone(leaves)
            return Block(form, 1, Staged(list(alone), alone, 1, replicas), sharding)
        # Written batch by batch into its final place; stacking a list of batches would copy twice.
        block = [allocate((count, *leaf.shape), leaf.dtype) for leaf in form.spec.leaves]
        found = 0
        with span("dataset read", batches=count):
            for found, batch_leaves in enumerate(self._alike(key, leaves, count), start=1):
                for target, (n, dtype, path) in zip(block, form.parts, strict=True):
                    if batch_leaves[n].dtype == dtype:
                        target[found - 1] = batch_leaves[n]
                    else:
                        store_narrowed(target, found - 1, batch_leaves[n], path)
        if found < count:
            block = [leaf[:found] for leaf in block]
        return self._moved(form, found, block, replicas, sharding, room)

    def _moved(
        self,
        form: Form,
        count: int,
        block: list[np.ndarray],
        replicas: int,
        sharding: jax.sharding.Sharding,
        room: int,
    ) -> Block:
        """A block with its copy on the device."""
        with span("infeed copy", bytes=sum(leaf.nbytes for leaf in block)):
            return Block(form, count, moved(block, count, replicas, sharding, room), sharding)

    def _alike(self, key: object, leaves: list[Any], count: int) -> Iterator[list[Any]]:
        """The leaves of a batch, and of following ones of the same shape: up to `count` in all."""
        yield leaves
        for _ in range(count - 1):
            try:
                following = self._next()
            except Exception as error:  # raised after the earlier batches were delivered
                self.failure = error
                return
            if following is None:
                return
            if following[0] != key:
                self._held = following
                return
            yield following[1]

    def _next(self) -> tuple[Any, list[Any], Any] | None:
        if self.failure is not None:
            raise self.failure
        if self._held is not None:
            held, self._held = self._held, None
            return held
        if self._ended:
            return None
        # For messages about a wait, which another thread may write.
        self._since = time.monotonic()
        try:
            batch = self._next_batch()
        except StopIteration:
            self._ended = True
            return None
        finally:
            self._since = 0.0
        self._read += 1
        if type(batch) is tuple and all(type(leaf) is np.ndarray for leaf in batch):
            leaves, structure = list(batch), len(batch)  # the common case: cheaper than flattening
        else:
            leaves, structure = jax.tree.flatten(batch)
            leaves = [leaf if type(leaf) is np.ndarray else np.asarray(leaf) for leaf in leaves]
        # Forms are looked up by this, for every batch: describing each would take longer than
        # reading it.
        key = (structure, *[(leaf.shape, leaf.dtype) for leaf in leaves])
        return key, leaves, batch


def moved(
    block: list[np.ndarray],
    count: int,
    replicas: int,
    sharding: jax.sharding.Sharding,
    room: int = 0,
) -> Staged:
    """A block, on the device too; there with room for `room` batches, so that a short block at the
    end of the data runs in the program of the long ones."""
    passes, rows = count // replicas, max(count, room) // replicas
    if isinstance(sharding, jax.sharding.NamedSharding):
        whole = [leaf[: passes * replicas] for leaf in block]
        shaped = [leaf.reshape(passes, replicas, *leaf.shape[1:]) for leaf in whole]
        # [passes, replicas, ...]: pass t takes batches t*replicas to (t+1)*replicas, one for each
        # replica.
        device = tuple(jax.device_put(with_room(leaf, rows), sharding) for leaf in shaped)
    else:
        device = tuple(put(leaf, sharding, rows) for leaf in block)
    return Staged(block, device, passes, replicas)


def too_short(found: int, count: int) -> DataExhausted:
    """The error for data that ends before the position where a fit resumes."""
    return DataExhausted(
        f"The fit goes on after {count} batches of its data, which ends after {found}. Give it the "
        f"data of the first run."
    )


def form_of(batch: Tree, shape: Callable[[Any], Any], others: Iterable[Form]) -> Form:
    """The form of a batch; it shares its feed with another form that is equal to programs."""
    leaves, structure = jax.tree.flatten(batch)
    # Here, and not in the program: the message has the path of the leaf.
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        check_numeric(jax.tree_util.keystr(path), np.asarray(leaf))
    spec = ElementSpec.of(shape(batch))
    # A batch of numbers in place of arrays: where each number ends up is the order of the leaves.
    order = jax.tree.leaves(shape(jax.tree.unflatten(structure, range(len(leaves)))))
    if len(order) != len(spec.leaves):
        raise DataError(
            f"A batch is (inputs,), (inputs, targets) or (inputs, targets, sample_weights). "
            f"Received: {structure}."
        )
    # (x, y) and (x, y, None) are the same to a program, and share a feed.
    feed = next((other.feed for other in others if other.spec == spec), None)
    return Form(spec, tuple(order), feed or HandedFeed(spec))


def on_host(iterator: Iterator[Any]) -> Callable[[], Any]:
    """A function that takes the next batch of a Keras iterator, in host memory.

    On an accelerator Keras transfers each batch with `jax.device_put(batch)`. Blocks are stacked on the
    host, so the default device is the host while a batch is taken.
    """
    if not reads_ahead():
        return lambda: next(iterator)
    try:
        host = jax.devices("cpu")[0]
    except RuntimeError:  # JAX runs without its CPU backend: batches are copied back
        return lambda: next(iterator)

    def following() -> Any:
        with jax.default_device(host):
            return next(iterator)

    return following
