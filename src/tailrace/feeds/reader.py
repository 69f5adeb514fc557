"""Reading a dataset in blocks: elements stacked into arrays, with put-back.

A reader is used by one thread at a time. No element is lost: when the dataset ends or fails in the
middle of a block, the elements read so far stay for the next read.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tailrace.base.messages import logger
from tailrace.base.trees import Tree
from tailrace.data.adapters import as_dataset
from tailrace.data.batch_iterator import BatchIterator
from tailrace.data.dtypes import store_narrowed
from tailrace.data.no_data import NoElements
from tailrace.data.positions.loader_state import (
    State,
    changed,
    generators_of,
    loader_state,
    put_loader_state,
)
from tailrace.data.resumable import can_go_back, decode_state, encode_state, own_copy
from tailrace.devices.devices import Device
from tailrace.errors import DataError, DataExhausted, ProducerError, TailraceError
from tailrace.feeds.blocks import Blocks, HostBlocks
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.feed import Block
from tailrace.feeds.skipping import SHOWN_EVERY_S, skip

SKIPPED_AT_ONCE = 64
"""The number of elements read at a time while skipping."""

_END = object()
"""Marks the end of a dataset; `None` could be an element."""


class Reader:
    """The elements of a dataset, from first to last, in blocks of any size.

    Args:
        dataset: the dataset.
        epoch: sets the order of shuffled `tr.batches`.
        blocks: what rows of blocks are; None: elements on the host.

    Attributes:
        name: what the dataset is, for messages.
        delivered: the number of elements read and not put back.
        began: the random numbers and counters of the dataset when its pass began.
    """

    def __init__(
        self, dataset: object, epoch: int | None = None, blocks: Blocks | None = None
    ) -> None:
        self._dataset, self._epoch = as_dataset(dataset), epoch or 0
        source = self._dataset
        self.name, self._when_empty, self._from = source.name, source.when_empty, source.first
        self._opened: Iterator[Any] | None = None
        self._given_blocks = blocks
        self._blocks = HostBlocks() if blocks is None else blocks
        self.began: State = {}
        self._first: Any = None  # in a tuple, once it is fetched
        self._asked: float | None = None  # when the current read began
        self._waiting: deque[Block] = deque()
        self._spec: ElementSpec | None = None
        self._plain: list[tuple[tuple[int, ...], np.dtype]] | None = None
        self._ended: BaseException | bool = False
        self.delivered = 0
        self._produced = 0
        self._states: deque[tuple[int, Any, State]] = deque()
        """States of the source, with the number of elements read before each; oldest first."""
        if source.fast is not None:  # nothing to wait for
            self.open()

    @property
    def has_spec(self) -> bool:
        """Whether the spec of the elements is known already."""
        return self._spec is not None

    def spec(self) -> ElementSpec:
        """The spec of the elements, from the first of them (which is not lost)."""
        if self._spec is None:
            self._spec = self._blocks.known_spec()
        if self._spec is None:
            self.fetch_first()
            (first,) = self._first
            if first is _END:
                raise DataExhausted(
                    f"A dataset needs at least one element. Received: an empty {self.name}. "
                    f"{self._when_empty}".rstrip()
                )
            self._spec = self._first_form(first)
            self._first = None
            # Most elements are flat tuples of arrays. Comparing them directly is much cheaper than
            # flattening.
            if self._spec.structure == jax.tree.structure((0,) * len(self._spec.leaves)):
                shapes = (leaf.shape for leaf in self._spec.leaves)
                self._plain = list(zip(shapes, self._spec.dtypes, strict=True))
            block = self._new_block(1)
            self._store(first, block, 0)
            self._waiting.append(block)
        return self._spec

    def open(self) -> Iterator[Any]:
        """Begin the pass: call `__iter__`, which may block, so that the thread that reads calls it."""
        if self._opened is not None:
            return self._opened
        source = self._dataset
        # Read by a waiting caller in another thread, without a lock: it only says for how long.
        self._asked = time.monotonic()
        try:
            self.began = {} if source.fast is not None else loader_state(source.origin)
            self._opened = source.iterate(self._epoch)
        except TailraceError:
            raise
        except Exception as error:
            raise ProducerError(
                f"The dataset ({self.name}) raised {type(error).__name__} when it was iterated: "
                f"{error}. Its own traceback is shown above."
            ) from error
        finally:
            self._asked = None
        if isinstance(self._opened, BatchIterator) and self._given_blocks is None:
            self._blocks = HostBlocks(self._opened.batches)
        return self._opened

    def close(self) -> None:
        """Give up the pass, as a loop that is left does; what is known of the elements stays."""
        self._opened, self._ended, self._first = iter(()), True, None
        self._waiting.clear()

    @property
    def ended(self) -> bool:
        """Whether the pass was read to its end."""
        return self._ended is True

    def read_to_end(self) -> None:
        """Read what is left of the pass, and drop it: code after the last element is to run."""
        self._waiting.clear()
        self._first = None
        shown = time.monotonic()
        while self._next() is not _END:
            if time.monotonic() - shown > SHOWN_EVERY_S:
                shown = time.monotonic()
                logger.warning(
                    "Reading a pass over %s again: %s elements.", self.name, self._produced
                )

    def fetch_first(self) -> None:
        """Read the first element, if the spec is not known without it."""
        self.open()
        known = self._spec is not None or isinstance(self._opened, BatchIterator)
        if not known and self._first is None:
            self._first = (self._next(),)

    def awaited(self) -> str:
        """The element that a read waits for, for messages."""
        return f"element {self._from + self._produced} of the dataset ({self.name})"

    def waited_s(self) -> float:
        """For how long the dataset has been busy with the next element, in seconds."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def read(self, count: int) -> Block:
        """The next `count` elements, stacked leaf by leaf; DataExhausted if there are fewer."""
        self.spec()
        blocks: list[Block] = []
        missing = count
        while missing and self._waiting:
            block = self._waiting.popleft()
            if len(block[0]) > missing:
                # A view: what was put back is cut, not copied.
                self._waiting.appendleft([leaf[missing:] for leaf in block])
                block = [leaf[:missing] for leaf in block]
            blocks.append(block)
            missing -= len(block[0])
        if missing:
            block, failure = self._read_on(missing, blocks)
            if len(block[0]) < count:
                # It was never counted as delivered; the count below is not reached.
                self.put_back(block, uncount=False)
                if isinstance(failure, BaseException):
                    raise failure
                raise self._exhausted(count, len(block[0]))
            blocks = [block]
        self.delivered += count
        if not blocks:
            return self._new_block(0)
        return blocks[0] if len(blocks) == 1 else self._join(blocks)

    def put_back(self, block: Block, *, uncount: bool = True) -> None:
        """Make the next read start with `block`."""
        if len(block[0]):
            self._waiting.appendleft(block)
            self.delivered -= len(block[0]) if uncount else 0

    def available(self, count: int, needed: bool = False) -> int:
        """How many of the next `count` elements exist; they are not consumed.

        Args:
            count: the number of elements to look for.
            needed: whether fewer than `count` are an error.
        """
        try:
            block = self.read(count)
        except DataExhausted:
            if needed:
                raise
            return sum(len(block[0]) for block in self._waiting)
        self.put_back(block)
        return count

    @property
    def number(self) -> int:
        """The index of the next element, by the source's count, which an audit relies on."""
        source = self._opened
        made = source.position if isinstance(source, BatchIterator) else self._produced
        # What is put back counts as not read; so does a first element that was read for its spec.
        waiting = sum(len(block[0]) for block in self._waiting)
        return made - waiting - (self._first is not None)

    def state_at(self, position: int) -> dict[str, Any]:
        """A state to resume from element `position`: a state of the source and a number to skip.

        For a source that can seek (`tr.batches`) the index is enough, beside what it indexes.
        """
        if isinstance(self._opened, BatchIterator):
            return {"recipe": self._opened.recipe()}
        # States are kept from the last one before the position: elements that were read ahead of it,
        # and put back, are between a state and what a program has taken.
        while len(self._states) > 1 and self._states[1][0] <= position:
            self._states.popleft()
        if not self._states or self._states[0][0] > position:
            return {}
        produced, state, drawn = self._states[0]
        return {"source": encode_state(state), "source_at": produced, "source_drawn": drawn}

    def check_kind(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of another kind of dataset, whose elements come in another order."""
        source = self.open()
        mine = isinstance(source, BatchIterator)
        if ("recipe" in state and not mine) or ("source" in state and not can_go_back(source)):
            kind = "tr.batches" if "recipe" in state else "a dataset whose iterator has a state"
            raise DataError(
                f"A fit continues with the dataset that it was begun with: {kind}. Received: "
                f"{self.name}. Give that dataset, or use another checkpoint directory."
            )

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Seek to element `state["elements"]`; no element after it may have been taken."""
        position, source = int(state["elements"]), self.open()
        if isinstance(source, BatchIterator):
            # Nothing is read again: the order of `tr.batches` is a function of the seed and the index.
            if "recipe" in state:
                source.check_recipe(state["recipe"])
            if "share_of" in state:
                raise DataError(
                    f"A training that continues in another number of processes has a dataset that all "
                    f"of them read. Received: {self.name}, in each of {state['share_of']} processes. "
                    f"Use tr.distributed.share(dataset, replicas)."
                )
            source.seek(position)
            self._waiting.clear()
            self.delivered = self._produced = position
            return
        done = self.delivered
        if "source" in state and can_go_back(source):
            self.spec()
            self._waiting.clear()
            try:
                source.set_state(decode_state(state["source"]))  # type: ignore[attr-defined]
            except TailraceError:
                raise
            except Exception as error:
                raise DataError(
                    f"The dataset ({self.name}) refuses the state that its iterator had: "
                    f"{type(error).__name__}: {error} Give the fit the dataset that it was begun with."
                ) from error
            self.delivered = self._produced = done = int(state["source_at"])
            self._ended = False
            put_loader_state(self._dataset.origin, state.get("source_drawn", {}))
        self._skip(position - done)

    def _skip(self, count: int) -> None:
        """Read elements that were used before, and drop them."""
        skip(count, self.read, f"elements of {self.name}", SKIPPED_AT_ONCE)

    def to_device(
        self, block: Block, sharding: jax.sharding.Sharding | Device, room: int
    ) -> tuple[Any, ...]:
        """Transfer a block into arrays with `room` rows; the rows after it are uninitialized.

        On a CPU this may alias the block, so the block must not be written again.
        """
        return self._blocks.to_device(block, sharding, room)

    def elements_of(self, block: Block) -> Block:
        """The elements of a block, on the host."""
        return self._blocks.elements_of(block)

    # -- reading the dataset --------------------------------------------------------------------

    def _read_on(self, count: int, before: Sequence[Block]) -> tuple[Block, BaseException | None]:
        """`before`, then up to `count` more elements, and the error if there are fewer."""
        assert self._spec is not None
        source = self.open()
        seeks = isinstance(source, BatchIterator)
        if not seeks and can_go_back(source) and not self._ended:
            state = own_copy(source.get_state())  # type: ignore[attr-defined]
            drawn = generators_of(loader_state(self._dataset.origin))
            self._states.append((self._produced, state, changed(drawn, self.began)))
        if isinstance(source, NoElements):
            self._produced += count
            whole = [*before, [source.read(count)]]
            return (whole[0] if len(whole) == 1 else self._join(whole)), None
        if isinstance(source, BatchIterator) and not self._ended:
            block, done = self._blocks.read(source, count, self._spec)
            self._produced += done
            # Nothing was read if only a smaller last batch is left: an empty block has the shape of a
            # whole one.
            whole = [*before, block] if done else list(before)
            if done == count:
                return (whole[0] if len(whole) == 1 else self._join(whole)), None
            return self._read_singly(count - done, whole)
        return self._read_singly(count, before)

    def _read_singly(
        self, count: int, before: Sequence[Block]
    ) -> tuple[Block, BaseException | None]:
        # Directly into the returned block, after the elements put back: nothing is copied twice.
        first = sum(len(block[0]) for block in before)
        block = self._new_block(first + count)
        for target, *waited in zip(block, *before, strict=True):
            if waited:
                np.concatenate(waited, out=target[:first])
        row = first
        try:
            for row in range(first, first + count):
                element = self._next()
                if element is _END:
                    return [leaf[:row] for leaf in block], None
                self._store(element, block, row)
        except TailraceError as error:
            self._ended = error  # or the next read would silently skip the wrong element
            return [leaf[:row] for leaf in block], error
        return block, None

    def _first_form(self, first: Tree) -> ElementSpec:
        try:
            return ElementSpec.of(first)
        except TailraceError as error:
            self._ended = error  # not skipped: the next read raises the same error
            raise

    def _next(self) -> Tree:
        if isinstance(self._ended, BaseException):
            raise self._ended
        if self._ended:
            return _END
        source = self.open()
        self._asked = time.monotonic()
        try:
            element = next(source)
        except StopIteration:
            self._ended = True
            return _END
        except TailraceError as error:
            self._ended = error
            raise
        except Exception as error:
            where = f"after {self._from + self._produced} elements"
            failure = ProducerError(
                f"The dataset ({self.name}) raised {type(error).__name__} {where}: {error}. "
                f"Its own traceback is shown above."
            )
            failure.__cause__ = error
            self._ended = failure
            raise failure from error
        finally:
            self._asked = None
        self._produced += 1
        return element

    def _new_block(self, count: int) -> Block:
        assert self._spec is not None
        return self._blocks.new(count, self._spec)

    def _join(self, blocks: Sequence[Block]) -> Block:
        assert self._spec is not None
        return self._blocks.join(blocks, self._spec)

    def _store(self, element: Tree, block: Block, row: int) -> None:
        assert self._spec is not None
        leaves = element
        if not self._is_plain(element):
            leaves = self._spec.conform(element, self._from + self._produced - 1)
        if self._spec.narrows:
            for leaf, target, path, dtype in zip(
                leaves, block, self._spec.paths, self._spec.dtypes, strict=True
            ):
                if dtype == target.dtype:
                    target[row] = leaf
                else:
                    store_narrowed(target, row, leaf, path)  # without a second copy
            return
        for leaf, target in zip(leaves, block, strict=True):
            target[row] = leaf

    def _is_plain(self, element: Tree) -> bool:
        """Whether an element is the expected tuple of arrays; cheaper than flattening a tree."""
        # By type, not `isinstance`: a named tuple or a subclass of an array may mean something else.
        if self._plain is None or type(element) is not tuple or len(element) != len(self._plain):
            return False
        for leaf, (shape, dtype) in zip(element, self._plain, strict=True):
            if type(leaf) is not np.ndarray or leaf.shape != shape or leaf.dtype != dtype:
                return False
        return True

    def _exhausted(self, asked: int, found: int) -> DataExhausted:
        return DataExhausted(
            f"The dataset ({self.name}) must have all the elements of an execution before it "
            f"starts. Asked for {asked}, found {found} (after {self.delivered} delivered before). "
            f"Ask for fewer, or repeat the dataset. What was found is kept."
        )
