"""The dataset benchmark in the original's words."""

import json

import numpy as np
import pytest
from counting import Inc

from tailrace.compat import ipu
from tailrace.compat.ipu.dataset_benchmark import dataset_benchmark, infeed_benchmark
from tailrace.compat.ipu.ipu_infeed_queue import IPUInfeedQueue


def epochs_of(found):
    assert len(found) == 1
    assert list(json.loads(found[0])) == ["epochs"]
    return json.loads(found[0])["epochs"]


def test_ten_epochs_of_a_thousand_elements():
    found = epochs_of(dataset_benchmark(Inc(10, (4, 4)), 10, 1000, print_stats=False))
    assert len(found) == 10
    for epoch in found:
        assert epoch["elements_processed"] == 1000
        assert epoch["total_bytes_processed"] == 1000 * 64
        assert all(value > 0 for value in epoch.values())


def test_through_an_infeed_that_is_not_initialised():
    queue = IPUInfeedQueue(Inc(10, (4, 4)))
    assert len(epochs_of(infeed_benchmark(queue, 5, 256, print_stats=False))) == 5


def test_rules():
    with pytest.raises(ValueError, match="number_of_epochs must be at least 1"):
        dataset_benchmark(Inc(3), 0, 1)
    with pytest.raises(ValueError, match="elements_per_epochs must be at least 1"):
        dataset_benchmark(Inc(3), 1, 0)
    with pytest.raises(TypeError, match="Expected `dataset` to be a dataset"):
        dataset_benchmark(3, 1, 1)
    with pytest.raises(TypeError, match="Expected `infeed_queue` to be an IPUInfeedQueue"):
        infeed_benchmark(Inc(3), 1, 1)
    with pytest.raises(ipu.errors.OutOfRangeError, match="reached the end of the dataset"):
        dataset_benchmark(Inc(3, repeat=False), 1, 4)
    with pytest.raises(
        ipu.errors.InvalidArgumentError,
        match="Detected a tensor in the dataset with a dimension of size 0. Please remove it",
    ):
        dataset_benchmark([np.zeros((0, 2), np.float32)], 1, 1)
