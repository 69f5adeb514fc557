"""Elementwise functions of one array, with PyTorch's dtypes and its gradients at the edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import TensorLike
from tailrace.torch.lowerings.promotion import (
    as_dtype,
    common_dtype,
    default_float,
    in_wide_dtype,
    is_complex,
    is_inexact,
    wide,
)
from tailrace.torch.lowerings.table import lowering
from tailrace.torch.torchax.ops import compositions, elementwise, special_functions

aten = torch.ops.aten


def _of_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    """In 32 bits for 16, and of whole numbers as floats."""

    def run(x: TensorLike, *args: Any, **named: Any) -> Any:
        dtype = x.dtype if is_inexact(x.dtype) else default_float()
        found = function(as_dtype(x, wide(dtype)), *args, **named)
        return found.astype(dtype)

    return run


for _packet, _function in {
    aten.acos: jnp.arccos,
    aten.acosh: jnp.arccosh,
    aten.asin: jnp.arcsin,
    aten.asinh: jnp.arcsinh,
    aten.atan: jnp.arctan,
    aten.atanh: jnp.arctanh,
    aten.cos: jnp.cos,
    aten.cosh: jnp.cosh,
    aten.erf: jax.lax.erf,
    aten.erfc: jax.lax.erfc,
    aten.erfinv: jax.lax.erf_inv,
    aten.exp: jnp.exp,
    aten.exp2: jnp.exp2,
    aten.expm1: jnp.expm1,
    aten.lgamma: jax.lax.lgamma,
    aten.digamma: compositions.COMPOSITIONS[aten.digamma.default],
    aten.i0: elementwise.bessel_i0,
    aten.log: jnp.log,
    aten.log10: jnp.log10,
    aten.log1p: jnp.log1p,
    aten.log2: jnp.log2,
    aten.logit: elementwise.logit,
    aten.reciprocal: jnp.reciprocal,
    aten.rsqrt: jax.lax.rsqrt,
    aten.sigmoid: jax.nn.sigmoid,
    aten.sin: jnp.sin,
    aten.sinc: jnp.sinc,
    aten.sinh: jnp.sinh,
    aten.sqrt: jnp.sqrt,
    aten.tan: jnp.tan,
    aten.tanh: jnp.tanh,
}.items():
    lowering(_packet.default)(_of_floats(_function))

for _packet, _function in {
    aten.special_i0e: jax.scipy.special.i0e,
    aten.special_i1: jax.scipy.special.i1,
    aten.special_i1e: jax.scipy.special.i1e,
    aten.special_ndtri: jax.scipy.special.ndtri,
}.items():
    lowering(_packet.default)(_of_floats(_function))


def _of_two(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: TensorLike, other: TensorLike) -> Any:
        (x, other), dtype = in_wide_dtype(x, other, floats=True)
        return function(*jnp.broadcast_arrays(x, other)).astype(dtype)

    return run


lowering(aten.igamma.default)(_of_two(jax.scipy.special.gammainc))
lowering(aten.igammac.default)(_of_two(jax.scipy.special.gammaincc))
lowering(
    aten.special_zeta.default,
    aten.special_zeta.self_scalar,
    aten.special_zeta.other_scalar,
)(_of_two(compositions.COMPOSITIONS[aten.special_zeta]))

for _packet, _function in special_functions.SPECIAL.items():
    _names = [name for name in _packet.overloads() if "out" not in name]
    _run = _of_floats(_function) if _names == ["default"] and "bessel" in str(_packet) else None
    lowering(*(getattr(_packet, name) for name in _names))(_run or _of_two(_function))


@lowering(aten.special_log_ndtr.default)
def log_ndtr(x: TensorLike) -> Any:
    """The logarithm of the normal distribution."""
    return _of_floats(jax.scipy.special.log_ndtr)(x)


@lowering(aten.polygamma.default)
def polygamma(n: int, x: TensorLike) -> Any:
    """The n-th derivative of digamma."""
    plain = compositions.COMPOSITIONS[aten.polygamma.default]
    return _of_floats(lambda wide: plain(n, wide))(x)


@lowering(aten.abs.default)
def absolute(x: TensorLike) -> Any:
    """The absolute value, with gradient 0 at 0."""
    return x if x.dtype == bool else elementwise.absolute(x)


@lowering(aten.neg.default)
def negative(x: TensorLike) -> Any:
    """The number with the other sign."""
    return jnp.negative(x)


@lowering(aten.sign.default)
def sign(x: TensorLike) -> Any:
    """-1, 0 or 1."""
    # PyTorch has 0 for NaN.
    return x if x.dtype == bool else jnp.where(x != x, 0, jnp.sign(x)).astype(x.dtype)


@lowering(aten.sgn.default)
def sgn(x: TensorLike) -> Any:
    """The sign; of a complex number, the one of length 1."""
    if not is_complex(x.dtype):
        return sign(x)
    size = jnp.abs(x)
    zero = size == 0
    return jnp.where(zero, 0, x / jnp.where(zero, 1, size)).astype(x.dtype)


def _rounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Whole numbers stay as they are."""
    return lambda x: function(x) if is_inexact(x.dtype) else x


