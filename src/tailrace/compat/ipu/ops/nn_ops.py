"""Activation functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.originals.missing import missing_from
from tailrace.data.array_like import TensorLike


def gelu(x: TensorLike, approximate: bool = True, name: str | None = None) -> Any:
    """The Gaussian error linear unit, by tanh if approximate."""
    del name
    return jax.nn.gelu(as_array(x), approximate)


def hard_sigmoid(x: TensorLike, name: str | None = None) -> Any:
    """0.2 x + 0.5, between 0 and 1, as in the Keras of the original; that of Keras 3 is x/6 + 0.5."""
    del name
    return jnp.clip(as_array(x) * 0.2 + 0.5, 0, 1)


def swish(x: TensorLike, name: str | None = None) -> Any:
    """x times its sigmoid."""
    del name
    return jax.nn.silu(as_array(x))


def softmax(x: TensorLike, stable: bool = False, name: str | None = None) -> Any:
    """The softmax over the last dimension; always the stable form."""
    del stable, name
    return jax.nn.softmax(as_array(x))


def multi_conv(func: Callable[..., Any] | None = None, options: Any = None) -> Any:
    """The function itself: which convolutions run together is the compiler's affair here."""
    del options
    return (lambda function: function) if func is None else func


__getattr__, __dir__ = missing_from(__name__)
