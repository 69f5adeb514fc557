"""The first batch of a call, which Keras reads before the program does: to build model and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tailrace.feeds.background import Worker
from tailrace.feeds.waiting import Awaited, Lasting, Patience

Read = TypeVar("Read")

_END = object()


class FirstBatch:
    """Reads the batch for Keras: with a limit in a thread, without one in that of the caller."""

    def __init__(self) -> None:
        self._waiting: Lasting | None = None
        self.epochs = 0
        """The number of epochs of which one was read so far."""

    def awaited(self) -> str:
        """What is awaited, for messages."""
        waiting = self._waiting
        return "" if waiting is None else waiting.awaited()

    def waited_s(self) -> float:
        """For how long it has been awaited in the caller's thread, in seconds; 0 if it is not."""
        waiting = self._waiting
        return 0.0 if waiting is None else waiting.waited_s()

    def of_generator(self, data: Any, timeout_s: float | None) -> Any:
        """Data for Keras, which takes the first batch of a generator as soon as it is given one."""
        if not inspect.isgenerator(data):
            return data
        name = type(data).__name__

        def batches() -> Iterator[Any]:
            first = self._read(lambda: next(data, _END), name, timeout_s)
            if first is not _END:
                yield first
                # Not `yield from`, which would close the user's generator with this one.
                for batch in data:  # noqa: UP028
                    yield batch

        return batches()

    def of_epoch(self, iterator: Iterable[Any], timeout_s: float | None) -> Iterator[Any]:
        """An epoch as Keras enumerates them, of one batch, which is read when it is asked for."""

        def read() -> Any:
            self.epochs += 1
            _, _, data = next(iter(iterator))
            return data[0] if isinstance(data, list | tuple) else next(data)

        yield 0, 0, _Asked(lambda: self._read(read, "as Keras reads it", timeout_s))

    def _read(self, read: Callable[[], Read], name: str, timeout_s: float | None) -> Read:
        waiting = Lasting(f"batch 0 of the data ({name})")
        if timeout_s is None:
            self._waiting = waiting
            try:
                return read()
            finally:
                self._waiting = None
        worker = Worker("tailrace-infeed-keras")
        try:
            future = worker.submit(read)
            Patience(timeout_s).wait_for(future, waiting)
            return future.result()
        finally:
            worker.stop(0.0)  # a read that blocks is abandoned


class ReadsHere:
    """The data that calls of `fit`, `evaluate` and `predict` read in the thread of their caller.

    Args:
        first: reads the first batch.
        programs: returns the programs, which read the others.
    """

    def __init__(self, first: FirstBatch, programs: Callable[[], Iterable[Any]]) -> None:
        self._first, self._programs = first, programs

    def awaited(self) -> str:
        """What is awaited, for messages."""
        return max(self._read(), key=lambda read: read.waited_s()).awaited()

    def waited_s(self) -> float:
        """For how long it has been awaited, in seconds; 0 if nothing is."""
        return max(read.waited_s() for read in self._read())

    def _read(self) -> list[Awaited]:
        read = [program.reading() for program in [*self._programs()]]
        return [self._first, *(one for one in read if one is not None)]


class _Asked:
    """An iterator of one batch, which is read when it is asked for; its StopIteration is Keras' own."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __next__(self) -> Any:
        return self._read()
