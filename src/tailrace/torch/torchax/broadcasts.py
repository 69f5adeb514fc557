"""Tensors of 16 bits that are broadcast, as biases are: their gradients are sums of 32 bits.

JAX sums the gradient of what it broadcasts in the dtype of the tensor. In 16 bits that loses digits
from a few hundred rows on, where PyTorch sums in 32 bits and rounds once. A cast to 32 bits and back
around the broadcast does the same; compilers take it out of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as functional

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.torch.calls.containers import flatten, rebuild
from tailrace.torch.torchax.results import is_in_place, is_pointwise

aten = torch.ops.aten

_NARROW = (jnp.float16, jnp.bfloat16)


def spread(x: TensorLike, shape: tuple[int, ...]) -> Any:
    """A JAX value in a larger shape; others than those of 16 bits are broadcast where they are used."""
    if x.dtype not in _NARROW or x.shape == shape:
        return x
    return jnp.broadcast_to(x.astype(jnp.float32), shape).astype(x.dtype)


def spread_out(
    func: Callable[..., Any], args: Tree, kwargs: Tree, tensor: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """The arguments of a function of each entry, those of 16 bits in the shape of its result."""
    if not is_pointwise(func) or (isinstance(func, torch._ops.OpOverload) and is_in_place(func)):
        return args, kwargs  # what is written in place is no copy; the operation inside is spread
    traced = [leaf for _, leaf in flatten((args, kwargs)) if hasattr(leaf, "jax")]
    shapes = {tuple(leaf.shape) for leaf in traced}
    # Nothing is broadcast, or nothing is narrow: the usual case, found without reading values.
    if len(shapes) < 2 or not any(leaf.dtype.itemsize == 2 for leaf in traced):
        return args, kwargs
    shape = tuple(torch.broadcast_shapes(*shapes))

    def fit(value: TensorLike) -> Any:
        if not hasattr(value, "jax") or tuple(value.shape) == shape:
            return value
        array = value.jax()
        wide = spread(array, shape)
        # The same object where nothing has changed: others find tensors by identity.
        return value if wide is array else tensor(wide)

    return rebuild((args, kwargs), fit)


def first_spread_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A product that is added to the first argument."""

    def run(x: TensorLike, *factors: Any, **named: Any) -> Any:
        # Of the result, which only the function knows; nothing is computed for it.
        shape = jax.eval_shape(lambda x, *factors: theirs(x, *factors, **named), x, *factors).shape
        return theirs(spread(x, shape), *factors, **named)

    return run


def linear_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A linear layer with a bias."""

    def run(x: TensorLike, weight: TensorLike, bias: TensorLike = None) -> Any:
        # Without its bias, which torchax's would broadcast in 16 bits.
        out = theirs(x, weight)
        return out if bias is None else out + spread(bias, out.shape)

    return run


SPREAD: dict[Any, Callable[..., Any]] = {
    aten.addbmm: first_spread_of,
    aten.addmm: first_spread_of,
    aten.addmv: first_spread_of,
    aten.baddbmm: first_spread_of,
    functional.linear: linear_of,
}
"""Lowerings of torchax that run inside others."""
