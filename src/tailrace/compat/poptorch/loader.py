"""`poptorch.DataLoader` and `AsynchronousDataAccessor`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset

from tailrace.compat.arguments import DatasetLike
from tailrace.compat.poptorch.enums import DataLoaderMode, SharingStrategy
from tailrace.compat.poptorch.options import Options, check_options
from tailrace.compat.poptorch.process_shares import share_of
from tailrace.errors import OptionError
from tailrace.torch.calls.loader import Ahead
from tailrace.torch.calls.loader import DataLoader as NativeLoader
from tailrace.torch.errors import UsageError

_MODES = {
    DataLoaderMode.Sync: "sync",
    DataLoaderMode.Async: "async",
    DataLoaderMode.AsyncRebatched: "async_rebatched",
}


class DataLoader(NativeLoader):
    """PyTorch's loader, whose batches hold all rows of one call of a model.

    Args:
        options: the options of the model; they are frozen.
        dataset: any PyTorch dataset.
        batch_size: rows of one microbatch.
        shuffle: as in PyTorch.
        num_workers: as in PyTorch.
        drop_last: leave out rows at the end that do not fill a call.
        persistent_workers: as in PyTorch.
        auto_distributed_partitioning: with several processes (`options.Distributed`), give each its
            rows.
        mode: a `DataLoaderMode`.
        async_options: {"buffer_size": 3}.
        rebatched_worker_size: rows that a worker delivers at a time, when rebatching.
        batch_sampler: as in PyTorch.
        **dataloader_kwargs: everything else that PyTorch's loader takes.

    Raises:
        OptionError: `options` is not a `poptorch.Options`.
        UsageError: `mode` is not a `DataLoaderMode`.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> options = poptorch.Options().deviceIterations(3)
    >>> rows = torch.utils.data.TensorDataset(torch.zeros(12, 5))
    >>> loader = poptorch.DataLoader(options, rows, batch_size=2)
    >>> loader.combinedBatchSize, [tuple(x.shape) for (x,) in loader]
    (6, [(6, 5), (6, 5)])
    """

    options: Options

    def __init__(
        self,
        options: Options,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        check_options(options)
        if not isinstance(mode, DataLoaderMode):
            raise UsageError(f"Expected a poptorch.DataLoaderMode, got {mode!r}")
        native = options.native()
        if auto_distributed_partitioning:
            chosen = {"shuffle": shuffle, "drop_last": drop_last, "batch_sampler": batch_sampler}
            # In whole calls of a model: a share that ends in the middle of one would be cut.
            whole = (batch_size or 1) * native.pieces
            share = share_of(options, dataset, batch_size, whole, chosen | dataloader_kwargs)
            if share is not None:
                # PyTorch refuses both: the sampler shuffles.
                dataloader_kwargs["sampler"], shuffle = share, None
        super().__init__(
            native,
            dataset,
            batch_size,
            shuffle,
            num_workers,
            drop_last,
            persistent_workers,
            _MODES[mode],
            async_options,
            rebatched_worker_size,
            batch_sampler,
            **dataloader_kwargs,
        )
        # As the original does: options that a loader was made with no longer change, so a model
        # made with them fits its batches.
        options.freeze()
        self.options = options

    @property
    def combinedBatchSize(self) -> int | None:
        """How many rows a batch has, those of all microbatches of a call."""
        return self.combined_batch_size


class AsynchronousDataAccessor:
    """Reads a dataset or a loader ahead, in a thread.

    Elements are fresh tensors, unlike in the original, whose next element overwrites the last.

    Args:
        dataset: a dataset or a loader.
        buffer_size: how many elements are read ahead.
        miss_sleep_time_in_ms: without effect: nothing polls here.
        load_indefinitely: without effect: an iterator reads what it is asked for.
        early_preload: without effect.
        sharing_strategy: without effect: there is no second process.
        rebatched_size: refused: use `DataLoader(mode=DataLoaderMode.AsyncRebatched)`.

    Raises:
        OptionError: `rebatched_size` is given.

    >>> from tailrace.compat import poptorch
    >>> accessor = poptorch.AsynchronousDataAccessor([1, 2, 3])
    >>> list(accessor)
    [1, 2, 3]
    >>> accessor.terminate()
    """

    def __init__(
        self,
        dataset: DatasetLike,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
    ) -> None:
        if rebatched_size is not None:
            raise OptionError(
                "Rebatching is a mode of the loader: poptorch.DataLoader(..., "
                "mode=poptorch.DataLoaderMode.AsyncRebatched)."
            )
        self._dataset, self._size = dataset, buffer_size
        # Weak: an epoch that has ended goes with its iterator.
        self._running: weakref.WeakSet[Ahead] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Any]:
        source = self._dataset
        # Rows by number: Python would read until an IndexError, which a dataset of PyTorch need not
        # raise.
        if not hasattr(source, "__iter__"):
            source = (self._dataset[index] for index in range(len(self._dataset)))
        ahead = Ahead(source, self._size, type(source).__name__)
        self._running.add(ahead)
        return iter(ahead)

    def __len__(self) -> int:
        return len(self._dataset)

    def terminate(self) -> None:
        """Stop reading."""
        for ahead in list(self._running):
            ahead.stop()
        self._running.clear()
