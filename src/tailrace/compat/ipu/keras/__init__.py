"""Keras in the words of the original: the same things as in `tailrace.keras`.

Models made in the scope of an `IPUStrategy` have the setters themselves (`set_pipelining_options` and
its sisters); here is what programs import by name.
"""

from __future__ import annotations

from typing import Any

import tailrace.keras as _tk
from tailrace.compat.ipu.keras import optimizers as optimizers

_NAMES = {
    "PipelineStage": "PipelineStage",
    "ReplicatedMetricReductionMethod": "MetricReduction",
    "Outfeed": "Outfeed",
    "MaybeOutfeed": "MaybeOutfeed",
    "MaybeOutfeedQueue": "MaybeOutfeedQueue",
    "OutfeedCallback": "OutfeedCallback",
    "OutfeedOptimizer": "OutfeedOptimizer",
    "OutfeedOptimizerMode": "OutfeedOptimizerMode",
}
"""The name there, and the one in `tailrace.keras`."""


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(_tk, _NAMES[name])
    raise AttributeError(f"module 'tailrace.compat.ipu.keras' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_NAMES]
