"""Functions of matrices whose lowerings in torchax are inexact, or are not for all shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import DTypeLike, TensorLike

aten = torch.ops.aten


def _kron(x: TensorLike, other: TensorLike) -> Any:
    """All products of two tensors' entries. Each entry's gradient is a long sum: in 32 bits."""
    wide = [part.astype(_wide(part.dtype)) for part in (x, other)]
    with jax.numpy_dtype_promotion("standard"):
        return jnp.kron(*wide)


def _wide(dtype: DTypeLike) -> Any:
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype


@jax.custom_vjp
def _exponential(x: TensorLike) -> Any:
    return jax.scipy.linalg.expm(x)


def _exponential_forward(x: TensorLike) -> tuple[Any, Any]:
    return _exponential(x), x


def _exponential_backward(x: TensorLike, slope: TensorLike) -> tuple[Any]:
    """As PyTorch's: one block of the exponential of a larger matrix, as exact as a value is.

    A derivative of the approximation that computes a value is less so.
    """
    # exp([[A, G], [0, A]]) has the derivative of exp at A towards G in its corner (Mathias 1996).
    turned = _turned(x)
    lower = jnp.concatenate([jnp.zeros_like(x), turned], -1)
    both = jnp.concatenate([jnp.concatenate([turned, slope], -1), lower], -2)
    size = x.shape[-1]
    return (_exponential(both)[..., :size, size:],)


_exponential.defvjp(_exponential_forward, _exponential_backward)


def _matrix_exp(x: TensorLike) -> Any:
    """In 32 bits, because the powers of a matrix leave the range of 16."""
    return _exponential(x.astype(_wide(x.dtype))) if x.size else x


def _det(x: TensorLike) -> Any:
    """Determinants; that of a matrix without rows is 1."""
    return jnp.linalg.det(x) if x.size else jnp.ones(x.shape[:-2], x.dtype)


def _slogdet(x: TensorLike) -> tuple[Any, Any]:
    """The sign of a determinant, and the logarithm of its absolute value."""
    if x.size:
        return tuple(jnp.linalg.slogdet(x))
    return jnp.ones(x.shape[:-2], x.dtype), jnp.zeros(x.shape[:-2], x.real.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _solved(b: TensorLike, factor: TensorLike, upper: bool) -> Any:
    return jax.scipy.linalg.cho_solve((factor, not upper), b)


def _solved_forward(b: TensorLike, factor: TensorLike, upper: bool) -> tuple[Any, Any]:
    found = _solved(b, factor, upper)
    return found, (factor, found)


def _solved_backward(upper: bool, kept: TensorLike, slope: TensorLike) -> tuple[Any, Any]:
    """As PyTorch's: that of a full factor, also in the triangle that is not read."""
    factor, found = kept
    slope = _solved(slope, factor, upper)
    common = slope @ _turned(found)
    common = common + _turned(common)
    return slope, -(factor @ common if upper else common @ factor)


_solved.defvjp(_solved_forward, _solved_backward)


def _turned(x: TensorLike) -> Any:
    return jnp.swapaxes(x, -1, -2).conj()


def _cholesky_solve(b: TensorLike, factor: TensorLike, upper: bool = False) -> Any:
    """The solution of a system whose matrix is given by its factor."""
    batch = jnp.broadcast_shapes(b.shape[:-2], factor.shape[:-2])
    if not b.size or not factor.size:
        return jnp.zeros((*batch, *b.shape[-2:]), b.dtype)
    b, factor = (jnp.broadcast_to(part, (*batch, *part.shape[-2:])) for part in (b, factor))
    return _solved(b, factor, upper)


