"""Functions of PyTorch that run otherwise here than through torchax, because it does less.

Each takes and returns tensors of the forward pass that is being traced. What is wrong in an
operation that many functions consist of is put right in `lowerings` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.torch.torchax.ops.layers import LAYERS
from tailrace.torch.torchax.ops.losses import LOSSES
from tailrace.torch.torchax.ops.tensors import TENSORS

REPLACED: dict[Any, Callable[..., Any]] = {**LAYERS, **LOSSES, **TENSORS}
"""Which functions of PyTorch are replaced, and by what: called with the watch in front. What returns
NotImplemented is not replaced."""
