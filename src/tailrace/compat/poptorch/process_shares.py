"""Which rows of a dataset are read by this process, of several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from tailrace.compat.arguments import DatasetLike
from tailrace.compat.poptorch.options import Options
from tailrace.errors import OptionError
from tailrace.torch.errors import UsageError


class ProcessShare:
    """A sampler of the rows of one process; together those of all processes are the dataset.

    Args:
        options: `Distributed` says which process this is, of how many; `random_seed` how to shuffle.
        count: the rows of the dataset.
        whole: the rows of one call of a model.
        shuffle: draw another order in each epoch, the same in all processes.
        drop_last: give each process equally many whole calls; otherwise the first ones have a row
            more where rows are left.

    >>> options = Options()
    >>> _ = options.Distributed.configureProcessId(1, 2)
    >>> list(ProcessShare(options, 10, whole=2, shuffle=False, drop_last=True))
    [4, 5, 6, 7]
    """

    def __init__(
        self, options: Options, count: int, whole: int, shuffle: bool, drop_last: bool
    ) -> None:
        number, processes = options.Distributed.processId, options.Distributed.numProcesses
        if shuffle and options.random_seed is None:
            raise UsageError(
                "To shuffle a dataset over several processes, all must draw the same order. Call "
                "options.randomSeed(...) first."
            )
        self._count, self._seed, self._epoch = count, options.random_seed, 0
        self._shuffle = shuffle
        if drop_last:
            # Equally many calls: a process with fewer would end its epoch before the others.
            share = whole * (count // (whole * processes))
            self._rows = range(number * share, (number + 1) * share)
        else:
            share, rest = divmod(count, processes)
            first = number * share + min(number, rest)
            self._rows = range(first, first + share + (number < rest))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        if not self._shuffle:
            return iter(self._rows)
        # A generator of its own: all processes must draw the same order, whatever else they draw.
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        self._epoch += 1
        order = torch.randperm(self._count, generator=generator)
        return iter(order[self._rows.start : self._rows.stop].tolist())


def share_of(
    options: Options,
    dataset: DatasetLike,
    batch_size: int | None,
    whole: int,
    given: dict[str, Any],
) -> ProcessShare | None:
    """The sampler for a loader, if there are several processes; or why it cannot be."""
    processes = options.Distributed.numProcesses
    if processes == 1:
        return None
    if given.get("batch_sampler") is not None or given.get("sampler") is not None:
        raise OptionError(
            f"A sampler decides about rows itself. Received one, and {processes} processes. Give "
            f"auto_distributed_partitioning=False, and let it choose the rows of this process."
        )
    if isinstance(dataset, IterableDataset) or batch_size is None:
        raise UsageError(
            f"A dataset whose rows have numbers is divided among processes, in batches. Received: "
            f"{type(dataset).__name__}, batch_size={batch_size}, and {processes} processes. Give "
            f"auto_distributed_partitioning=False, and let the dataset yield the rows of this process."
        )
    return ProcessShare(
        options, len(dataset), whole, bool(given.get("shuffle")), given["drop_last"]
    )
