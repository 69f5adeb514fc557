"""Elementwise operations with PyTorch's gradient, also where a plain formula gives NaN.

JAX differentiates both sides of a `where`: an exponential that overflows on the side that is not
selected makes the gradient NaN. So each side computes only with its own inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import TensorLike


def absolute(x: TensorLike) -> Any:
    """The absolute value, with gradient 0 at 0; JAX's is 1 there."""
    size = jnp.abs(x)
    return jnp.where(x == 0, 0, size) if jnp.issubdtype(x.dtype, jnp.inexact) else size


def softplus(x: TensorLike, beta: float = 1, threshold: float = 20) -> Any:
    """A line where x is large, as in PyTorch."""
    # Beyond the threshold it is exactly a line, and its gradient exactly 1.
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


def elu(x: TensorLike, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    """Exponential below 0, a line above."""
    # The exponential sees no large number, whose slope of infinity times 0 would be NaN.
    below = jnp.where(x > 0, 0, x)
    return jnp.where(x > 0, scale * x, alpha * scale * jnp.expm1(below * input_scale))


def celu(x: TensorLike, alpha: float = 1) -> Any:
    """An ELU that is smooth for every alpha."""
    return elu(x, alpha, 1, 1 / alpha)


def selu(x: TensorLike) -> Any:
    """An ELU with the constants that keep mean and variance."""
    return elu(x, 1.6732632423543772, 1.0507009873554805)


def mish(x: TensorLike) -> Any:
    """x tanh(softplus(x))."""
    return x * jnp.tanh(jax.nn.softplus(x))


def log_sigmoid(x: TensorLike) -> tuple[Any, Any]:
    """The value, and PyTorch's residual for its backward pass, which is not used here."""
    return jax.nn.log_sigmoid(x), jnp.zeros(x.shape, x.dtype)


def clamp(x: TensorLike, min: TensorLike = None, max: TensorLike = None) -> Any:
    """Between two limits; the gradient at a limit is 1."""
    # Not `jnp.clip`, which shares the gradient at a limit between entry and limit.
    if min is not None:
        x = jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


def clamp_max(x: TensorLike, max: TensorLike) -> Any:
    """Not above a limit."""
    return clamp(x, None, max)


def hardtanh(x: TensorLike, min_val: float = -1, max_val: float = 1) -> Any:
    """Between two limits; the gradient at a limit is 0."""
    inside = (x > min_val) & (x < max_val)
    return jnp.where(inside, x, jax.lax.stop_gradient(clamp(x, min_val, max_val)))


def hardsigmoid(x: TensorLike) -> Any:
    """A line between -3 and 3, flat elsewhere."""
    return hardtanh(x + 3, 0, 6) / 6


def hardswish(x: TensorLike) -> Any:
    """x hardsigmoid(x)."""
    return x * hardsigmoid(x)


def leaky_relu(x: TensorLike, negative_slope: float = 0.01) -> Any:
    """A line above 0, and a flatter one below; the gradient at 0 is the flatter one's."""
    return jnp.where(x > 0, x, x * negative_slope)


def fmod(x: TensorLike, other: TensorLike) -> Any:
    """What is left of a division towards 0; exact, as the quotient is not."""
    return jnp.fmod(x, other)


@jax.custom_jvp
def _left(x: TensorLike, other: TensorLike) -> Any:
    return jnp.remainder(x, other)


@_left.defjvp
def _left_jvp(given: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """As PyTorch's: the quotient without its rest. One in floats may be rounded past a whole number."""
    left = _left(*given)
    return left, tangents[0] - jnp.round((given[0] - left) / given[1]) * tangents[1]


def remainder(x: TensorLike, other: TensorLike) -> Any:
    """What is left of a division towards minus infinity."""
    dtype = jnp.result_type(x, other)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.remainder(x, other)
    return _left(jnp.asarray(x, dtype), jnp.asarray(other, dtype))


@jax.custom_jvp
def _angle(y: TensorLike, x: TensorLike) -> Any:
    return jnp.arctan2(y, x)


@_angle.defjvp
def _angle_jvp(given: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """As PyTorch's: 0 where both are 0."""
    y, x = given
    square = y * y + x * x
    nowhere = square == 0
    turn = (x * tangents[0] - y * tangents[1]) / jnp.where(nowhere, 1, square)
    return _angle(y, x), jnp.where(nowhere, 0, turn)


def angle(y: TensorLike, x: TensorLike) -> Any:
    """The angle of a point."""
    return _angle(*jnp.broadcast_arrays(*_as_floats(y, x)))


@jax.custom_jvp
def _entropy(x: TensorLike, y: TensorLike) -> Any:
    return jax.scipy.special.xlogy(x, y)


@_entropy.defjvp
def _entropy_jvp(given: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """As PyTorch's: 0 with regard to x where x is 0 and the logarithm is of 0."""
    x, y = given
    ends = (x == 0) & (y <= 0)
    slope = jnp.where(ends, 0, jnp.log(jnp.where(ends, 1, y)))
    return _entropy(x, y), slope * tangents[0] + x / y * tangents[1]


def entropy(x: TensorLike, y: TensorLike) -> Any:
    """x log(y), 0 where x is 0."""
    return _entropy(*jnp.broadcast_arrays(*_as_floats(x, y)))


def _as_floats(*values: Any) -> list[Any]:
    dtype = jnp.result_type(*values)
    dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(jnp.float32)
    return [jnp.asarray(value, dtype) for value in values]


def logit(x: TensorLike, eps: float | None = None) -> Any:
    """The inverse of a sigmoid, between two limits."""
    x = x if eps is None else clamp(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


def bessel_i0(x: TensorLike) -> Any:
    """An even function, flat at 0; JAX's formula is of the absolute value."""
    return jnp.exp(absolute(x)) * jax.scipy.special.i0e(x)


@jax.custom_jvp
def _power(x: TensorLike, exponent: TensorLike) -> Any:
    return jnp.power(x, exponent)


@_power.defjvp
def _power_jvp(given: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """As PyTorch's: 0 with regard to x where the exponent is 0, and to the exponent where x is 0."""
    x, exponent = given
    found = _power(x, exponent)
    flat, ends = exponent == 0, (x == 0) & (exponent >= 0)
    slope = jnp.where(flat, 0, exponent * jnp.power(jnp.where(flat, 1, x), exponent - 1))
    growth = jnp.where(ends, 0, found * jnp.log(jnp.where(ends, 1, x)))
    return found, slope * tangents[0] + growth * tangents[1]


def _has_slope(*values: Any) -> bool:
    return all(jnp.issubdtype(value.dtype, jnp.floating) for value in values)


def power_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A power; of whole numbers by multiplication, because floats have not all of them."""

    def run(x: TensorLike, exponent: TensorLike) -> Any:
        if hasattr(x, "dtype") and hasattr(exponent, "dtype") and _has_slope(x, exponent):
            return _power(*jnp.broadcast_arrays(*_as_floats(x, exponent)))
        if not hasattr(exponent, "dtype") and exponent == 0:
            x = jnp.ones_like(x)  # flat, also at 0, where the slope of a power is not
        if not (_is_whole(x) and _is_whole(exponent)):
            return theirs(x, exponent)
        if isinstance(exponent, int):  # one below 0 is refused by PyTorch, and before
            return jax.lax.integer_pow(jnp.int32(x), exponent)
        bits = jnp.iinfo(exponent.dtype).bits
        base, exponent = jnp.broadcast_arrays(jnp.int32(x), jnp.int32(exponent))
        ones = jnp.where((base == 1) | ((base == -1) & (exponent % 2 == 0)), 1, 0)
        below = jnp.where((base == -1) & (exponent % 2 == 1), -1, ones)  # 1 / x, towards 0
        return jnp.where(exponent < 0, below, _multiplied(base, exponent, bits))

    return run


def _multiplied(base: jax.Array, exponent: jax.Array, bits: int) -> jax.Array:
    """A power by squares, with what overflows cut off; JAX's own looks at six bits of an exponent."""
    found = jnp.ones_like(base)
    for bit in range(min(bits, 31)):
        found = jnp.where((exponent >> bit) & 1 == 1, found * base, found)
        base = base * base
    return found


def _is_whole(value: object) -> bool:
    dtype = getattr(value, "dtype", None)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number if dtype is None else jnp.issubdtype(dtype, jnp.integer)
