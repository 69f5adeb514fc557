"""Functions of PyTorch that replace torchax's, which support less.

Each takes and returns tensors of the traced forward pass. Errors in operations that many functions use
are corrected in `environment` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.torch.torchax.ops.layers import LAYERS
from tailrace.torch.torchax.ops.losses import LOSSES
from tailrace.torch.torchax.ops.tensors import TENSORS

REPLACED: dict[Any, Callable[..., Any]] = {**LAYERS, **LOSSES, **TENSORS}
"""The replaced functions of PyTorch, and their replacements, called with the watch as first argument.
If one returns NotImplemented, the original is used."""
