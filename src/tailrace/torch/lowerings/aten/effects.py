"""Operations that a graph keeps for what they do, in order: PyTorch threads a token through them."""

from __future__ import annotations

from typing import Any

import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings.table import LOWERINGS, lowering

aten = torch.ops.aten


@lowering(torch.ops.higher_order.with_effects)
def with_effects(token: Any, operation: torch._ops.OpOverload, *args: Any, **named: Any) -> Any:
    """An operation between two tokens; order needs none here, where nothing has an effect."""
    found = LOWERINGS[operation](*args, **named)
    return (token, *found) if isinstance(found, tuple) else (token, found)


@lowering(aten._linalg_check_errors.default)
def check_errors(info: TensorLike, api_name: str, *, is_matrix: bool) -> None:
    """Whether a matrix could be factored: not known before it runs. What could not is NaN there."""