def _lstsq(
    a: TensorLike, b: TensorLike, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Any, Any, Any, Any]:
    """The solution by the pseudo-inverse, whose gradient is exact; residuals, ranks and singular values
    as the driver asks for them, empty otherwise."""
    rows, columns = a.shape[-2:]
    driver = driver or "gelsy"
    if driver in ("gelsd", "gelss") and rows > columns:
        raise NotImplementedError(
            f"linalg.lstsq with driver={driver!r} cannot run on the device for more rows than columns: "
            "whether it returns residuals would depend on values (driver='gels' always does, "
            "driver='gelsy' never)"
        )
    is_vector = _is_vector(a, b)
    right = b[..., None] if is_vector else b
    tolerance = jnp.finfo(a.dtype).eps * max(rows, columns) if rcond is None else rcond
    found = jnp.linalg.pinv(a, rtol=None if driver == "gels" else tolerance) @ right
    empty = jnp.zeros((0,), a.real.dtype)
    residuals = values = empty
    rank = jnp.zeros((0,), int)
    if driver == "gels" and rows > columns:
        residuals = jnp.square(jnp.abs(a @ found - right)).sum(-2)
    if driver != "gels":
        # The rank is counted on the device; its shape does not depend on it.
        spectrum = jnp.linalg.svd(a, compute_uv=False)
        rank = (spectrum > tolerance * spectrum[..., :1]).sum(-1)
        values = spectrum if driver in ("gelsd", "gelss") else empty
    return (found[..., 0] if is_vector else found), residuals, rank, values


def _is_vector(a: TensorLike, b: TensorLike) -> bool:
    """Whether the right side of a system is one vector for each matrix."""
    return b.ndim == 1 or (a.ndim - 1 == b.ndim and a.shape[:-1] == b.shape)


def _solve(
    a: TensorLike, b: TensorLike, *, left: bool = True, check_errors: bool = False
) -> tuple[Any, Any]:
    """The solution of a system, and 0; torchax takes as many columns as rows for vectors."""
    vector = _is_vector(a, b)
    b = b[..., None] if vector else b
    found = jnp.linalg.solve(a, b) if left else jnp.linalg.solve(a.mT, b.mT).mT
    return (found[..., 0] if vector else found), jnp.zeros(a.shape[:-2], jnp.int32)


def _solution(a: TensorLike, b: TensorLike, *, left: bool = True) -> Any:
    return _solve(a, b, left=left)[0]


def _solve_by_factors(
    factors: TensorLike, pivots: TensorLike, b: TensorLike, left: bool = True, adjoint: bool = False
) -> Any:
    """The solution of a system whose matrix is given by its factors; pivots count from 1.

    X A = B is the system of the transpose, not of the conjugate, which is what torchax solves.
    """
    given = (factors, pivots - 1)
    if left:
        return jax.scipy.linalg.lu_solve(given, b, 2 if adjoint else 0)
    if adjoint:
        return jax.scipy.linalg.lu_solve(given, b.mT.conj(), 0).mT.conj()
    return jax.scipy.linalg.lu_solve(given, b.mT, 1).mT


def _householder_product(reflectors: TensorLike, scales: TensorLike) -> Any:
    """The product of reflections, one after the other: JAX's own operation has no gradient."""
    rows, columns = reflectors.shape[-2:]
    vectors = jnp.tril(reflectors, -1) + jnp.eye(rows, columns, dtype=reflectors.dtype)
    start = jnp.eye(rows, columns, dtype=reflectors.dtype)
    found = jnp.broadcast_to(start, reflectors.shape)

    def reflect(number: TensorLike, found: TensorLike) -> Any:
        number = scales.shape[-1] - 1 - number
        vector = jax.lax.dynamic_index_in_dim(vectors, number, -1)
        scale = jax.lax.dynamic_index_in_dim(scales, number, -1)[..., None]
        return found - scale * vector * (vector.conj() * found).sum(-2, keepdims=True)

    return jax.lax.fori_loop(0, scales.shape[-1], reflect, found)


MATRICES: dict[Any, Callable[..., Any]] = {
    aten._linalg_solve_ex.default: _solve,
    aten.cholesky_solve.default: _cholesky_solve,
    aten.linalg_householder_product.default: _householder_product,
    aten.linalg_lu_solve.default: _solve_by_factors,
    aten.linalg_lstsq.default: _lstsq,
    aten.linalg_matrix_exp.default: _matrix_exp,
    torch.det: _det,
    torch.kron: _kron,
    torch.slogdet: _slogdet,
    torch.Tensor.slogdet: _slogdet,
    torch.linalg.det: _det,
    torch.linalg.solve: _solution,
    torch.linalg.solve_ex: _solve,
    torch.Tensor.det: _det,
    torch.Tensor.kron: _kron,
}
"""By function or operation."""
