"""Activation functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.originals.missing import missing_from


def gelu(x: TensorLike, approximate: bool = True, name: str | None = None) -> Any:
    """The Gaussian error linear unit.

    Args:
        x: the value.
        approximate: compute it with tanh.
        name: without effect.

    >>> from tailrace.compat import ipu
    >>> ipu.ops.nn_ops.gelu([0.0, 100.0]).tolist()
    [0.0, 100.0]
    """
    del name
    return jax.nn.gelu(as_array(x), approximate)


def hard_sigmoid(x: TensorLike, name: str | None = None) -> Any:
    """0.2 x + 0.5, between 0 and 1, as in the Keras of the original. That of Keras 3 is x/6 + 0.5.

    Args:
        x: the value.
        name: without effect.

    >>> from tailrace.compat import ipu
    >>> ipu.ops.nn_ops.hard_sigmoid([-9.0, 0.0, 9.0]).tolist()
    [0.0, 0.5, 1.0]
    """
    del name
    return jnp.clip(as_array(x) * 0.2 + 0.5, 0, 1)


def swish(x: TensorLike, name: str | None = None) -> Any:
    """x times its sigmoid.

    Args:
        x: the value.
        name: without effect.

    >>> from tailrace.compat import ipu
    >>> ipu.ops.nn_ops.swish([0.0, 100.0]).tolist()
    [0.0, 100.0]
    """
    del name
    return jax.nn.silu(as_array(x))


def softmax(x: TensorLike, stable: bool = False, name: str | None = None) -> Any:
    """The softmax over the last dimension.

    Args:
        x: the value.
        stable: without effect: the stable form is always used.
        name: without effect.

    >>> from tailrace.compat import ipu
    >>> ipu.ops.nn_ops.softmax([1000.0, 1000.0]).tolist()
    [0.5, 0.5]
    """
    del stable, name
    return jax.nn.softmax(as_array(x))


def multi_conv(func: Callable[..., Any] | None = None, options: object = None) -> Any:
    """The function itself: which convolutions run together is up to the compiler here.

    Args:
        func: the function; None to use this as a decorator with arguments.
        options: without effect.

    >>> from tailrace.compat import ipu
    >>> double = ipu.ops.nn_ops.multi_conv(lambda x: x * 2)
    >>> double(4)
    8
    """
    del options
    return (lambda function: function) if func is None else func


__getattr__, __dir__ = missing_from(__name__)
