"""How fast a dataset delivers; the JSON text comes in a list of one, as the original's tensor."""

from __future__ import annotations

from tailrace.compat.arguments import DatasetLike
from tailrace.compat.ipu.errors import (
    InvalidArgumentError,
    IPUTypeError,
    IPUValueError,
    OutOfRangeError,
)
from tailrace.compat.ipu.graph.operations import ResultText
from tailrace.compat.ipu.ipu_infeed_queue import IPUInfeedQueue
from tailrace.compat.originals.missing import missing_from
from tailrace.errors import DataError, DataExhausted
from tailrace.feeds.benchmark import measure as engine


def dataset_benchmark(
    dataset: DatasetLike,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    apply_debug_options: bool = True,
    do_memcpy: bool = True,
) -> list[str]:
    """Measure how many elements a second a dataset delivers.

    The result is the text itself; in the original it was an operation. Errors are raised, not returned.

    Args:
        dataset: any dataset that `tr.InfeedQueue` takes.
        number_of_epochs: how many measurements to make.
        elements_per_epochs: elements in each of them.
        print_stats: print the figures of each epoch.
        apply_debug_options: how TensorFlow ran the dataset in the original; without effect.
        do_memcpy: copy every element, as feeding a device would.

    Returns:
        A list with one JSON text.

    Raises:
        IPUValueError: a count is below 1.
        IPUTypeError: `dataset` is not a dataset.
        OutOfRangeError: the dataset ends before the measurement does.
        InvalidArgumentError: an element has a dimension of size 0.

    >>> import json
    >>> import numpy as np
    >>> from tailrace.compat import ipu
    >>> rows = list(np.zeros((8, 2), np.float32))
    >>> [text] = ipu.dataset_benchmark.dataset_benchmark(rows, 2, 4, print_stats=False)
    >>> [epoch["total_bytes_processed"] for epoch in json.loads(text)["epochs"]]
    [32, 32]
    """
    del apply_debug_options
    # Before the engine is asked, whose errors have other classes.
    for name, count in (
        ("number_of_epochs", number_of_epochs),
        ("elements_per_epochs", elements_per_epochs),
    ):
        if count < 1:
            raise IPUValueError(f"{name} must be at least 1. Received: {count}.")
    # By what it can do, not by its class: the engine reads loaders and generators as well.
    if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise IPUTypeError(
            f"Expected `dataset` to be a dataset. Received: {type(dataset).__name__}."
        )
    try:
        text = engine.dataset_benchmark(
            dataset,
            number_of_epochs,
            elements_per_epochs,
            do_memcpy=do_memcpy,
            print_stats=print_stats,
        )
    except DataExhausted as error:
        raise OutOfRangeError(f"The benchmark reached the end of the dataset. {error}") from error
    except DataError as error:
        # The engine has one error for data that cannot be fed; the original names this case apart.
        if "size 0" not in str(error):
            raise
        raise InvalidArgumentError(
            f"Detected a tensor in the dataset with a dimension of size 0. Please remove it from the "
            f"inputs. {error}"
        ) from error
    # As the original's operation has it: a list of one tensor, which a session returns as it is.
    return [ResultText(text)]


def infeed_benchmark(
    infeed_queue: IPUInfeedQueue,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    do_memcpy: bool = True,
) -> list[str]:
    """`dataset_benchmark` of the dataset of an infeed, which need not be initialised.

    Args:
        infeed_queue: the queue.
        number_of_epochs: how many measurements to make.
        elements_per_epochs: elements in each of them.
        print_stats: print the figures of each epoch.
        do_memcpy: copy every element, as feeding a device would.

    Returns:
        A list with one JSON text.

    Raises:
        IPUTypeError: `infeed_queue` is not an IPUInfeedQueue.
        IPUValueError: a count is below 1.
        OutOfRangeError: the dataset ends before the measurement does.

    >>> import json
    >>> import numpy as np
    >>> from tailrace.compat import ipu
    >>> infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(list(np.zeros((4, 2), np.float32)))
    >>> [text] = ipu.dataset_benchmark.infeed_benchmark(infeed, 1, 4, print_stats=False)
    >>> json.loads(text)["epochs"][0]["total_bytes_processed"]
    32
    """
    if not isinstance(infeed_queue, IPUInfeedQueue):
        raise IPUTypeError(
            f"Expected `infeed_queue` to be an IPUInfeedQueue. "
            f"Received: {type(infeed_queue).__name__}."
        )
    return dataset_benchmark(
        infeed_queue.dataset,
        number_of_epochs,
        elements_per_epochs,
        print_stats,
        do_memcpy=do_memcpy,
    )


__getattr__, __dir__ = missing_from(__name__)
