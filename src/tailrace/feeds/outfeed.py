"""The outfeed: values a program sends out, queued on the host in the order they were sent.

Values leave a program stacked, one block per execution. A block is copied to the host while the next
execution runs, and is split into elements only when it is read.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnnecessaryIsInstance=false

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.checks import member_named, member_of
from tailrace.base.messages import note_once
from tailrace.base.trees import Tree, TreeDef, leaf_called
from tailrace.errors import FeedError, OptionError
from tailrace.feeds.sent_block import SentBlock
from tailrace.feeds.waiting import Runs
from tailrace.jaxprs.array_trees import check_arrays
from tailrace.jaxprs.marks import Tag, WeakQueue, current_trace, mark


class OutfeedMode(enum.StrEnum):
    """Which elements an outfeed keeps: all until they are dequeued, or the last of an execution.

    Strings are accepted wherever one is expected; an unknown one is an `OptionError`.

    >>> import tailrace as tr
    >>> tr.OutfeedQueue(mode=tr.OutfeedMode.LAST).mode
    <OutfeedMode.LAST: 'last'>
    """

    ALL = "all"
    LAST = "last"

    @classmethod
    def _missing_(cls, value: object) -> OutfeedMode:
        return member_named(cls, value, "The mode of an outfeed")


MOST_BYTES = 4 << 30
"""The default limit of the bytes that may wait in a queue."""

FULL = ("raise", "drop_oldest")
"""The policies of a full queue."""


class OutfeedQueue:
    """A queue that receives values from a running program.

    Args:
        mode: "all" keeps every element, "last" only the last one of an execution.
        live: whether elements arrive while the program runs. A loop at the top of the program is
            then run in short dispatches; in inner loops, a callback sends each element.
        most_bytes: the most bytes that may wait to be dequeued; 4 GiB if not given.
        when_full: what happens beyond that: "raise" ends the program with an error and keeps the queue;
            "drop_oldest" drops the oldest executions, with one warning.

    `enqueue` is called in a program, everything else on the host. With one replica and T the shape
    of a leaf, `dequeue()` gives `[k, *T]` in mode "all" and `T` in mode "last"; with R replicas,
    `[k, R, *T]` and `[R, *T]`.

    Attributes:
        dropped: the number of executions dropped because the queue was full.

    Raises:
        OptionError: an argument has an invalid value.

    Example:
        >>> import tailrace as tr
        >>> outfeed = tr.OutfeedQueue()
        >>> def body(x):
        ...     outfeed.enqueue({"x": x})
        ...     return 2 * x
        >>> print(tr.compile(lambda x: tr.repeat(3, body, x))(1.0), outfeed.dequeue()["x"])
        8.0 [1. 2. 4.]
    """

    def __init__(
        self,
        mode: OutfeedMode | str = OutfeedMode.ALL,
        live: bool = False,
        *,
        most_bytes: int = MOST_BYTES,
        when_full: str = "raise",
    ) -> None:
        self.mode = member_of(OutfeedMode, mode)
        if not isinstance(live, bool):
            raise OptionError(f"live is True or False. Received: live={live!r}.")
        self.live = live
        if self.live and self.mode is OutfeedMode.LAST:
            raise OptionError(
                "A live outfeed delivers every element, so it cannot be in mode 'last'. "
                "Received: mode='last', live=True. Choose one of the two."
            )
        if isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or most_bytes < 1:
            raise OptionError(
                f"most_bytes is how many bytes may wait in an outfeed. Received: "
                f"most_bytes={most_bytes!r}."
            )
        if not isinstance(when_full, str) or when_full not in FULL:
            raise OptionError(
                f"when_full is 'raise' or 'drop_oldest'. Received: when_full={when_full!r}."
            )
        self.most_bytes, self.when_full = most_bytes, when_full
        self.dropped = 0
        self._blocks: deque[SentBlock] = deque()
        self._structure: Any = None
        self._shapes: Any = None
        self._runs = Runs()
        self._changed = self._runs.changed

    # -- in a program ---------------------------------------------------------------------------

    def enqueue(self, values: Tree) -> Tree:
        """Send `values` (a tree) out of the program each time this call runs; returns them.

        Raises:
            FeedError: the tree has no arrays, or one that cannot leave a program.
            ProgramError: it is called outside of a program.
        """
        trace = current_trace("OutfeedQueue.enqueue")
        structure = jax.tree.structure(values)
        if not structure.num_leaves:
            raise FeedError(
                f"An element sent out needs at least one array. Received: enqueue({values!r})."
            )
        check_arrays("OutfeedQueue.enqueue sends", values, error=FeedError)
        for path, value in jax.tree_util.tree_flatten_with_path(values)[0]:
            _check_can_leave(_path_called(path), jnp.asarray(value))
        site = trace.new_site("OutfeedQueue.enqueue")
        # The program keeps its queues alive: the mark refers to them weakly.
        trace.feeds.append(self)
        return mark(values, Tag("outfeed", payload=OutfeedTarget(self, structure), site=site))

    # -- on the host ----------------------------------------------------------------------------

    def dequeue(self) -> Tree:
        """Remove all queued elements and return them as one tree of arrays.

        Raises:
            FeedError: no program has sent anything; in mode "last", nothing since the last call.
        """
        with self._changed:
            # Taken under the lock, converted outside of it: copying to the host may wait for an
            # execution, which must be able to deliver meanwhile.
            blocks, structure, shapes = list(self._blocks), self._structure, self._shapes
            self._blocks.clear()
            if self.mode is OutfeedMode.LAST:
                return self._last(blocks)
        if structure is None:
            raise FeedError(
                "There is nothing to dequeue: no program has sent anything to this outfeed. Call "
                "enqueue(...) in a program and run it first."
            )
        parts = [block.to_host() for block in blocks]
        parts = [part for part in parts if len(part[0])]
        if not parts:
            parts = [[np.zeros((0, *shape), dtype) for shape, dtype in shapes]]
        leaves = [
            # One execution, the common case, is returned as it is, without a copy.
            leaf[0] if len(leaf) == 1 else np.concatenate(leaf)
            for leaf in zip(*parts, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    def __iter__(self) -> Iterator[Any]:
        """The queued elements, one by one; ends when the queue is empty."""
        self._check_all("Iterating over an outfeed")
        while (block := self._next_block()) is not None:
            yield from block.elements()

    def stream(self, timeout_s: float = 60.0) -> Iterator[Any]:
        """Elements one by one as they arrive, until the program that sends them has ended.

        Meant for another thread than the one that runs the program. If no program is running and none
        has delivered anything, it waits for one to start, `timeout_s` seconds at most.

        Raises:
            FeedError: no program was started in time; or the queue is in mode "last".
        """
        self._check_all("Streaming an outfeed")
        blocks = self._runs.stream(
            self._next_block, lambda: bool(self._blocks), timeout_s, "this outfeed"
        )
        for block in blocks:
            yield from block.elements()

    def __len__(self) -> int:
        """The number of queued elements."""
        return sum(block.count() for block in list(self._blocks))

    def __bool__(self) -> bool:
        return True  # an empty queue is still a queue

    def __repr__(self) -> str:
        return f"OutfeedQueue(mode={str(self.mode)!r}, live={self.live})"

    # -- used by programs -----------------------------------------------------------------------

    def begin(self) -> None:
        """Report that a program that sends to this queue starts."""
        self._runs.begin()

    def end(self) -> None:
        """Report that the program has ended, successfully or not."""
        self._runs.end()

    def check_fits(self, structure: TreeDef, shapes: Sequence[tuple[tuple[int, ...], Any]]) -> None:
        """Refuse a program, before it runs, whose elements differ from the queued ones."""
        with self._changed:
            if self._structure is not None and self._structure != structure:
                raise FeedError(
                    f"An outfeed keeps elements of one structure, {self._structure}. Received: "
                    f"{structure} from another program. Use one outfeed per kind of element."
                )
            # Elements that wait together are concatenated by `dequeue`; without any, a program may
            # change shapes.
            waits = self.mode is OutfeedMode.ALL and self._blocks
            if waits and list(self._shapes) != list(shapes):
                raise FeedError(self._unlike(structure, list(shapes)))

    def deliver(
        self,
        structure: TreeDef,
        leaves: list[Any],
        valid: jax.Array | None,
        loops: int,
        replicas: int,
    ) -> None:
        """Queue the values of one execution: leaves on the device with `loops` leading loop dims.

        With several replicas, the replica dim comes first; it is moved behind the loop dims here.
        """
        block = SentBlock(structure, leaves, valid, loops, replicas)
        with self._changed:
            # A block whose elements all depend on a branch may turn out to be empty: then an older
            # one is the last. Finding out now would wait for the device.
            if self.mode is OutfeedMode.LAST and block.surely_has_elements():
                self._blocks.clear()
            self._structure, self._shapes = structure, block.element_shapes()
            self._make_room(block.nbytes)
            # The previous block, not this one: its execution has ended or is about to, so this
            # hardly waits, and at most one block stays on the device.
            if self._blocks:
                self._blocks[-1].settle()
            self._blocks.append(block)
            self._changed.notify_all()

    def _make_room(self, size: int) -> None:
        """Keep the queue within `most_bytes`, by the `when_full` policy."""
        waiting = sum(block.nbytes for block in self._blocks)
        if waiting + size <= self.most_bytes or self.mode is OutfeedMode.LAST:
            return
        if self.when_full == "raise":
            raise FeedError(
                f"What a program sends out waits until it is dequeued, and {waiting:,} bytes of "
                f"{len(self._blocks)} executions wait here, of at most {self.most_bytes:,}: {size:,} "
                f"more have no room. Call dequeue() meanwhile (in a callback, or with live=True in "
                f"another thread), use mode='last', or OutfeedQueue(most_bytes=..., "
                f"when_full='drop_oldest'). What waits is kept."
            )
        note_once(
            f"An outfeed is full ({self.most_bytes:,} bytes) and is not dequeued: the oldest "
            f"executions are dropped, as when_full='drop_oldest' says.",
            key=f"full outfeed {id(self)}",
        )
        # A block larger than the limit empties the queue and is then queued anyway: the newest is kept.
        while self._blocks and waiting + size > self.most_bytes:
            waiting -= self._blocks.popleft().nbytes
            self.dropped += 1

    def _next_block(self) -> SentBlock | None:
        with self._changed:
            return self._blocks.popleft() if self._blocks else None

    def _last(self, blocks: list[SentBlock]) -> Tree:
        for block in reversed(blocks):
            leaves = block.to_host()
            if len(leaves[0]):
                return jax.tree.unflatten(block.structure, [leaf[-1] for leaf in leaves])
        if self._structure is not None:
            raise FeedError(
                "An outfeed in mode 'last' gives its value once. There is no new one since the last "
                "dequeue. Keep the value, or run a program that sends to it again."
            )
        raise FeedError(
            "An outfeed in mode 'last' has a value only after a program has run that sends to it. "
            "It was dequeued before. Run the program first."
        )

    def _unlike(self, structure: TreeDef, shapes: list[tuple[tuple[int, ...], Any]]) -> str:
        """A message about the leaf that differs from those of the queued elements."""
        numbered = jax.tree.unflatten(structure, range(len(shapes)))
        for path, number in jax.tree_util.tree_flatten_with_path(numbered)[0]:
            (was, old), (now, new) = self._shapes[number], shapes[number]
            if (was, old) != (now, new):
                return (
                    f"Elements that wait in an outfeed together have one shape and dtype: "
                    f"{_path_called(path)} is {old}{list(was)}. Received: {new}{list(now)} from "
                    f"another program. Dequeue before that one runs, or use a second OutfeedQueue; "
                    f"where it is the last batch that is smaller, leave it out of the data."
                )
        raise AssertionError

    def _check_all(self, what: str) -> None:
        if self.mode is not OutfeedMode.ALL:
            raise FeedError(
                f"{what} needs mode 'all': in mode 'last' there is only one value. "
                f"Use dequeue(), or OutfeedQueue(mode='all')."
            )


def _path_called(path: tuple[Any, ...]) -> str:
    """The name of the leaf at a path, for messages."""
    return leaf_called(jax.tree_util.keystr(path))


def _check_can_leave(called: str, value: jax.Array) -> None:
    if 0 in value.shape:
        raise FeedError(
            f"An element sent out may not have a dim of size 0. Received: {called} of shape "
            f"{value.shape}. Leave it out."
        )
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise FeedError(
            f"An element sent out consists of numbers. Received: {called}, a random key. Send "
            f"jax.random.key_data(key)."
        )


class OutfeedTarget(WeakQueue):
    """The queue that a mark sends to, and the structure of the element."""

    def __init__(self, queue: OutfeedQueue, structure: TreeDef) -> None:
        super().__init__(queue)
        self.structure = structure
