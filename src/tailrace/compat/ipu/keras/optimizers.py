"""Optimizers around Keras' optimizers, for models that are trained by `fit`."""

from __future__ import annotations

from typing import Any

import tailrace.keras as _tk

_NAMES = ("CrossReplicaOptimizer", "GradientAccumulationOptimizer", "MapGradientOptimizer")


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(_tk, name)
    raise AttributeError(f"module 'tailrace.compat.ipu.keras.optimizers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_NAMES]
