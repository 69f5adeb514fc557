"""How fast a dataset delivers, measured the way an infeed reads it: by a thread, ahead of its use.

A producer thread fills a bounded queue with elements; the caller takes them out, copies each leaf
into a buffer (as moving them to a device would) and times every epoch. Nothing runs on a device.
"""

import json
import time
from typing import Any

import numpy as np

from tailrace.data.adapters import as_dataset
from tailrace.data.counts import check_count, check_number
from tailrace.data.dataset import Dataset
from tailrace.data.trees import Tree, leaf_called, leaves, paths
from tailrace.errors import DataError, DataExhausted, ElementError
from tailrace.feeds.benchmark.producer import BATCHES_AT_ONCE, Chunk, Producer
from tailrace.messages import logger


def dataset_benchmark(
    dataset: Any,
    epochs: int,
    elements_per_epoch: int,
    *,
    do_memcpy: bool = True,
    print_stats: bool = False,
    timeout_s: float = 60.0,
) -> str:
    """Measure how many elements a second a dataset delivers.

    Args:
        dataset: whatever `as_dataset` takes. It must hold epochs * elements_per_epoch elements: it
            is read on from epoch to epoch and never restarted.
        epochs: how many measurements to make, one after the other.
        elements_per_epoch: elements in each of them.
        do_memcpy: copy every element into a buffer, as feeding a device would.
        print_stats: print the figures of each epoch when it ends.
        timeout_s: the longest wait for one element.

    Returns:
        JSON text: an object whose only key is "epochs", a list with one object for each epoch, with
        elements_processed, total_bytes_processed, time_elapsed (seconds), elements_per_second and
        bandwidth (10^9 bytes a second).

    Raises:
        DataExhausted: the dataset ends too early.
        ProducerError: the dataset raised; its exception is the cause.
        DataError: another rule is broken; the text says which.

    >>> text = dataset_benchmark([np.zeros(4)] * 20, epochs=2, elements_per_epoch=10)
    >>> [epoch["total_bytes_processed"] for epoch in json.loads(text)["epochs"]]
    [320, 320]
    """
    check_count("epochs", epochs, at_least=1)
    check_count("elements_per_epoch", elements_per_epoch, at_least=1)
    timeout_s = check_number("timeout_s", timeout_s, positive=True)
    source = as_dataset(dataset)
    asked = epochs * elements_per_epoch
    if source.length is not None and source.restartable and source.length < asked:
        raise _too_short(source, epochs, elements_per_epoch, source.length)

    results: list[dict[str, float]] = []
    with Producer(source, epochs, elements_per_epoch, timeout_s) as producer:
        consumer = _Consumer(do_memcpy)
        began = time.perf_counter()
        for epoch in range(epochs):
            left = elements_per_epoch
            while left:
                chunk = producer.get()
                if chunk is None:
                    available = asked - left - (epochs - epoch - 1) * elements_per_epoch
                    raise _too_short(source, epochs, elements_per_epoch, available)
                consumer.take(chunk)
                left -= chunk.size
            ended = time.perf_counter()
            results.append(_figures(elements_per_epoch, consumer.element_bytes, ended - began))
            _tell(epoch, results[-1], print_stats)
            began = ended
    return json.dumps({"epochs": results})


def infeed_benchmark(
    infeed: Any,
    epochs: int,
    elements_per_epoch: int,
    *,
    do_memcpy: bool = True,
    print_stats: bool = False,
    timeout_s: float = 60.0,
) -> str:
    """`dataset_benchmark` of the dataset behind an infeed; the infeed itself is not touched.

    The arguments, the result and the errors are those of `dataset_benchmark`. A one-shot iterator
    has only one stream of elements: what the benchmark reads, the infeed will not see.
    """
    if not hasattr(infeed, "dataset"):
        raise DataError(
            "infeed_benchmark measures the dataset behind an infeed. "
            f"Received: a {type(infeed).__name__}, which has none. "
            "For a dataset use dataset_benchmark."
        )
    return dataset_benchmark(
        infeed.dataset,
        epochs,
        elements_per_epoch,
        do_memcpy=do_memcpy,
        print_stats=print_stats,
        timeout_s=timeout_s,
    )


class _Consumer:
    """Takes chunks: compares them with the first one, and copies them into buffers kept for it."""

    def __init__(self, do_memcpy: bool) -> None:
        self._do_memcpy = do_memcpy
        self._buffers: list[np.ndarray] | None = None  # made from the first element
        self._paths: list[str] = []
        self.element_bytes = 0

    def take(self, chunk: Chunk) -> None:
        arrays = leaves(chunk.tree)
        if self._buffers is None:
            self._buffers = self._prepare(chunk.tree, arrays)
        if len(arrays) != len(self._buffers):
            raise ElementError(
                f"All elements must be alike, but one has {len(arrays)} leaves ({paths(chunk.tree)}"
                f") where the first has {len(self._buffers)} ({self._paths})."
            )
        for path, array, buffer in zip(self._paths, arrays, self._buffers, strict=True):
            if array.shape[1:] != buffer.shape[1:] or array.dtype != buffer.dtype:
                raise ElementError(
                    f"All elements must be alike, but {leaf_called(path)} has the shape "
                    f"{array.shape[1:]} and dtype {array.dtype} where the first element has "
                    f"{buffer.shape[1:]} and {buffer.dtype}. For a smaller last batch, drop the "
                    "remainder."
                )
            if self._do_memcpy:
                np.copyto(buffer[: chunk.size], array)

    def _prepare(self, tree: Tree, arrays: list[np.ndarray]) -> list[np.ndarray]:
        self._paths = paths(tree)
        if not arrays:
            raise DataError("An element of the dataset holds no array: there is nothing to read.")
        for path, array in zip(self._paths, arrays, strict=True):
            if 0 in array.shape[1:]:
                raise DataError(
                    f"No dimension may have the size 0, but {leaf_called(path)} has the shape "
                    f"{array.shape[1:]}. Please remove it from the dataset."
                )
        self.element_bytes = sum(array[0].nbytes for array in arrays)
        return [np.empty((BATCHES_AT_ONCE, *a.shape[1:]), a.dtype) for a in arrays]


def _figures(elements: int, element_bytes: int, seconds: float) -> dict[str, float]:
    seconds = max(seconds, 1e-9)  # a clock's tick, so that no figure is infinite
    total_bytes = elements * element_bytes
    return {
        "elements_processed": elements,
        "total_bytes_processed": total_bytes,
        "time_elapsed": seconds,
        "elements_per_second": elements / seconds,
        "bandwidth": total_bytes / (1e9 * seconds),
    }


def _tell(epoch: int, figures: dict[str, float], print_stats: bool) -> None:
    logger.info("Epoch %d of the benchmark is complete.", epoch)
    if print_stats:
        print(f"Processed: {figures['elements_per_second']:,.0f} elements/second.")
        print(f"Bandwidth: {figures['bandwidth']:.3f} GB/s.")


def _too_short(source: Dataset, epochs: int, elements: int, available: int) -> DataExhausted:
    return DataExhausted(
        f"The benchmark asked for {epochs * elements} elements (epochs={epochs} times "
        f"elements_per_epoch={elements}), but the dataset ({source.name}) has only {available}. "
        "Ask for fewer, or make the dataset repeat."
    )
