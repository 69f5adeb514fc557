"""Attention of a traced forward pass, whose random numbers are the environment's."""

from __future__ import annotations

from typing import Any

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings import attention
from tailrace.torch.torchax.env import Env


def attend(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    attn_mask: TensorLike = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    env: Env,
) -> Any:
    """Attention of arrays [..., heads, rows, features]."""
    return attention.attend(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        next_key=env.get_and_rotate_prng_key,
    )
