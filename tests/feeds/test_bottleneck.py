"""The verdict: three possible ones, each a number and a sentence."""

import json

import numpy as np
import pytest

from tailrace.errors import DataError, OptionError
from tailrace.feeds.benchmark.measure import dataset_benchmark
from tailrace.feeds.benchmark.verdict import Bottleneck, verdict


def measured(*rates):
    return json.dumps({"epochs": [{"elements_per_second": rate} for rate in rates]})


def test_the_device_is_the_bottleneck():
    got = verdict(measured(41_000), step_time_s=1 / 7_000)
    assert got.bottleneck is Bottleneck.DEVICE
    assert got.bottleneck == "device"
    assert got.ratio == pytest.approx(41 / 7)
    assert str(got) == (
        "The infeed delivers 41,000 elements a second and the device takes 7,000: "
        "the device is the bottleneck, by 5.9 times."
    )


def test_the_data_is_the_bottleneck():
    got = verdict(measured(500), step_time_s=0.001, elements_per_step=2)
    assert got.bottleneck == "data"
    assert (got.dataset_rate, got.device_rate, got.ratio) == (500, 2000, 0.25)
    assert got.sentence == (
        "The infeed delivers 500 elements a second and the device takes 2,000: the data is the "
        "bottleneck, by 4.0 times, and the device waits 75% of the time."
    )


@pytest.mark.parametrize("rate", [95.0, 100.0, 105.0])
def test_neither_is_the_bottleneck_within_a_tenth(rate):
    got = verdict(measured(rate), step_time_s=0.01)
    assert got.bottleneck == "neither"
    assert got.sentence.endswith("they keep pace with each other, and neither is the bottleneck.")


def test_the_median_counts_and_small_and_large_numbers_read_well():
    got = verdict(measured(0.1, 2.5, 900), step_time_s=1000)
    assert got.dataset_rate == 2.5
    assert "delivers 2.5 elements a second and the device takes 0.001" in got.sentence
    assert got.sentence.endswith("by 2,500 times.")


def test_of_a_real_benchmark():
    text = dataset_benchmark([np.zeros(1)] * 10, 2, 5)
    assert verdict(text, step_time_s=10).bottleneck == "device"


@pytest.mark.parametrize("step_time_s", [0, -1.0, float("nan"), float("inf"), None])
def test_bad_step_time(step_time_s):
    with pytest.raises(OptionError, match=r"step_time_s must be .*than 0\. Received: step_time_s="):
        verdict(measured(1), step_time_s=step_time_s)


def test_bad_elements_per_step():
    with pytest.raises(OptionError, match="elements_per_step must be a whole number >= 1"):
        verdict(measured(1), step_time_s=1, elements_per_step=0)


@pytest.mark.parametrize("text", ["", "{}", '{"epochs": []}', "[1]", measured(0), {"epochs": 3}])
def test_bad_json(text):
    with pytest.raises(DataError, match="A verdict needs the JSON that dataset_benchmark returns"):
        verdict(text, step_time_s=1)
