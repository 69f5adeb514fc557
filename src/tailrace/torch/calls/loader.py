"""`tt.DataLoader`: PyTorch's loader, with batches large enough for a whole call of a model."""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

import torch
from torch.utils import data as torch_data

from tailrace.base.messages import note_once
from tailrace.base.spans.span import span
from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.errors import OptionError
from tailrace.feeds.background import Worker
from tailrace.feeds.waiting import LOOK_S, Lasting, Patience
from tailrace.torch.calls.containers import flatten, rebuild
from tailrace.torch.calls.options import ModelOptions
from tailrace.torch.calls.passes import passes_of
from tailrace.torch.errors import UsageError


class DataLoaderMode(enum.StrEnum):
    """How a loader reads. Strings are accepted; an unknown one is an `OptionError`.

    SYNC: on demand. ASYNC: ahead, in a thread. ASYNC_REBATCHED: ahead, and the rows of all workers
    are cut into batches again, so that only one remainder is lost instead of one per worker.

    >>> import tailrace.torch as tt
    >>> tt.DataLoaderMode("async")
    <DataLoaderMode.ASYNC: 'async'>
    """

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_REBATCHED = "async_rebatched"


class Optioned(Protocol):
    """A model, from the view of a loader."""

    @property
    def options(self) -> ModelOptions:
        """The options of its calls."""
        ...


class DataLoader(torch_data.DataLoader):
    """PyTorch's `DataLoader` with batches that have all rows of one call of a model.

    Args:
        options: the model, or its `tt.ModelOptions`, or the number of microbatches of a call.
        dataset: any PyTorch dataset.
        batch_size: rows of one microbatch; None passes the dataset's elements on unchanged.
        shuffle: as in PyTorch.
        num_workers: as in PyTorch. With an accelerator, workers come from a fork server unless
            `multiprocessing_context` is given: a fork of a process that uses an accelerator dies. The
            dataset must then be picklable, and a script needs `if __name__ == "__main__":`.
        drop_last: whether to drop rows at the end that do not fill a call.
        persistent_workers: as in PyTorch; None: if there are workers.
        mode: "sync", "async" or "async_rebatched".
        async_options: {"buffer_size": 3} sets the number of prefetched batches.
        rebatched_worker_size: rows that a worker delivers at a time, when rebatching.
        batch_sampler: as in PyTorch; as many of its batches are joined as a call has microbatches.
        **options_of_torch: other arguments of PyTorch's loader.

    Raises:
        OptionError: arguments exclude each other.
        UsageError: `rebatched_worker_size` is more than the rows of a call.

    >>> import torch
    >>> import torch.utils.data as torch_data
    >>> import tailrace.torch as tt
    >>> rows = torch_data.TensorDataset(torch.arange(100.0))
    >>> loader = tt.DataLoader(10, rows, batch_size=4)
    >>> loader.combined_batch_size, [len(x) for (x,) in loader]
    (40, [40, 40])
    """

    def __init__(
        self,
        options: Optioned | ModelOptions | int,
        dataset: torch_data.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        mode: DataLoaderMode | str = DataLoaderMode.SYNC,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: torch_data.Sampler[list[int]] | Iterable[list[int]] | None = None,
        **options_of_torch: Any,
    ) -> None:
        pieces = _pieces(options)
        self.options = options
        self.mode = _mode(mode)
        self._buffer = _buffer_size(async_options)
        self._drops = drop_last
        self.combined_batch_size, chosen = _joining(
            pieces, batch_size, batch_sampler, shuffle, drop_last
        )
        iterable = isinstance(dataset, torch_data.IterableDataset)
        # PyTorch gives every worker a copy of an iterable dataset.
        if iterable and num_workers > 1 and options_of_torch.get("worker_init_fn") is None:
            note_once(
                "Each worker reads the whole of an iterable dataset: with num_workers > 1 and no "
                "worker_init_fn that shares it out, elements come several times."
            )
        whole = self.combined_batch_size
        # Each worker would end with a smaller batch, and calls take full ones; joined, only the last
        # is.
        if self.mode is DataLoaderMode.ASYNC and not drop_last and (whole or 1) > 1:
            self.mode = DataLoaderMode.ASYNC_REBATCHED
        self._rebatched = self.mode is DataLoaderMode.ASYNC_REBATCHED
        if self._rebatched:
            if whole is None:
                raise OptionError("Rebatching needs a batch_size. Received: batch_size=None.")
            at_a_time = whole if rebatched_worker_size is None else rebatched_worker_size
            if at_a_time > whole:
                raise UsageError(
                    f"rebatched_worker_size is at most the rows of a call, {whole}. Received: "
                    f"{at_a_time}."
                )
            # The workers' remainders are joined here: dropping them there would lose rows of every
            # worker.
            chosen.update(batch_size=at_a_time, drop_last=False)
        # PyTorch's default starts the workers again in each epoch.
        if persistent_workers is None:
            persistent_workers = num_workers > 0
        super().__init__(
            dataset,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            **chosen,
            **options_of_torch,
        )
        # A sampler may leave rows out, or repeat them: it knows how many there are.
        rows = 0 if iterable else len(options_of_torch.get("sampler", dataset))
        if not drop_last and whole and rows % whole:
            note_once(
                f"With drop_last=False the last batch has {rows % whole} rows, and a compiled "
                f"model takes {whole}. Pad it, or leave it out."
            )
        # Weak: an epoch that the user has left ends with its iterator.
        self._running: weakref.WeakSet[Ahead] = weakref.WeakSet()

    def __iter__(self) -> Any:
        """Batches of `combined_batch_size` rows."""
        passes = passes_of(self.options)
        if passes is None:
            return self._begin()
        return passes.follow(self, self._begin, self.settle)

    def settle(self) -> None:
        """Wait for the batches that are being read ahead."""
        for ahead in list(self._running):
            ahead.settle()

    def _begin(self) -> Iterator[Any]:
        if self.num_workers and self.multiprocessing_context is None:
            # Asked here, not in `__init__`: it starts JAX, after which devices can no longer be
            # chosen.
            self.multiprocessing_context = None if devices.platform() == "cpu" else "forkserver"
        # PyTorch starts its workers here.
        batches: Iterable[Any] = super().__iter__()
        if self._rebatched:
            assert self.combined_batch_size is not None
            batches = _rebatched(batches, self.combined_batch_size, self._drops)
        if self.mode is DataLoaderMode.SYNC:
            return _waited_for(batches)
        # A thread, not a process: batches are tensors already, which workers of PyTorch have made if
        # there are any.
        ahead = Ahead(batches, self._buffer, type(self.dataset).__name__)
        self._running.add(ahead)
        return _waited_for(ahead)

    def __len__(self) -> int:
        """The number of batches; when rebatched, rows in the dataset / rows of a batch."""
        if not self._rebatched:
            return super().__len__()
        assert self.combined_batch_size is not None
        rows: Any = (
            self.dataset if isinstance(self.dataset, torch_data.IterableDataset) else self.sampler
        )
        full, rest = divmod(len(rows), self.combined_batch_size)
        return full + bool(rest and not self._drops)

    def terminate(self) -> None:
        """Stop reading ahead."""
        for ahead in list(self._running):
            ahead.stop()
        self._running.clear()


