"""Keras' implicit masks, across the boundaries of stages.

A layer such as `Embedding(mask_zero=True)` attaches a mask to its output, and later layers, losses and
metrics read it there. A boundary creates new tensors: masks cross it with the values, and are attached
again. Keras' storage of masks is private, but layers may read and set them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.pipeline.boundary import stage_boundary


class _Reading(keras.layers.Layer):
    """Records the mask that Keras passes to a layer for its input."""

    def __init__(self) -> None:
        super().__init__(autocast=False, name="tailrace_mask_reading")
        self.supports_masking = True
        self.found: list[Any] = []

    def call(self, value: object, mask: TensorLike = None) -> Any:
        """Record the mask."""
        self.found = [mask]
        return value


class _Setting(keras.layers.Layer):
    """Returns its input with a mask attached."""

    def __init__(self, mask: TensorLike) -> None:
        super().__init__(autocast=False, name="tailrace_mask_setting")
        self.supports_masking = True
        # In a list: Keras would track an array that is set as an attribute.
        self.given = [mask]

    def call(self, value: object) -> Any:
        """The input itself."""
        return value

    def compute_mask(self, inputs: Tree, previous_mask: TensorLike) -> Any:
        """The mask that Keras attaches to the output."""
        del inputs, previous_mask
        return self.given[0]


def mask_of(value: object) -> Any:
    """The mask attached to a tensor; None if there is none."""
    if not keras.ops.is_tensor(value):
        return None
    # A new layer for each: one layer for all would keep the nodes of all its calls.
    reading = _Reading()
    reading(value)
    return reading.found[0]


def with_mask(value: object, mask: TensorLike) -> Any:
    """A tensor with a mask attached; unchanged if the mask is None."""
    return value if mask is None else _Setting(mask)(value)


def masked_boundary(values: Sequence[Any]) -> list[Any]:
    """End a stage: the values after the boundary, each with its mask."""
    # Before the boundary: afterwards the tensors are others, without masks.
    masks = [mask_of(value) for value in values]
    marked, crossed = stage_boundary((list(values), masks))
    return [with_mask(value, mask) for value, mask in zip(marked, crossed, strict=True)]
