"""Functions of `torch.special` that torchax has not: polynomials and Bessel functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import TensorLike

aten = torch.ops.aten


def _floats(x: TensorLike) -> Any:
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _polynomial(first: Callable[..., Any], following: Callable[..., Any]) -> Callable[..., Any]:
    """Polynomials by degree: 1, `first(x)`, then `following(k, x, that of k - 1, that of k - 2)`."""

    def run(x: TensorLike, n: TensorLike) -> Any:
        degree = jnp.asarray(n).astype(jnp.int32)
        x, degree = jnp.broadcast_arrays(_floats(x), degree)
        highest = degree.max() if degree.size else 0

        def further(k: TensorLike, pair: TensorLike) -> Any:
            before, now = pair
            # One loop to the highest degree; entries of a lower one stop changing when theirs is
            # reached.
            reached = k <= degree
            after = following(k.astype(x.dtype), x, now, before)
            return jnp.where(reached, now, before), jnp.where(reached, after, now)

        ones = jnp.ones_like(x)
        _, found = jax.lax.fori_loop(2, highest + 1, further, (ones, first(x)))
        return jnp.where(degree < 0, 0, jnp.where(degree == 0, ones, found))

    return run


def _chebyshev(first: Callable[..., Any], at_angle: Callable[..., Any]) -> Callable[..., Any]:
    """One of Chebyshev's four kinds: inside of (-1, 1) for high degrees by angles, which is exact."""
    polynomial = _polynomial(first, lambda k, x, now, before: 2 * x * now - before)
    most = 4  # degrees by recurrence

    def run(x: TensorLike, n: TensorLike) -> Any:
        x, degree = jnp.broadcast_arrays(_floats(x), jnp.asarray(n))
        by_angle = (jnp.abs(x) < 1) & (degree > most)
        # 0 where it is not used: the derivative of arccos is infinite at 1, and both sides of a
        # `where` are differentiated.
        angle = jnp.arccos(jnp.where(by_angle, x, 0))
        wave = at_angle(jnp.trunc(degree).astype(x.dtype), angle)
        return jnp.where(by_angle, wave, polynomial(x, jnp.where(by_angle, 0, degree)))

    return run


def _shifted(polynomial: Callable[..., Any]) -> Callable[..., Any]:
    """The polynomial on [0, 1] instead of [-1, 1]."""
    return lambda x, n: polynomial(2 * _floats(x) - 1, n)


_first_kind = _chebyshev(lambda x: x, lambda n, a: jnp.cos(n * a))
_second_kind = _chebyshev(lambda x: 2 * x, lambda n, a: jnp.sin((n + 1) * a) / jnp.sin(a))
_third_kind = _chebyshev(
    lambda x: 2 * x - 1, lambda n, a: jnp.cos((n + 0.5) * a) / jnp.cos(0.5 * a)
)
_fourth_kind = _chebyshev(
    lambda x: 2 * x + 1, lambda n, a: jnp.sin((n + 0.5) * a) / jnp.sin(0.5 * a)
)
_legendre = _polynomial(
    lambda x: x, lambda k, x, now, before: ((2 * k - 1) * x * now - (k - 1) * before) / k
)


def _spherical_j0(x: TensorLike) -> Any:
    """sin(x) / x."""
    x = _floats(x)
    return jnp.where(jnp.isinf(x), 0, jnp.sinc(jnp.where(jnp.isinf(x), 0, x) / math.pi))


def _scaled_k(order: int, plain: Callable[..., Any]) -> Callable[..., Any]:
    """exp(x) K(x), for large x by the series in 1 / x: K itself is 0 there."""
    large = 20.0

    def run(x: TensorLike) -> Any:
        x = x if x.is_floating_point() else x.float()
        near, far = x.clamp(max=large), x.clamp(min=large)
        series = term = torch.ones_like(far)
        for k in range(1, 8):
            term = term * (4 * order**2 - (2 * k - 1) ** 2) / (8 * k * far)
            series = series + term
        return torch.where(x > large, (math.pi / 2 / far).sqrt() * series, near.exp() * plain(near))

    return run


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.special_chebyshev_polynomial_v: _third_kind,
    aten.special_chebyshev_polynomial_w: _fourth_kind,
    aten.special_legendre_polynomial_p: _legendre,
    aten.special_shifted_chebyshev_polynomial_t: _shifted(_first_kind),
    aten.special_shifted_chebyshev_polynomial_u: _shifted(_second_kind),
    aten.special_shifted_chebyshev_polynomial_v: _shifted(_third_kind),
    aten.special_shifted_chebyshev_polynomial_w: _shifted(_fourth_kind),
    aten.special_spherical_bessel_j0: _spherical_j0,
}
"""By operation."""

COMPOSED: dict[Any, Callable[..., Any]] = {
    aten.special_scaled_modified_bessel_k0: _scaled_k(0, torch.special.modified_bessel_k0),
    aten.special_scaled_modified_bessel_k1: _scaled_k(1, torch.special.modified_bessel_k1),
}
"""Those of tensors, not arrays."""