def _joining(
    pieces: int,
    batch_size: int | None,
    batch_sampler: Iterable[list[int]] | None,
    shuffle: bool | None,
    drop_last: bool,
) -> tuple[int | None, dict[str, Any]]:
    """The rows of a call, if they are known, and PyTorch's arguments for loading that many at once."""
    if batch_sampler is not None:
        if batch_size not in (1, None) or shuffle:
            raise OptionError(
                "A batch_sampler decides about batches itself, so it goes with neither batch_size "
                "nor shuffle. Leave those out."
            )
        rows = getattr(batch_sampler, "batch_size", None)
        groups = _Groups(batch_sampler, pieces, drop_last)
        return None if rows is None else rows * pieces, {"batch_sampler": groups}
    if batch_size is None:
        return None, {"batch_size": None, "shuffle": shuffle}
    rows = batch_size * pieces
    return rows, {"batch_size": rows, "shuffle": shuffle, "drop_last": drop_last}


class _Groups:
    """A sampler that joins several batches of another."""

    def __init__(self, sampler: Iterable[Sequence[int]], count: int, drop_last: bool) -> None:
        self._sampler, self._count, self._drops = sampler, count, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        group: list[int] = []
        filled = 0
        for batch in self._sampler:
            group += list(batch)
            filled += 1
            if filled == self._count:
                yield group
                group, filled = [], 0
        if group and not self._drops:
            yield group

    def __len__(self) -> int:
        batches: Any = self._sampler  # without a length where it has none: PyTorch says so
        full, rest = divmod(len(batches), self._count)
        return full + bool(rest and not self._drops)


