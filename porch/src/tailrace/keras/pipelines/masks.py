"""Keras' implicit masks, across the boundaries of stages.

A layer such as `Embedding(mask_zero=True)` attaches a mask to the tensor that it returns, and layers,
losses and metrics behind it look there. A boundary makes new tensors: the masks cross it beside the
values, and are attached again. Where Keras keeps them is private; layers may read and set them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tailrace.pipeline.boundary import stage_boundary


class _Reading(keras.layers.Layer):
    """Takes what Keras gives a layer as the mask of its input."""

    def __init__(self) -> None:
        super().__init__(autocast=False, name="tailrace_mask_reading")
        self.supports_masking = True
        self.found: list[Any] = []

    def call(self, value: Any, mask: Any = None) -> Any:
        """Leave the mask behind."""
        self.found = [mask]
        return value


class _Setting(keras.layers.Layer):
    """Returns its input with a mask attached."""

    def __init__(self, mask: Any) -> None:
        super().__init__(autocast=False, name="tailrace_mask_setting")
        self.supports_masking = True
        self.given = [mask]

    def call(self, value: Any) -> Any:
        """The input itself."""
        return value

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """The mask that Keras attaches to the output."""
        del inputs, previous_mask
        return self.given[0]


def mask_of(value: Any) -> Any:
    """The mask attached to a tensor; None if there is none."""
    if not keras.ops.is_tensor(value):
        return None
    reading = _Reading()
    reading(value)
    return reading.found[0]


def with_mask(value: Any, mask: Any) -> Any:
    """A tensor with a mask attached; unchanged if the mask is None."""
    return value if mask is None else _Setting(mask)(value)


def masked_boundary(values: Sequence[Any]) -> list[Any]:
    """End a stage here: the values behind the boundary, each with the mask that it had before."""
    masks = [mask_of(value) for value in values]
    marked, crossed = stage_boundary((list(values), masks))
    return [with_mask(value, mask) for value, mask in zip(marked, crossed, strict=True)]
