"""Arithmetic of two arrays or numbers, and comparisons, in PyTorch's common dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings.promotion import (
    BOOL,
    as_dtype,
    common_dtype,
    in_common_dtype,
    in_wide_dtype,
    is_complex,
    is_float,
    is_inexact,
    wide,
)
from tailrace.torch.lowerings.table import lowering
from tailrace.torch.torchax.ops import compositions, elementwise

aten = torch.ops.aten


def _exact(value: Any, dtype: Any) -> bool:
    """Whether a number is what a 16-bit dtype makes of it: then there is nothing to widen."""
    return not isinstance(value, float | complex) or complex(as_dtype(value, dtype)) == complex(
        value
    )


def _numbers_wide(*values: TensorLike) -> tuple[list[Any], Any]:
    """The values in their common dtype; in 32 bits where a number would be rounded to 16 before."""
    dtype = common_dtype(*values)
    if wide(dtype) != dtype and not all(_exact(value, dtype) for value in values):
        return in_wide_dtype(*values)
    return in_common_dtype(*values)


def _sum(x: TensorLike, other: TensorLike, factor: complex) -> Any:
    if isinstance(factor, bool) or factor == 1:
        (x, other), dtype = _numbers_wide(x, other)
        return (jnp.logical_or(x, other) if dtype == BOOL else x + other).astype(dtype)
    (x, other), dtype = in_wide_dtype(x, other)
    return (x + other * as_dtype(factor, x.dtype)).astype(dtype)


@lowering(aten.add.Tensor, aten.add.Scalar)
def add(x: TensorLike, other: TensorLike, alpha: complex = 1) -> Any:
    """A sum, the second operand times `alpha`."""
    return _sum(x, other, alpha)


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def sub(x: TensorLike, other: TensorLike, alpha: complex = 1) -> Any:
    """A difference, the second operand times `alpha`."""
    if alpha == 1:
        (x, other), dtype = _numbers_wide(x, other)
        return (x - other).astype(dtype)
    return _sum(x, other, -alpha)


@lowering(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(x: TensorLike, other: TensorLike, alpha: complex = 1) -> Any:
    """A difference with the operands exchanged."""
    if alpha == 1:
        return sub(other, x)
    (x, other), dtype = in_wide_dtype(x, other)
    return (other - x * as_dtype(alpha, x.dtype)).astype(dtype)


@lowering(aten.mul.Tensor, aten.mul.Scalar)
def mul(x: TensorLike, other: TensorLike) -> Any:
    """A product."""
    (x, other), dtype = _numbers_wide(x, other)
    return (jnp.logical_and(x, other) if dtype == BOOL else x * other).astype(dtype)


@lowering(aten.div.Tensor, aten.div.Scalar)
def div(x: TensorLike, other: TensorLike) -> Any:
    """A quotient; that of whole numbers is a float."""
    (x, other), dtype = in_wide_dtype(x, other, floats=True)
    return (x / other).astype(dtype)


@lowering(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_rounded(x: TensorLike, other: TensorLike, *, rounding_mode: str | None = None) -> Any:
    """A quotient, rounded towards 0 or downwards; whole numbers stay whole."""
    if rounding_mode is None:
        return div(x, other)
    (x, other), dtype = in_wide_dtype(x, other)
    if not is_float(dtype):
        # A division of whole numbers by 0 fails in PyTorch; here it has no meaning.
        safe = jnp.where(other == 0, jnp.ones_like(other), other)
        quotient = (
            jax.lax.div(*jnp.broadcast_arrays(x, safe)) if rounding_mode == "trunc" else x // safe
        )
        return quotient.astype(dtype)
    if rounding_mode == "trunc":
        return jnp.trunc(x / other).astype(dtype)
    return _floored(*jnp.broadcast_arrays(x, other)).astype(dtype)


def _floored(x: TensorLike, other: TensorLike) -> Any:
    """By the remainder, which is exact; a rounded quotient may have reached the next whole number."""
    x, other = jax.lax.stop_gradient((x, other))  # piecewise constant
    rest = jnp.fmod(x, other)
    quotient = (x - rest) / other
    quotient = quotient - ((rest != 0) & ((other < 0) != (rest < 0)))
    below = jnp.floor(quotient)
    found = below + (quotient - below > 0.5)
    found = jnp.where(quotient == 0, jnp.copysign(0.0, x / other).astype(x.dtype), found)
    return jnp.where(other == 0, x / other, found)


@lowering(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(x: TensorLike, other: TensorLike) -> Any:
    """A quotient rounded downwards."""
    return div_rounded(x, other, rounding_mode="floor")


@lowering(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(x: TensorLike, other: TensorLike) -> Any:
    """What is left of a division towards 0."""
    (x, other), dtype = in_wide_dtype(x, other)
    return elementwise.fmod(x, other).astype(dtype)


@lowering(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(x: TensorLike, other: TensorLike) -> Any:
    """What is left of a division downwards."""
    (x, other), dtype = in_wide_dtype(x, other)
    return elementwise.remainder(*jnp.broadcast_arrays(x, other)).astype(dtype)


_power = elementwise.power_of(jnp.power)


@lowering(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar)
def power(x: TensorLike, exponent: TensorLike) -> Any:
    """A power; a whole exponent of a Python number multiplies."""
    dtype = common_dtype(x, exponent)
    if is_inexact(dtype) and isinstance(exponent, int | float):
        return _powered(as_dtype(x, wide(dtype)), exponent).astype(dtype)
    if dtype == BOOL:
        return jnp.logical_or(jnp.asarray(x, bool), ~jnp.asarray(exponent, bool))
    if isinstance(exponent, int) and not isinstance(exponent, bool):
        return _power(as_dtype(x, dtype), exponent).astype(dtype)
    (x, exponent), _ = in_wide_dtype(x, exponent)
    if is_complex(dtype):
        return jnp.power(x, exponent)
    return _power(jnp.asarray(x), jnp.asarray(exponent)).astype(dtype)


def _powered(x: TensorLike, exponent: float) -> Any:
    if exponent == 0:
        return jnp.ones_like(x)
    if float(exponent).is_integer() and abs(exponent) <= 1024:
        return jax.lax.integer_pow(x, int(exponent))
    if exponent == 0.5 and is_float(x.dtype):
        return jnp.sqrt(x)
    if exponent == -0.5 and is_float(x.dtype):
        return jax.lax.rsqrt(x)
    return jnp.power(x, as_dtype(exponent, x.dtype))


def _compared(compare: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: TensorLike, other: TensorLike) -> Any:
        return compare(*in_common_dtype(x, other)[0])

    return run


def _by_order(found: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: TensorLike, other: TensorLike) -> Any:
        (x, other), dtype = in_common_dtype(x, other)
        return found(x, other).astype(dtype)

    return run


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _compare = {
        "eq": jnp.equal,
        "ne": jnp.not_equal,
        "lt": jnp.less,
        "le": jnp.less_equal,
        "gt": jnp.greater,
        "ge": jnp.greater_equal,
    }[_name]
    _packet = getattr(aten, _name)
    lowering(_packet.Tensor, _packet.Scalar)(_compared(_compare))


lowering(aten.maximum.default)(_by_order(jnp.maximum))
lowering(aten.minimum.default)(_by_order(jnp.minimum))


@lowering(aten.fmax.default)
def fmax(x: TensorLike, other: TensorLike) -> Any:
    """The larger of two numbers, of which one may be NaN; of two equal ones the first has the
    gradient."""
    (x, other), dtype = in_common_dtype(x, other)
    x, other = jnp.broadcast_arrays(x, other)
    return jnp.where((x >= other) | (other != other), x, other).astype(dtype)


@lowering(aten.fmin.default)
def fmin(x: TensorLike, other: TensorLike) -> Any:
    """The smaller of two numbers, of which one may be NaN; of two equal ones the first has the
    gradient."""
    (x, other), dtype = in_common_dtype(x, other)
    x, other = jnp.broadcast_arrays(x, other)
    return jnp.where((x <= other) | (other != other), x, other).astype(dtype)


def _of_bits(whole: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: TensorLike, other: TensorLike) -> Any:
        (x, other), dtype = in_common_dtype(x, other)
        return whole(x, other).astype(dtype)

    return run


for _packet, _function in (
    (aten.bitwise_and, jnp.bitwise_and),
    (aten.bitwise_or, jnp.bitwise_or),
    (aten.bitwise_xor, jnp.bitwise_xor),
):
    lowering(_packet.Tensor, _packet.Scalar, _packet.Scalar_Tensor)(_of_bits(_function))


def _shifted(x: TensorLike, other: TensorLike, left: bool) -> Any:
    (x, other), dtype = in_common_dtype(x, other)
    bits = jnp.iinfo(dtype).bits
    # Beyond the width PyTorch has 0, or the sign on the right.
    beyond = (other < 0) | (other >= bits)
    safe = jnp.where(beyond, 0, other)
    if left:
        return jnp.where(beyond, 0, jnp.left_shift(x, safe)).astype(dtype)
    return jnp.right_shift(x, jnp.where(beyond, bits - 1, other)).astype(dtype)


@lowering(
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.__lshift__.Scalar,
    aten.__lshift__.Tensor,
)
def shift_left(x: TensorLike, other: TensorLike) -> Any:
    """Bits moved to the left."""
    return _shifted(x, other, True)


@lowering(
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.__rshift__.Scalar,
    aten.__rshift__.Tensor,
)
def shift_right(x: TensorLike, other: TensorLike) -> Any:
    """Bits moved to the right."""
    return _shifted(x, other, False)


def _truths(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*values: TensorLike) -> Any:
        return function(*(value if value.dtype == bool else value != 0 for value in values))

    return run


lowering(aten.logical_and.default)(_truths(jnp.logical_and))
lowering(aten.logical_or.default)(_truths(jnp.logical_or))
lowering(aten.logical_xor.default)(_truths(jnp.logical_xor))
lowering(aten.logical_not.default)(_truths(jnp.logical_not))


def _of_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: TensorLike, other: TensorLike) -> Any:
        (x, other), dtype = in_wide_dtype(x, other, floats=True)
        return function(*jnp.broadcast_arrays(x, other)).astype(dtype)

    return run


lowering(aten.atan2.default)(_of_floats(elementwise.angle))
lowering(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)(
    _of_floats(elementwise.entropy)
)
lowering(aten.hypot.default)(_of_floats(jnp.hypot))
lowering(aten.logaddexp.default)(_of_floats(jnp.logaddexp))
lowering(aten.logaddexp2.default)(_of_floats(jnp.logaddexp2))
lowering(aten.copysign.Tensor, aten.copysign.Scalar)(_of_floats(jnp.copysign))


@lowering(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(condition: TensorLike, x: TensorLike, other: TensorLike) -> Any:
    """A choice between two."""
    (x, other), _ = in_common_dtype(x, other)
    condition = condition if condition.dtype == bool else condition != 0
    return jnp.where(condition, x, other)


@lowering(aten.addcmul.default)
def addcmul(x: TensorLike, one: TensorLike, other: TensorLike, *, value: complex = 1) -> Any:
    """A sum with a product."""
    (x, one, other), dtype = in_wide_dtype(x, one, other)
    return (x + as_dtype(value, x.dtype) * one * other).astype(dtype)


@lowering(aten.addcdiv.default)
def addcdiv(x: TensorLike, one: TensorLike, other: TensorLike, *, value: complex = 1) -> Any:
    """A sum with a quotient."""
    (x, one, other), dtype = in_wide_dtype(x, one, other)
    return (x + as_dtype(value, x.dtype) * one / other).astype(dtype)


@lowering(aten.lerp.Tensor, aten.lerp.Scalar)
def lerp(x: TensorLike, end: TensorLike, weight: TensorLike) -> Any:
    """A point between two; the formula is that of the nearer end, as in PyTorch."""
    (x, end), dtype = in_wide_dtype(x, end)
    weight = as_dtype(weight, x.dtype)
    near = x + weight * (end - x)
    return jnp.where(jnp.abs(weight) < 0.5, near, end - (end - x) * (1 - weight)).astype(dtype)


@lowering(aten.gcd.default)
def gcd(x: TensorLike, other: TensorLike) -> Any:
    """The greatest common divisor."""
    (x, other), dtype = in_common_dtype(x, other)
    return jnp.gcd(x, other).astype(dtype)


@lowering(aten.ldexp.Tensor)
def ldexp(x: TensorLike, other: TensorLike) -> Any:
    """A number times a power of 2."""
    return mul(x, power(2.0, other))


lowering(aten.nextafter.default)(
    lambda x, other: compositions.COMPOSITIONS[aten.nextafter.default](
        *in_common_dtype(x, other)[0]
    )
)