class Ahead:
    """Reads an iterable ahead in a thread, and gives its items in order.

    The thread and the waits are those of infeeds. Their reader is not: it stores elements of one form
    in blocks of memory for the device, while the batches of a loader are whatever its dataset makes of
    them, also strings, and the last one may be smaller.

    Args:
        source: the iterable.
        size: the number of items that are read ahead.
        name: what is read, for messages.
    """

    _END = object()

    def __init__(self, source: Iterable[Any], size: int, name: str) -> None:
        self._source, self._name = iter(source), name
        self._thread: Worker | None = Worker("tailrace-loader")
        self._asked: deque[Future[Any]] = deque()
        for _ in range(max(1, size)):  # one is asked for at least, or nothing would ever come
            self._ask()

    def __iter__(self) -> Iterator[Any]:
        try:
            for number in itertools.count():
                if not self._asked:
                    return
                future = self._asked.popleft()
                # The future's own wait, for most items enough, takes half the time of the other.
                with contextlib.suppress(TimeoutError):
                    future.exception(LOOK_S)
                if not future.done():
                    Patience().wait_for(
                        future, Lasting(f"batch {number} of a loader ({self._name})")
                    )
                item = future.result()
                if item is self._END:
                    return
                self._ask()
                yield item
        finally:
            self.stop()

    def settle(self) -> None:
        """Wait until everything that was asked for has been read."""
        wait(list(self._asked))

    def stop(self) -> None:
        """Stop the thread; one that is blocked in the dataset is abandoned."""
        thread, self._thread = self._thread, None
        # The thread ends after what it was asked for, unless that is cancelled.
        for future in self._asked:
            future.cancel()
        self._asked.clear()
        if thread is not None:
            thread.stop()

    def _ask(self) -> None:
        # One call for each item: the thread is never more than `size` items ahead, and waits in its
        # queue of calls, not in one that a stopped reader would leave full.
        if self._thread is not None:
            self._asked.append(self._thread.submit(next, self._source, self._END))


def _waited_for(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches; each wait is a span in open traces, and for runs that are timed."""
    rest, end = iter(batches), object()
    while True:
        with span("dataset wait"):
            batch = next(rest, end)
        if batch is end:
            return
        yield batch


def _rebatched(batches: Iterable[Any], rows: int, drop_last: bool) -> Iterator[Any]:
    """Batches of any size, cut into batches of `rows`."""
    kept: Any = None
    for batch in batches:
        # What is left of the batches of all workers is joined, so that only one remainder is lost.
        kept = batch if kept is None else _joined(kept, batch)
        while _rows(kept) >= rows:
            yield rebuild(kept, lambda t: t[:rows])
            # Views: nothing is copied until rows of the next batch are joined to them.
            rest = rebuild(kept, lambda t: t[rows:])
            kept = rest if _rows(rest) else None
            if kept is None:
                break
    if kept is not None and not drop_last:
        yield kept


def _joined(first: Tree, second: Tree) -> Tree:
    others = iter([leaf for _, leaf in flatten(second)])
    return rebuild(first, lambda t: torch.cat([t, next(others)]))


def _rows(batch: Tree) -> int:
    return len(next(leaf for _, leaf in flatten(batch)))


def _pieces(options: object) -> int:
    if isinstance(options, int) and not isinstance(options, bool) and options > 0:
        return options
    found = getattr(options, "options", options)
    if isinstance(found, ModelOptions):
        return found.pieces
    raise OptionError(
        f"A loader joins the batches of one call, so it must know how many there are: give the "
        f"model, its tt.ModelOptions, or the number. Received: {options!r}."
    )


def _mode(mode: DataLoaderMode | str) -> DataLoaderMode:
    try:
        return DataLoaderMode(mode)
    except ValueError:
        raise OptionError(
            f"The mode of a loader is one of {', '.join(repr(str(m)) for m in DataLoaderMode)}. "
            f"Received: mode={mode!r}."
        ) from None


def _buffer_size(options: dict[str, Any] | None) -> int:
    given = dict(options or {})
    size = given.pop("buffer_size", 3)
    ignored = {"miss_sleep_time_in_ms", "load_indefinitely", "early_preload", "sharing_strategy"}
    if wrong := [name for name in given if name not in ignored]:
        raise UsageError(
            f"async_options has 'buffer_size'. Received: {wrong[0]!r}. (Rebatching is a mode: "
            f"mode='async_rebatched'.)"
        )
    for name in given:
        note_once(f"async_options[{name!r}] is about processes with shared memory; there are none.")
    return size