lowering(aten.ceil.default)(_rounded(jnp.ceil))
lowering(aten.floor.default)(_rounded(jnp.floor))
lowering(aten.trunc.default)(_rounded(jnp.trunc))
lowering(aten.round.default)(_rounded(jnp.round))


@lowering(aten.round.decimals)
def round_to(x: TensorLike, *, decimals: int) -> Any:
    """Rounded to some digits after the point."""
    if not is_inexact(x.dtype):
        return x
    full = as_dtype(x, wide(x.dtype))
    scale = 10.0 ** abs(decimals)
    found = jnp.round(full * scale) / scale if decimals >= 0 else jnp.round(full / scale) * scale
    return found.astype(x.dtype)


@lowering(aten.frac.default)
def frac(x: TensorLike) -> Any:
    """What is behind the point."""
    return x - jnp.trunc(x)


@lowering(aten.bitwise_not.default)
def bitwise_not(x: TensorLike) -> Any:
    """All bits the other way."""
    return jnp.bitwise_not(x)


@lowering(aten.isnan.default)
def isnan(x: TensorLike) -> Any:
    """Whether it is no number."""
    return x != x


@lowering(aten.isinf.default)
def isinf(x: TensorLike) -> Any:
    """Whether it is infinite."""
    return jnp.isinf(x) if is_inexact(x.dtype) else jnp.zeros(x.shape, bool)


@lowering(aten.isfinite.default)
def isfinite(x: TensorLike) -> Any:
    """Whether it is a finite number."""
    return jnp.isfinite(x) if is_inexact(x.dtype) else jnp.ones(x.shape, bool)


@lowering(aten.signbit.default)
def signbit(x: TensorLike) -> Any:
    """Whether it has a minus, also if it is 0."""
    return jnp.signbit(x) if is_inexact(x.dtype) else x < jnp.zeros((), x.dtype)


@lowering(aten.nan_to_num.default)
def nan_to_num(
    x: TensorLike,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Any:
    """Numbers in place of those that are not finite."""
    if not is_inexact(x.dtype):
        return x
    limits = jnp.finfo(x.dtype)
    high, low = (float(limits.max), float(limits.min))
    return jnp.nan_to_num(
        x,
        nan=0.0 if nan is None else nan,
        posinf=high if posinf is None else posinf,
        neginf=low if neginf is None else neginf,
    )


@lowering(aten.clamp.default, aten.clamp.Tensor)
def clamp(x: TensorLike, min: TensorLike = None, max: TensorLike = None) -> Any:
    """Between two limits; the gradient at a limit is 1."""
    return _clamped(x, min, max)


@lowering(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(x: TensorLike, min: TensorLike) -> Any:
    """Not below a limit."""
    return _clamped(x, min, None)


@lowering(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(x: TensorLike, max: TensorLike) -> Any:
    """Not above a limit."""
    return _clamped(x, None, max)


def _clamped(x: TensorLike, low: TensorLike, high: TensorLike) -> Any:
    limits = [limit for limit in (low, high) if limit is not None]
    dtype = common_dtype(x, *limits)
    x, low, high = (None if value is None else as_dtype(value, dtype) for value in (x, low, high))
    # A comparison with NaN is false, which keeps a NaN of x; one of a limit spreads, as in PyTorch.
    if low is not None:
        x = jnp.where((x < low) | (low != low), low, x)
    if high is not None:
        x = jnp.where((x > high) | (high != high), high, x)
    return x


@lowering(
    aten.conj.default, aten._conj.default, aten._conj_physical.default, aten.conj_physical.default
)
def conj(x: TensorLike) -> Any:
    """The conjugate."""
    return jnp.conj(x) if is_complex(x.dtype) else x


@lowering(aten.resolve_conj.default, aten.resolve_neg.default)
def resolved(x: TensorLike) -> Any:
    """The conjugate that PyTorch puts off; here none is put off."""
    return x


@lowering(aten.real.default)
def real(x: TensorLike) -> Any:
    """The real part."""
    return jnp.real(x) if is_complex(x.dtype) else x


@lowering(aten.imag.default)
def imag(x: TensorLike) -> Any:
    """The imaginary part."""
    return jnp.imag(x)


@lowering(aten.angle.default)
def angle(x: TensorLike) -> Any:
    """The angle of a complex number; of a real one 0 or pi."""
    if is_complex(x.dtype):
        return elementwise.angle(jnp.imag(x), jnp.real(x))
    dtype = x.dtype if is_inexact(x.dtype) else default_float()
    x = as_dtype(x, dtype)
    return jnp.where(x != x, x, jnp.where(x < 0, jnp.asarray(math.pi, dtype), jnp.zeros((), dtype)))


@lowering(aten.complex.default)
def complex_of(real: TensorLike, imag: TensorLike) -> Any:
    """A complex number of two parts."""
    return jax.lax.complex(*jnp.broadcast_arrays(real, imag))


@lowering(aten.polar.default)
def polar(size: TensorLike, angle: TensorLike) -> Any:
    """A complex number of a length and an angle."""
    return jax.lax.complex(*jnp.broadcast_arrays(size * jnp.cos(angle), size * jnp.sin(angle)))
