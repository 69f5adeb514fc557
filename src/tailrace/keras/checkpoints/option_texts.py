"""The options of a Keras model that decide the bits of its training, in words."""

from __future__ import annotations

import json
from typing import Any

import keras

from tailrace.keras.settings.options import Settings


def option_texts(model: keras.Model, settings: Settings) -> dict[str, str]:
    """Each option that may be another one when a fit is resumed, and then changes its steps."""
    compiled: Any = model.get_compile_config() or {}
    options = settings.options
    numbers = (
        options.gradient_accumulation_reduction_method,
        options.gradient_accumulation_dtype,
        options.pipelining_reduction_method,
        options.pipelining_accumulation_dtype,
    )
    optimizer: Any = keras.optimizers.serialize(model.optimizer)
    # Keras counts names up in a process.
    config = {k: v for k, v in optimizer["config"].items() if k != "name"}
    return {
        "optimizer": str(optimizer["class_name"]),
        **{f"optimizer's {name}": _text(value) for name, value in config.items()},
        "loss": _text(compiled.get("loss")),
        "loss_weights": _text(compiled.get("loss_weights")),
        "accumulation": ", ".join(map(str, numbers)),
    }


def _text(value: Any) -> str:
    """A configuration as text; a part of it without one by its type."""
    return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
