"""Products of matrices, and functions of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import TensorLike
from tailrace.errors import ProgramError
from tailrace.torch.lowerings.promotion import as_dtype, common_dtype, is_inexact, wide
from tailrace.torch.lowerings.table import BY_NAME, lowering
from tailrace.torch.torchax.ops import compositions, matrices

aten = torch.ops.aten


def product(x: TensorLike, other: TensorLike) -> Any:
    """A product; of bytes with what overflows cut off."""
    return jnp.matmul(x, other)


@lowering(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.vdot.default)
def multiplied(x: TensorLike, other: TensorLike) -> Any:
    """A product of matrices, or of many."""
    return product(x, other)


@lowering(aten.mm.dtype, aten.bmm.dtype)
def multiplied_to(x: TensorLike, other: TensorLike, out_dtype: torch.dtype) -> Any:
    """A product that is summed and returned in a wider dtype."""
    return jnp.matmul(x, other, preferred_element_type=jnp.float32)


def _with_sum(bias: TensorLike, found: TensorLike, beta: complex, alpha: complex) -> Any:
    """beta bias + alpha product; a factor of 0 leaves its term out, NaN and all."""
    dtype = found.dtype
    if beta == 0 and alpha == 1:
        return found
    exact = beta == 1 and alpha == 1
    held = dtype if exact else wide(dtype)
    total = as_dtype(found, held)
    total = total if alpha == 1 else total * as_dtype(alpha, held)
    if beta == 0:
        return total.astype(dtype)
    bias = as_dtype(bias, held)
    bias = bias if beta == 1 else bias * as_dtype(beta, held)
    return (bias + total).astype(dtype)


@lowering(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def addmm(
    bias: TensorLike, x: TensorLike, other: TensorLike, *, beta: complex = 1, alpha: complex = 1
) -> Any:
    """A product, and something added."""
    if alpha == 0:
        shape = jax.eval_shape(jnp.matmul, x, other).shape
        return _with_sum(bias, jnp.zeros(shape, x.dtype), beta, 1)
    return _with_sum(bias, product(x, other), beta, alpha)


@lowering(aten.addbmm.default)
def addbmm(
    bias: TensorLike, x: TensorLike, other: TensorLike, *, beta: complex = 1, alpha: complex = 1
) -> Any:
    """The sum of products, and something added."""
    return _with_sum(bias, jnp.einsum("bij,bjk->ik", x, other), beta, alpha)


@lowering(aten.addr.default)
def addr(
    bias: TensorLike, x: TensorLike, other: TensorLike, *, beta: complex = 1, alpha: complex = 1
) -> Any:
    """The outer product, and something added."""
    dtype = common_dtype(bias, x, other)
    return _with_sum(bias, as_dtype(jnp.outer(x, other), dtype), beta, alpha)


@lowering(aten.linear.default)
def linear(x: TensorLike, weight: TensorLike, bias: TensorLike = None) -> Any:
    """A product with a matrix turned, and something added."""
    found = jnp.einsum("...i,oi->...o", x, weight)
    return found if bias is None else found + bias


@lowering(aten._trilinear.default)
def trilinear(
    one: TensorLike,
    two: TensorLike,
    three: TensorLike,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> Any:
    """The product of three, each with dims of one entry, summed over dims."""
    parts = []
    for part, dims in ((one, expand1), (two, expand2), (three, expand3)):
        for dim in sorted(dims):
            part = jnp.expand_dims(part, dim)
        parts.append(as_dtype(part, wide(part.dtype)))
    return (parts[0] * parts[1] * parts[2]).sum(tuple(sumdim)).astype(one.dtype)


@lowering(aten._grouped_mm.default)
def grouped_mm(
    x: TensorLike,
    weight: TensorLike,
    offs: TensorLike = None,
    bias: TensorLike = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Rows in groups, each times a matrix of its own; groups end at offsets."""
    if x.ndim == 3 and weight.ndim == 3:
        return jnp.matmul(x, weight)
    return in_groups(x, weight, offs)


def in_groups(x: TensorLike, weight: TensorLike, offs: TensorLike) -> Any:
    """Rows in groups that end at offsets, each times a matrix of its own; rows behind the last are
    0."""
    offs = offs.astype(jnp.int32)
    sizes = jnp.diff(offs, prepend=jnp.zeros(1, jnp.int32))
    return jax.lax.ragged_dot(x, weight, sizes)


BY_NAME["transformers::grouped_mm_fallback"] = in_groups


for _overload, _function in {
    aten._linalg_eigh.default: compositions.COMPOSITIONS[aten._linalg_eigh.default],
    aten.linalg_cholesky_ex.default: compositions.COMPOSITIONS[aten.linalg_cholesky_ex.default],
    aten.linalg_lu.default: compositions.COMPOSITIONS[aten.linalg_lu.default],
    aten.lu_unpack.default: compositions.COMPOSITIONS[aten.lu_unpack.default],
    aten.linalg_lu_solve.default: matrices.MATRICES[aten.linalg_lu_solve.default],
    aten.cholesky.default: compositions.COMPOSITIONS[aten.cholesky.default],
    aten.cholesky_solve.default: matrices.MATRICES[aten.cholesky_solve.default],
    aten.linalg_householder_product.default: matrices.MATRICES[
        aten.linalg_householder_product.default
    ],
    aten.linalg_matrix_exp.default: matrices.MATRICES[aten.linalg_matrix_exp.default],
}.items():
    lowering(_overload)(_function)


