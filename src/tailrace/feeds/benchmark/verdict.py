"""Whether the data or the device limits a training run, in one sentence."""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tailrace.errors import DataError, OptionError

# Rates within a tenth of each other count as equal: a benchmark is no more repeatable than that.
_EQUAL_WITHIN = 1.1


class Bottleneck(StrEnum):
    """What limits the speed."""

    DATA = "data"
    DEVICE = "device"
    NEITHER = "neither"


@dataclass(frozen=True)
class Verdict:
    """What an infeed delivers, compared with what a device takes; `str()` of it is the sentence."""

    bottleneck: Bottleneck
    ratio: float
    """Elements that the infeed delivers for each one that the device takes. Below 1 the device
    waits, and only this share of its time is used; above 1 the data waits."""
    dataset_rate: float
    """Elements a second that the infeed delivers: the median of the benchmark's epochs."""
    device_rate: float
    """Elements per second that the device consumes."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def verdict(
    benchmark_json: str | Mapping[str, Any], *, step_time_s: float, elements_per_step: int = 1
) -> Verdict:
    """Say whether the data or the device is the bottleneck, and by how much.

    Args:
        benchmark_json: the result of `dataset_benchmark`. The median of its epochs counts, since
            the first one often includes start-up.
        step_time_s: seconds that the device needs for one step when its data is ready.
        elements_per_step: the number of elements a step consumes: microbatches times replicas.

    Returns:
        A `Verdict`, which prints as a sentence.

    >>> measured = {"epochs": [{"elements_per_second": 41_000.0}]}
    >>> print(verdict(measured, step_time_s=1 / 7_000))
    The infeed delivers 41,000 elements a second and the device takes 7,000: the device is the \
bottleneck, by 5.9 times.
    """
    if not (_is_number(step_time_s) and step_time_s > 0):
        raise OptionError(
            f"step_time_s must be greater than 0. Received: step_time_s={step_time_s!r}."
        )
    if not (_is_number(elements_per_step) and elements_per_step >= 1):
        raise OptionError(
            "elements_per_step must be a whole number >= 1. "
            f"Received: elements_per_step={elements_per_step!r}."
        )
    dataset_rate = _median_rate(benchmark_json)
    device_rate = elements_per_step / step_time_s
    ratio = dataset_rate / device_rate
    rates = (
        f"The infeed delivers {_rate(dataset_rate)} elements a second and the device takes "
        f"{_rate(device_rate)}"
    )
    if max(ratio, 1 / ratio) < _EQUAL_WITHIN:
        bottleneck = Bottleneck.NEITHER
        sentence = f"{rates}: they keep pace with each other, and neither is the bottleneck."
    elif ratio > 1:
        bottleneck = Bottleneck.DEVICE
        sentence = f"{rates}: the device is the bottleneck, by {_times(ratio)} times."
    else:
        bottleneck = Bottleneck.DATA
        sentence = (
            f"{rates}: the data is the bottleneck, by {_times(1 / ratio)} times, and the device "
            f"waits {1 - ratio:.0%} of the time."
        )
    return Verdict(bottleneck, ratio, dataset_rate, device_rate, sentence)


def _median_rate(benchmark_json: str | Mapping[str, Any]) -> float:
    try:
        loaded = json.loads(benchmark_json) if isinstance(benchmark_json, str) else benchmark_json
        # The median, not the mean: the first epoch opens the dataset, and a slow one is an accident.
        rate = statistics.median(epoch["elements_per_second"] for epoch in loaded["epochs"])
        # NaN is refused too: it is not greater than 0.
        if not rate > 0:
            raise ValueError
        return rate
    except (ValueError, KeyError, TypeError):
        shown = repr(benchmark_json)
        raise DataError(
            "A verdict needs the JSON that dataset_benchmark returns. "
            f"Received: {shown if len(shown) <= 80 else shown[:77] + '...'}"
        ) from None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _times(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
