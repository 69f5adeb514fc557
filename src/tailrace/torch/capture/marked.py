"""The operation that `tt.identity_loss` is in a captured graph: the identity, to be found again."""

from __future__ import annotations

import torch


@torch.library.custom_op("tailrace::marked_loss", mutates_args=())
def marked_loss(x: torch.Tensor) -> torch.Tensor:
    """The tensor, as the loss."""
    return x.clone()


@marked_loss.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


marked_loss.register_autograd(lambda ctx, gradient: gradient)

OPERATION = torch.ops.tailrace.marked_loss.default
