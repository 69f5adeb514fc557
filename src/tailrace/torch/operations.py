"""Functions of PyTorch that run otherwise here than through torchax, because it does less.

Each takes and returns tensors of the forward pass that is being traced. What is wrong in an
operation that many functions consist of is put right in `lowerings` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.torch.layer_functions import LAYERS
from tailrace.torch.loss_functions import LOSSES
from tailrace.torch.tensor_functions import TENSORS

REPLACED: dict[Any, Callable[..., Any]] = {**LAYERS, **LOSSES, **TENSORS}
"""Which functions of PyTorch are replaced, and by what: called with the watch in front. What returns
NotImplemented is not replaced."""
