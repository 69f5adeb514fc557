"""`torch.autocast` in a forward pass that is traced: products in 16 bits, sensitive functions in 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tailrace.data.trees import Tree
from tailrace.torch.calls.containers import rebuild
from tailrace.torch.tracing.losses import LOSS_FUNCTIONS

NARROW = frozenset(
    {
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
        torch.einsum,
        torch.matmul,
        torch.mm,
        torch.mv,
        torch.Tensor.__matmul__,
        torch.Tensor.__rmatmul__,
        torch.Tensor.bmm,
        torch.Tensor.matmul,
        torch.Tensor.mm,
        functional.bilinear,
        functional.conv1d,
        functional.conv2d,
        functional.conv3d,
        functional.conv_transpose1d,
        functional.conv_transpose2d,
        functional.conv_transpose3d,
        functional.linear,
        functional.scaled_dot_product_attention,
    }
)
"""Products: in the dtype of the autocast."""

WIDE = LOSS_FUNCTIONS | {
    torch.cumsum,
    torch.exp,
    torch.log,
    torch.log_softmax,
    torch.norm,
    torch.softmax,
    torch.Tensor.log_softmax,
    torch.Tensor.softmax,
    functional.cosine_similarity,
    functional.group_norm,
    functional.layer_norm,
    functional.log_softmax,
    functional.normalize,
    functional.softmax,
}
"""What loses too much in 16 bits: in float32."""


def current_dtype() -> torch.dtype | None:
    """The dtype of the autocast that is in force; None without one."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def cast_arguments(func: Callable[..., Any], args: Tree, kwargs: Tree) -> tuple[Any, Any]:
    """The arguments of a function in the dtype that the autocast in force gives it."""
    narrow = current_dtype()
    if narrow is None or func not in NARROW | WIDE:
        return args, kwargs
    dtype = narrow if func in NARROW else torch.float32

    def cast(value: object) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
            return value.to(dtype)
        return value

    return rebuild(args, cast), rebuild(kwargs, cast)
