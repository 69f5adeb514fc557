"""How fast a dataset reaches a device, measured by the infeed that training uses.

An `InfeedQueue` reads blocks as long as a fit's and moves them, in its thread, one ahead. The caller
takes each block, waits until it has arrived, and times every epoch. No program runs.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import time
from collections.abc import Iterator
from typing import Any

import jax

from tailrace.base.checks import check_count, check_number
from tailrace.base.messages import logger
from tailrace.data.adapters import as_dataset
from tailrace.data.dataset import Dataset
from tailrace.devices import devices
from tailrace.devices.devices import Device
from tailrace.errors import DataError, DataExhausted, OptionError
from tailrace.feeds import dispatch_table
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.infeed import InfeedQueue


def dataset_benchmark(
    dataset: object,
    epochs: int,
    elements_per_epoch: int,
    *,
    do_memcpy: bool = True,
    print_stats: bool = False,
    timeout_s: float = 60.0,
) -> str:
    """Measure how many elements a second an infeed delivers from a dataset.

    The thread, the blocks and the copies are those of a fit; only the steps are missing.

    Args:
        dataset: anything that `as_dataset` accepts. It must hold epochs * elements_per_epoch elements:
            it is read on from epoch to epoch and never restarted.
        epochs: the number of measurements, one after the other.
        elements_per_epoch: elements in each of them.
        do_memcpy: move every block to the device, as a fit does; otherwise blocks stay in the
            memory of the host.
        print_stats: whether to print the figures of each epoch when it ends.
        timeout_s: the longest wait for one element.

    Returns:
        JSON text: an object whose only key is "epochs", a list with one object per epoch, with
        elements_processed, total_bytes_processed, time_elapsed (seconds), elements_per_second and
        bandwidth (10^9 bytes per second).

    Raises:
        DataExhausted: the dataset ends too early.
        ProducerError: the dataset raised; its exception is the cause.
        DataTimeout: an element did not come within timeout_s.
        DataError: the dataset breaks another rule; the message says which.

    >>> import json
    >>> import numpy as np
    >>> import tailrace as tr
    >>> text = tr.dataset_benchmark([np.zeros(4)] * 20, epochs=2, elements_per_epoch=10)
    >>> [epoch["total_bytes_processed"] for epoch in json.loads(text)["epochs"]]
    [320, 320]
    """
    check_count("epochs", epochs, at_least=1)
    check_count("elements_per_epoch", elements_per_epoch, at_least=1)
    timeout_s = check_number("timeout_s", timeout_s, positive=True)
    source = as_dataset(dataset)
    asked = epochs * elements_per_epoch
    # Before anything is read: a benchmark of minutes would otherwise fail at its end. A one-shot
    # iterator may have been read before, so its length says nothing.
    if source.length is not None and source.restartable and source.length < asked:
        raise _too_short(source, epochs, elements_per_epoch, source.length)

    place = devices.available()[0] if do_memcpy else _host()
    results: list[dict[str, float]] = []
    # Not resident without copies: rows would be indices, and no element would be read at all.
    with InfeedQueue(dataset, resident=None if do_memcpy else False, timeout_s=timeout_s) as infeed:
        # From before the first element: opening a dataset is part of its first epoch, as in training.
        began = time.perf_counter()
        spec = infeed.spec()
        lengths = _lengths(epochs, elements_per_epoch, spec)
        try:
            for epoch, blocks in enumerate(lengths):
                for count, following in blocks:
                    _deliver(infeed, count, following, place)
                ended = time.perf_counter()
                results.append(_figures(elements_per_epoch, spec, ended - began))
                _tell(epoch, results[-1], print_stats)
                began = ended
        except DataExhausted:
            available = infeed.position + infeed.remaining(asked)
            raise _too_short(source, epochs, elements_per_epoch, available) from None
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
    has only one stream of elements: the infeed will not see those that the benchmark reads.

    Raises:
        DataError: the dataset ended before anything could be measured.

    >>> import json
    >>> import numpy as np
    >>> import tailrace as tr
    >>> infeed = tr.InfeedQueue([np.zeros(4)] * 20)
    >>> text = tr.infeed_benchmark(infeed, epochs=2, elements_per_epoch=10)
    >>> len(json.loads(text)["epochs"])
    2
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


def _deliver(infeed: InfeedQueue, count: int, following: int, place: Device) -> None:
    """Take a block as an execution does, and release it as soon as it has arrived."""
    staged = infeed.take(count, place, then=following)
    jax.block_until_ready(staged.device)
    # No execution holds the block: without a ticket to wait for, the thread may use its place at once.
    infeed.started(None)


def _lengths(epochs: int, elements: int, spec: ElementSpec) -> Iterator[list[tuple[int, int]]]:
    """For each epoch the lengths of its blocks, each with the length of the block after it.

    Training gives an execution as many elements as fit, and the last one of an epoch what is left.
    """
    # As long as a fit's blocks: shorter ones would measure the cost of a dispatch, not of the data.
    most = dispatch_table.most_bytes() // max(1, spec.nbytes)
    block = max(1, min(most, dispatch_table.LONGEST, elements))
    lengths = [min(block, elements - start) for start in range(0, elements, block)]
    for epoch in range(epochs):
        first_of_next = lengths[0] if epoch < epochs - 1 else 0
        yield list(zip(lengths, [*lengths[1:], first_of_next], strict=True))


def _host() -> Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise OptionError(
            "do_memcpy=False keeps elements in the memory of the host, which JAX's platform cpu "
            f"manages, and JAX has no such platform here: {error}. Add cpu to JAX_PLATFORMS, or "
            "leave do_memcpy=True."
        ) from None


def _figures(elements: int, spec: ElementSpec, seconds: float) -> dict[str, float]:
    seconds = max(seconds, 1e-9)  # at least a clock tick, so that no figure is infinite
    # The dtypes of the dataset: 64-bit values are narrowed on the way to the device.
    sizes = [s.size * d.itemsize for s, d in zip(spec.leaves, spec.dtypes, strict=True)]
    total_bytes = elements * sum(sizes)
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
