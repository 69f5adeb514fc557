"""Activations: computed in 32 bits for 16, with PyTorch's gradient where both sides of a choice
meet."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.lowerings.promotion import as_dtype, in_common_dtype, is_float, wide, widened
from tailrace.torch.lowerings.random_numbers import next_key
from tailrace.torch.lowerings.table import lowering
from tailrace.torch.torchax.ops import elementwise

aten = torch.ops.aten


@lowering(aten.relu.default)
def relu(x: TensorLike) -> Any:
    """A line above 0; the gradient at 0 is 0."""
    # `jax.nn.relu` has the same gradient; NaN stays in both.
    return jax.nn.relu(x)


@lowering(aten.gelu.default)
@widened
def gelu(x: TensorLike, *, approximate: str = "none") -> Any:
    """x times the normal distribution, or its approximation by tanh."""
    if approximate == "none":
        return x * 0.5 * (1 + jax.lax.erf(x * 0.7071067811865476))
    return jax.nn.gelu(x, approximate=True)


@lowering(aten.silu.default)
@widened
def silu(x: TensorLike) -> Any:
    """x sigmoid(x)."""
    return x * jax.nn.sigmoid(x)


@lowering(aten.hardtanh.default)
def hardtanh(x: TensorLike, min_val: float = -1, max_val: float = 1) -> Any:
    """Between two limits; the gradient at a limit is 0."""
    low, high = as_dtype(min_val, x.dtype), as_dtype(max_val, x.dtype)
    if not is_float(x.dtype):
        return jnp.minimum(jnp.maximum(x, low), high)
    return elementwise.hardtanh(x, low, high)


@lowering(aten.relu6.default)
def relu6(x: TensorLike) -> Any:
    """Between 0 and 6."""
    return hardtanh(x, 0, 6)


@lowering(aten.leaky_relu.default)
@widened
def leaky_relu(x: TensorLike, negative_slope: float = 0.01) -> Any:
    """A line above 0, and a flatter one below."""
    return elementwise.leaky_relu(x, negative_slope)


@lowering(aten.elu.default)
@widened
def elu(x: TensorLike, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    """Exponential below 0, a line above."""
    return elementwise.elu(x, alpha, scale, input_scale)


@lowering(aten.celu.default)
@widened
def celu(x: TensorLike, alpha: float = 1) -> Any:
    """An ELU that is smooth for every alpha."""
    return elementwise.celu(x, alpha)


@lowering(aten.selu.default)
@widened
def selu(x: TensorLike) -> Any:
    """An ELU that keeps mean and variance."""
    return elementwise.selu(x)


@lowering(aten.softplus.default)
@widened
def softplus(x: TensorLike, beta: float = 1, threshold: float = 20) -> Any:
    """A smooth line above 0."""
    return elementwise.softplus(x, beta, threshold)


@lowering(aten.mish.default)
@widened
def mish(x: TensorLike) -> Any:
    """x tanh(softplus(x))."""
    return elementwise.mish(x)


@lowering(aten.hardsigmoid.default)
@widened
def hardsigmoid(x: TensorLike) -> Any:
    """A line between -3 and 3, flat elsewhere."""
    return elementwise.hardsigmoid(x)


@lowering(aten.hardswish.default)
@widened
def hardswish(x: TensorLike) -> Any:
    """x hardsigmoid(x)."""
    return elementwise.hardswish(x)


@lowering(aten.log_sigmoid_forward.default)
@widened
def log_sigmoid(x: TensorLike) -> tuple[Any, Any]:
    """The value, and a residual of PyTorch's that is empty here."""
    return jax.nn.log_sigmoid(x), jnp.zeros((0,), x.dtype)


@lowering(aten.threshold.default)
def threshold(x: TensorLike, threshold: float, value: float) -> Any:
    """A number in place of what is not above a limit."""
    return jnp.where(x > as_dtype(threshold, x.dtype), x, as_dtype(value, x.dtype))


@lowering(aten.hardshrink.default)
def hardshrink(x: TensorLike, lambd: float = 0.5) -> Any:
    """0 where the absolute value is small."""
    limit = as_dtype(lambd, x.dtype)
    return jnp.where((x >= -limit) & (x <= limit), jnp.zeros((), x.dtype), x)


@lowering(aten.softshrink.default)
def softshrink(x: TensorLike, lambd: float = 0.5) -> Any:
    """Moved towards 0, and 0 where that is near."""
    limit = as_dtype(lambd, x.dtype)
    moved = jnp.where(x > limit, x - limit, jnp.where(x < -limit, x + limit, x * 0))
    return moved.astype(x.dtype)


@lowering(aten._prelu_kernel.default)
def prelu(x: TensorLike, weight: TensorLike) -> Any:
    """A line above 0, and below one of a slope that is learned."""
    (x, weight), dtype = in_common_dtype(x, weight)
    return jnp.where(x > 0, x, x * weight).astype(dtype)


@lowering(aten.rrelu_with_noise_functional.default)
@widened
def rrelu(
    x: TensorLike,
    noise: TensorLike,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: object = None,
) -> tuple[Any, Any]:
    """A line above 0, and below one of a slope of chance in training, otherwise the mean one."""
    if not training:
        return jnp.where(x > 0, x, x * ((lower + upper) / 2)), noise
    slopes = jax.random.uniform(next_key(), x.shape, x.dtype, lower, upper)
    slopes = jnp.where(x > 0, 1, slopes)
    return x * slopes, slopes


def _exponentials(x: TensorLike, dim: int) -> tuple[Any, Any]:
    return (x.reshape(1), 0) if not x.ndim else (x, dim)


@lowering(aten._softmax.default)
def softmax(x: TensorLike, dim: int, half_to_float: bool = False) -> Any:
    """Exponentials as shares of their sum."""
    shape, dtype = x.shape, jnp.dtype(jnp.float32) if half_to_float else x.dtype
    x, dim = _exponentials(as_dtype(x, wide(x.dtype)), dim)
    return jax.nn.softmax(x, dim).reshape(shape).astype(dtype)


@lowering(aten._safe_softmax.default)
def safe_softmax(x: TensorLike, dim: int, dtype: torch.dtype | None = None) -> Any:
    """A softmax that is 0 for rows of -inf, which would give NaN."""
    x = x if dtype is None else as_dtype(x, dtype_on_device(dtype))
    nothing = jnp.isneginf(x).all(dim, keepdims=True)
    # Replaced before the softmax too: both sides of a `where` are differentiated.
    found = softmax(jnp.where(nothing, jnp.zeros((), x.dtype), x), dim)
    return jnp.where(nothing, jnp.zeros((), x.dtype), found)


@lowering(aten._log_softmax.default)
def log_softmax(x: TensorLike, dim: int, half_to_float: bool = False) -> Any:
    """The logarithm of a softmax."""
    shape, dtype = x.shape, jnp.dtype(jnp.float32) if half_to_float else x.dtype
    x, dim = _exponentials(as_dtype(x, wide(x.dtype)), dim)
    return jax.nn.log_softmax(x, dim).reshape(shape).astype(dtype)


@lowering(aten.glu.default)
@widened
def glu(x: TensorLike, dim: int = -1) -> Any:
    """One half times the sigmoid of the other."""
    first, second = jnp.split(x, 2, dim)
    return first * jax.nn.sigmoid(second)
