"""The thread that reads a dataset ahead, for the benchmark: named, bounded, and never silent."""

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

import numpy as np

from tailrace.data.batch_iterator import BatchIterator
from tailrace.data.dataset import Dataset
from tailrace.data.trees import Tree, map_leaves
from tailrace.errors import DataError, ProducerError, TailraceError
from tailrace.messages import logger

ELEMENTS_AHEAD = 32
"""How many elements the thread may be ahead, in the queue."""

BATCHES_AT_ONCE = 8
"""What tr.batches is asked for at a time; other datasets give one element at a time."""

_JOIN_LIMIT_S = 5.0


class Chunk(NamedTuple):
    """Some consecutive elements: a tree whose leaves have one more leading axis, of that size."""

    tree: Tree
    size: int


class _Failed(NamedTuple):
    error: BaseException
    after: int


class Producer:
    """A thread that reads chunks into a bounded queue; leaving the `with` block ends it."""

    def __init__(
        self, source: Dataset, epochs: int, elements_per_epoch: int, timeout_s: float
    ) -> None:
        self._source = source
        self._epochs = epochs
        self._elements_per_epoch = elements_per_epoch
        self._timeout_s = timeout_s
        self._at_once = 1 if source.fast is None else BATCHES_AT_ONCE
        self._queue: queue.Queue[Chunk | _Failed | None] = queue.Queue(
            ELEMENTS_AHEAD // self._at_once
        )
        self._stop = threading.Event()
        # A daemon: a source that hangs for good must not keep the process alive.
        self._thread = threading.Thread(
            target=self._run, name="tailrace-benchmark-producer", daemon=True
        )

    def __enter__(self) -> "Producer":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(_JOIN_LIMIT_S)
        if self._thread.is_alive():
            logger.warning(
                "%s is still busy in its own code; its benchmark thread was left to itself.",
                self._source.name,
            )

    def get(self) -> Chunk | None:
        """The next chunk, or None after the last one; what went wrong in the thread is raised."""
        try:
            item = self._queue.get(timeout=self._timeout_s)
        except queue.Empty:
            raise DataError(
                f"The dataset ({self._source.name}) gave no element for {self._timeout_s:g} "
                "seconds. If it needs that long, raise timeout_s."
            ) from None
        if not isinstance(item, _Failed):
            return item
        if isinstance(item.error, TailraceError):
            raise item.error
        raise ProducerError(
            f"The dataset ({self._source.name}) raised {type(item.error).__name__} after "
            f"{item.after} elements: {item.error}"
        ) from item.error

    def _run(self) -> None:
        read = 0
        try:
            for chunk in self._chunks():
                if not self._put(chunk):
                    return
                read += chunk.size
            self._put(None)
        except BaseException as error:  # whatever it is, it belongs to the caller
            self._put(_Failed(error, after=read))

    def _chunks(self) -> Iterator[Chunk]:
        """All elements, in chunks that do not cross epochs."""
        iterator = self._source.iterate()
        for _ in range(self._epochs):
            left = self._elements_per_epoch
            while left:
                chunk = _next_chunk(iterator, min(left, self._at_once))
                if chunk is None:
                    return
                yield chunk
                left -= chunk.size

    def _put(self, item: Chunk | _Failed | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


def _next_chunk(iterator: Iterator[Tree], at_most: int) -> Chunk | None:
    if isinstance(iterator, BatchIterator):
        tree, count = iterator.read(at_most)
        if count:
            return Chunk(tree, count)
    try:
        element = next(iterator)
    except StopIteration:
        return None
    return Chunk(map_leaves(lambda leaf: np.asarray(leaf)[None], element), 1)