@lowering(aten._linalg_solve_ex.default)
def solve(
    a: TensorLike, b: TensorLike, *, left: bool = True, check_errors: bool = False
) -> tuple[Any, Any, Any, Any]:
    """The solution of a system; factors and pivots, which PyTorch keeps for its backward pass, are
    empty here, and 0: whether there is one is not known before it runs."""
    found, info = matrices.MATRICES[aten._linalg_solve_ex.default](a, b, left=left)
    return found, jnp.zeros(a.shape, a.dtype), jnp.zeros(a.shape[:-1], jnp.int32), info


@lowering(aten.linalg_inv_ex.default)
def inverse(x: TensorLike, *, check_errors: bool = False) -> tuple[Any, Any]:
    """The inverse, and 0: whether there is one is not known before it runs."""
    found = jnp.linalg.inv(x) if x.size else x
    return found, jnp.zeros(x.shape[:-2], jnp.int32)


@lowering(aten.triangular_solve.default)
def triangular_solve(
    b: TensorLike,
    a: TensorLike,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Any, Any]:
    """The solution of a system with a triangle, and the triangle."""
    return linalg_solve_triangular(
        a.mT if transpose else a, b, upper=upper != transpose, unitriangular=unitriangular
    ), a


@lowering(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(
    a: TensorLike, b: TensorLike, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """The solution of a system with a triangle."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(part, (*batch, *part.shape[-2:])) for part in (a, b))
    return jax.lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@lowering(aten._linalg_svd.default)
def svd(
    x: TensorLike,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> tuple[Any, Any, Any]:
    """Singular values and vectors."""
    if not compute_uv:
        empty = jnp.zeros((0,), x.dtype)
        return empty, jnp.linalg.svd(x, compute_uv=False), empty
    found = jnp.linalg.svd(x, full_matrices=full_matrices)
    return found[0], found[1], found[2]


@lowering(aten.linalg_qr.default)
def qr(x: TensorLike, mode: str = "reduced") -> tuple[Any, Any]:
    """An orthogonal matrix times a triangle."""
    if mode == "r":
        return jnp.zeros((0,), x.dtype), jnp.linalg.qr(x, mode="r")
    found = jnp.linalg.qr(x, mode=mode)
    return found[0], found[1]


@lowering(aten._linalg_det.default)
def det(x: TensorLike) -> tuple[Any, Any, Any]:
    """A determinant; its factors, which PyTorch keeps for its backward pass, are empty here."""
    found = jnp.linalg.det(x) if x.size else jnp.ones(x.shape[:-2], x.dtype)
    return found, jnp.zeros(x.shape, x.dtype), jnp.zeros(x.shape[:-1], jnp.int32)


@lowering(aten._linalg_slogdet.default)
def slogdet(x: TensorLike) -> tuple[Any, Any, Any, Any]:
    """The sign of a determinant and the logarithm of its absolute value; factors are empty here."""
    if x.size:
        sign, value = jnp.linalg.slogdet(x)
    else:
        sign, value = jnp.ones(x.shape[:-2], x.dtype), jnp.zeros(x.shape[:-2], x.real.dtype)
    return sign, value, jnp.zeros(x.shape, x.dtype), jnp.zeros(x.shape[:-1], jnp.int32)


@lowering(aten.trace.default)
def trace(x: TensorLike) -> Any:
    """The sum of a diagonal."""
    found = jnp.trace(x)
    return found if is_inexact(x.dtype) else found.astype(jnp.int32)


@lowering(aten.linalg_cross.default)
def cross(x: TensorLike, other: TensorLike, *, dim: int = -1) -> Any:
    """The vector at right angles to two."""
    one, two = jnp.broadcast_arrays(x, other)
    return jnp.cross(one, two, axis=dim)


@lowering(aten.linalg_lu_factor_ex.default)
def lu_factor(
    x: TensorLike, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Any, Any, Any]:
    """Both factors in one matrix, and pivots, which PyTorch counts from 1."""
    if not pivot:
        raise ProgramError(
            "linalg.lu_factor has no form without pivots on the device. Received: pivot=False. Use "
            "pivot=True."
        )
    factors, pivots, _ = jax.lax.linalg.lu(x)
    return factors, pivots.astype(jnp.int32) + 1, jnp.zeros(x.shape[:-2], jnp.int32)


@lowering(aten.cholesky_inverse.default)
def cholesky_inverse(factor: TensorLike, upper: bool = False) -> Any:
    """The inverse of a matrix that is given by its factor."""
    solve = matrices.MATRICES[aten.cholesky_solve.default]
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return solve(eye, factor, upper)
