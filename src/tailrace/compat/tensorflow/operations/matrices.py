"""Products and linear algebra: `tf.matmul`, `tf.einsum`, `tf.linalg.*`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from keras import ops

from tailrace.base.array_like import TensorLike
from tailrace.compat.arguments import Axes
from tailrace.compat.tensorflow.operations.elementwise import tensor
from tailrace.compat.tensorflow.operations.table import only, operation


def _turned(a: TensorLike, transpose: bool, adjoint: bool) -> Any:
    a = tensor(a)
    if transpose or adjoint:
        a = ops.swapaxes(a, -1, -2)
    return ops.conjugate(a) if adjoint else a


@operation("linalg.matmul", "matmul")
def matmul(
    a: TensorLike,
    b: TensorLike,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    **sparse: Any,
) -> Any:
    """The product of matrices."""
    only("matmul", sparse, "a_is_sparse", "b_is_sparse")
    return ops.matmul(_turned(a, transpose_a, adjoint_a), _turned(b, transpose_b, adjoint_b))


@operation("linalg.matvec")
def matvec(a: TensorLike, b: TensorLike, transpose_a: bool = False, adjoint_a: bool = False) -> Any:
    """The product of a matrix and a vector."""
    return ops.squeeze(ops.matmul(_turned(a, transpose_a, adjoint_a), ops.expand_dims(b, -1)), -1)


@operation("tensordot", "linalg.tensordot")
def tensordot(a: TensorLike, b: TensorLike, axes: int | Sequence[Any]) -> Any:
    """The product of tensors over axes."""
    given: Any = axes  # Keras' annotation has numbers only
    return ops.tensordot(a, b, axes=given)


@operation("einsum", "linalg.einsum")
def einsum(equation: str, *inputs: Any, **kwargs: Any) -> Any:
    """A product in Einstein's notation."""
    only("einsum", kwargs, "optimize")
    return ops.einsum(equation, *inputs)


@operation("norm", "linalg.norm")
def norm(
    tensor: TensorLike, ord: str | float = "euclidean", axis: Axes = None, keepdims: bool = False
) -> Any:
    """The norm of a tensor, of its rows or of matrices in it."""
    tensor = jnp.asarray(tensor)
    axis = tuple(axis) if isinstance(axis, list) else axis
    if ord == "euclidean":
        return ops.sqrt(ops.sum(ops.square(tensor), axis=axis, keepdims=keepdims))
    # TensorFlow takes all elements as a vector, where numpy would take the norm of a matrix.
    if axis is None:
        return jnp.linalg.norm(tensor.reshape(-1), ord, keepdims=keepdims)
    return jnp.linalg.norm(tensor, ord, axis, keepdims)


@operation("linalg.band_part")
def band_part(input: TensorLike, num_lower: int, num_upper: int) -> Any:
    """A matrix without what is further from the diagonal; -1 keeps all."""
    found = tensor(input)
    # By comparing indices: the widths may be values of the program.
    rows, columns = jnp.ogrid[: found.shape[-2], : found.shape[-1]]
    lower = (num_lower < 0) | (rows - columns <= num_lower)
    upper = (num_upper < 0) | (columns - rows <= num_upper)
    return jnp.where(lower & upper, found, jnp.zeros_like(found))


@operation("linalg.diag")
def diag(diagonal: TensorLike) -> Any:
    """Matrices with these diagonals."""
    diagonal = tensor(diagonal)
    return diagonal[..., None] * jnp.eye(diagonal.shape[-1], dtype=diagonal.dtype)


@operation("linalg.solve")
def solve(matrix: TensorLike, rhs: jax.Array, adjoint: bool = False) -> Any:
    """x in matrix · x = rhs."""
    return jnp.linalg.solve(_turned(matrix, False, adjoint), tensor(rhs))


@operation("linalg.triangular_solve")
def triangular_solve(
    matrix: TensorLike, rhs: jax.Array, lower: bool = True, adjoint: bool = False
) -> Any:
    """x in matrix · x = rhs, of a triangular matrix."""
    return jax.scipy.linalg.solve_triangular(
        tensor(matrix), tensor(rhs), trans="C" if adjoint else "N", lower=lower
    )


@operation("linalg.svd", "svd")
def svd(tensor: TensorLike, full_matrices: bool = False, compute_uv: bool = True) -> Any:
    """Singular values s, or (s, u, v)."""
    found = jnp.linalg.svd(jnp.asarray(tensor), full_matrices=full_matrices, compute_uv=compute_uv)
    if not compute_uv:
        return found
    # TensorFlow returns the values first, and v itself, not its adjoint.
    u, s, vh = found
    return s, u, jnp.conj(jnp.swapaxes(vh, -1, -2))


@operation("linalg.qr")
def qr(input: TensorLike, full_matrices: bool = False) -> Any:
    """An orthogonal and a triangular matrix."""
    return jnp.linalg.qr(tensor(input), mode="complete" if full_matrices else "reduced")


def _of_matrix(name: str, function: Callable[..., Any]) -> None:
    def computed(input: TensorLike) -> Any:
        """Of each matrix, as in TensorFlow."""
        return function(tensor(input))

    operation(f"linalg.{name}")(computed)


for _name, _function in {
    "cholesky": jnp.linalg.cholesky,
    "det": jnp.linalg.det,
    "diag_part": lambda a: jnp.diagonal(a, axis1=-2, axis2=-1),
    "eigh": lambda a: tuple(jnp.linalg.eigh(a)),
    "inv": jnp.linalg.inv,
    "logdet": lambda a: jnp.linalg.slogdet(a)[1],
    "matrix_transpose": lambda a: jnp.swapaxes(a, -1, -2),
    "pinv": jnp.linalg.pinv,
    "slogdet": lambda a: tuple(jnp.linalg.slogdet(a)),
    "trace": lambda a: jnp.trace(a, axis1=-2, axis2=-1),
}.items():
    _of_matrix(_name, _function)
