"""Functions that PyTorch composes with checks of values, rewritten without them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import ShapeLike, TensorLike
from tailrace.base.trees import Tree
from tailrace.torch.torchax.ops.norms import vector_norm

aten = torch.ops.aten


def _cov(
    x: TensorLike, *, correction: int = 1, fweights: TensorLike = None, aweights: TensorLike = None
) -> Any:
    """Covariances of rows; PyTorch checks the sum of the weights, which would branch on values."""
    x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
    rows = x[None] if x.ndim < 2 else x
    # Both kinds of weights multiply; only the degrees of freedom tell them apart.
    weights = jnp.ones(rows.shape[1], x.real.dtype)
    for part in (fweights, aweights):
        weights = weights if part is None else weights * part
    total = weights.sum()
    mean = (rows * weights).sum(1, keepdims=True) / total
    if aweights is None:
        freedom = total - correction
    else:
        freedom = total - correction * (weights * aweights).sum() / total
    away = rows - mean
    found = (away * weights) @ away.conj().T / jnp.maximum(freedom, 0)
    dtype = x.dtype if aweights is None else jnp.promote_types(x.dtype, aweights.dtype)
    return found.squeeze().astype(dtype)  # of one row: a number


def _corrcoef(x: TensorLike) -> Any:
    """Correlations of rows."""
    found = _cov(x)
    # 1, or NaN for a row without spread.
    if found.ndim == 0:
        return found / found
    spread = jnp.sqrt(jnp.diagonal(found).real)
    # Two divisions, as in PyTorch: the product of two spreads may overflow.
    found = found / spread[:, None] / spread[None]
    return found if jnp.iscomplexobj(found) else jnp.clip(found, -1, 1)


def _combinations(x: TensorLike, r: int = 2, with_replacement: bool = False) -> Any:
    """All choices of r entries, in order."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    # By position, while tracing: a gather of known indices, with an ordinary gradient.
    chosen = list(choose(range(x.shape[0]), r))
    return x[np.array(chosen, int).reshape(len(chosen), r)] if r else x[:0]


def _lu_unpack(
    factors: TensorLike, pivots: TensorLike, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Any, Any, Any]:
    """The permutation and the two factors."""
    *_, rows, columns = factors.shape
    least = min(rows, columns)
    empty = jnp.zeros((0,), factors.dtype)
    lower = upper = permutation = empty
    if unpack_data:
        lower = jnp.tril(factors[..., :, :least], -1) + jnp.eye(rows, least, dtype=factors.dtype)
        upper = jnp.triu(factors[..., :least, :])
    if unpack_pivots:
        # PyTorch counts pivots from 1.
        order = jax.lax.linalg.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, rows)
        permutation = jnp.swapaxes(jnp.eye(rows, dtype=factors.dtype)[order], -1, -2)
    return permutation, lower, upper


def _unpooled(x: TensorLike, indices: TensorLike, output_size: ShapeLike, *_: Any) -> Any:
    """Maxima put back to where they were found; 0 elsewhere."""
    dims = len(output_size)
    lead = x.shape[: x.ndim - dims]
    zeros = jnp.zeros((*lead, int(np.prod(output_size))), x.dtype)
    x, places = x.reshape(*lead, -1), indices.reshape(*lead, -1)
    # The values and the gradient by separate ways: of several values for one place the last is put,
    # which JAX differentiates as if only that one counted.
    fixed = jax.lax.stop_gradient(x)
    out = jnp.put_along_axis(zeros, places, fixed, -1, inplace=False)
    # Of several maxima that go to one place, each has the whole gradient.
    added = jax.vmap(lambda z, p, d: z.at[p].add(d))
    change = added(*(part.reshape(-1, part.shape[-1]) for part in (zeros, places, x - fixed)))
    return (out + change.reshape(out.shape)).reshape(*lead, *output_size)


@jax.custom_jvp
def _digamma(x: TensorLike) -> Any:
    """Infinite at 0, where JAX's is NaN."""
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), jax.scipy.special.digamma(x))


@_digamma.defjvp
def _digamma_jvp(given: TensorLike, tangents: TensorLike) -> Any:
    return _digamma(*given), _polygamma(1, given[0]) * tangents[0]


def index_reduce(
    x: TensorLike,
    dim: int,
    index: TensorLike,
    source: TensorLike,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """Slices of one tensor reduced into those of another, as `scatter_reduce` does with entries."""
    if not source.ndim:
        x, source = x.reshape(1), source.reshape(1)
        return index_reduce(x, 0, index, source, reduce, include_self=include_self).reshape(())
    shape = [1] * source.ndim
    shape[dim] = -1
    places = index.reshape(shape).expand(source.shape)
    return aten.scatter_reduce.two(x, dim, places, source, reduce, include_self=include_self)


def _polygamma(n: int, x: TensorLike) -> Any:
    """The n-th derivative of digamma."""
    if n == 0:
        return _digamma(x)
    series = _shifted_zeta(jnp.asarray(n + 1, x.dtype), x, n + 1.0)
    return (-1) ** (n + 1) * math.factorial(n) * series


def _shifted_zeta(x: TensorLike, q: TensorLike, exponent: TensorLike) -> Any:
    """JAX's zeta is for positive numbers, so others are shifted."""
    # zeta(x, q) = q**-x + zeta(x, q + 1), applied until the argument is positive.
    # Enough for arguments above -24.
    shifts = 24
    negative = q <= 0
    safe = jnp.where(negative, q + shifts, q)
    near = sum(jnp.where(negative, (q + k) ** -exponent, 0) for k in range(shifts))
    return jax.scipy.special.zeta(x, safe) + near


def _zeta(x: TensorLike, q: TensorLike) -> Any:
    """Hurwitz' zeta; below 0 for whole exponents, as in PyTorch."""
    x, q = jnp.broadcast_arrays(x, q)
    whole = jnp.floor(x)
    # The exponent that is used is a safe one: both sides of a `where` are differentiated.
    usable = (x > 1) & ((q > 0) | ((q != jnp.floor(q)) & (x == whole)))
    found = _shifted_zeta(jnp.where(usable, x, 2), jnp.where(usable, q, 1), jnp.where(usable, x, 2))
    poles = (x == 1) | ((x > 1) & (q <= 0) & (q == jnp.floor(q)))
    return jnp.where(usable, found, jnp.where(poles, jnp.inf, jnp.nan))


def _repeat_interleave(
    x: TensorLike,
    repeats: TensorLike = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Any:
    """Each entry, repeated by its count; with counts alone, the numbers of the entries.

    With a tensor of counts, `output_size` says how many that makes.
    """
    if repeats is None:
        x, repeats = jnp.arange(x.shape[0]), x
    return jnp.repeat(x, repeats, axis=dim, total_repeat_length=output_size)


def _of_triangle(x: TensorLike, upper: bool) -> Any:
    """The symmetric matrix that one triangle says, with PyTorch's gradient: a symmetric one."""
    # The value is that of the triangle, the gradient that of the symmetric part: the rest is added
    # without one.
    even = (x + jnp.swapaxes(x, -1, -2).conj()) / 2
    part, off = (jnp.triu(x), jnp.triu(x, 1)) if upper else (jnp.tril(x), jnp.tril(x, -1))
    read = part + jnp.swapaxes(off, -1, -2).conj()
    return even + jax.lax.stop_gradient(read - even)


def _cholesky(x: TensorLike, upper: bool = False) -> Any:
    """Of what one triangle says; JAX's would be that of the mean of both."""
    found = jax.lax.linalg.cholesky(_of_triangle(x, upper), symmetrize_input=False)
    return jnp.swapaxes(found, -1, -2).conj() if upper else found


def _eigh(x: TensorLike, UPLO: str = "L", compute_v: bool = True) -> tuple[Any, Any]:
    """Eigenvalues and eigenvectors of what one triangle says."""
    matrix = _of_triangle(x, UPLO.upper() == "U")
    vectors, values = jax.lax.linalg.eigh(matrix, symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), x.dtype)


def pinv_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A pseudo-inverse; torchax's does not look at `hermitian`."""

    def run(x: TensorLike, *args: Any, hermitian: bool = False, **named: Any) -> Any:
        if hermitian:
            raise NotImplementedError("linalg.pinv has no lowering for hermitian=True")
        return theirs(x, *args, **named)

    return run


def at_indices_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A running maximum or minimum, whose gradient goes to the entry that the index names."""

    def run(x: TensorLike, dim: int) -> Any:
        found, index = theirs(x, dim)
        return (jnp.take_along_axis(x, index, dim) if x.ndim else found), index

    return run


def wide_sums_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A running sum or product; of narrow integers and booleans it is wide, as their sum is."""

    def run(x: TensorLike, *args: Any, **named: Any) -> Any:
        narrow = not jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize < 4
        return theirs(x.astype(jnp.int32) if narrow else x, *args, **named)

    return run


def _lu(x: TensorLike, *, pivot: bool = True) -> tuple[Any, Any, Any]:
    """The permutation and the two factors."""
    if not pivot:
        raise NotImplementedError("linalg.lu has no lowering for pivot=False")
    factors, _, order = jax.lax.linalg.lu(x)
    _, lower, upper = _lu_unpack(factors, None, unpack_pivots=False)
    permutation = jnp.swapaxes(jnp.eye(x.shape[-2], dtype=x.dtype)[order], -1, -2)
    return permutation, lower, upper


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(base: TensorLike, source: TensorLike, index: TensorLike, dim: int) -> Any:
    """Entries of a tensor, each times all those of another that are sent to its place."""
    return base.at[_places(index, dim)].multiply(source)


def _products_forward(
    base: TensorLike, source: TensorLike, index: TensorLike, dim: int
) -> tuple[Any, Any]:
    return _products(base, source, index, dim), (base, source, index)


def _products_backward(dim: int, kept: TensorLike, slope: TensorLike) -> tuple[Any, Any, None]:
    """The product of the other factors: without a division by 0, and right if one of them is 0."""
    base, source, index = kept
    at = _places(index, dim)
    # With two zero factors every gradient is 0; with one, only that factor has one: the product of
    # the others.
    zeros = (base == 0).astype(jnp.int32).at[at].add((source == 0).astype(jnp.int32))
    rest: Any = _products(*(jnp.where(part == 0, 1, part) for part in (base, source)), index, dim)

    def others(factor: TensorLike, zeros: TensorLike, rest: TensorLike) -> Any:
        alone = jnp.where(zeros == 1, rest, 0)
        return jnp.where(factor == 0, alone, jnp.where(zeros == 0, rest / factor, 0))

    return slope * others(base, zeros, rest), slope[at] * others(source, zeros[at], rest[at]), None


_products.defvjp(_products_forward, _products_backward)


def _places(index: TensorLike, dim: int) -> tuple[Any, ...]:
    places = list(jnp.indices(index.shape, sparse=True))
    places[dim] = index
    return tuple(places)


def _scatter_number(
    x: TensorLike, dim: int, index: TensorLike, value: TensorLike, *, reduce: str
) -> Any:
    """A number added to, or multiplied into, places; torchax takes entries of a tensor only."""
    if not x.ndim:
        row = _scatter_number(jnp.reshape(x, 1), 0, jnp.reshape(index, -1), value, reduce=reduce)
        return row.reshape(())
    # As PyTorch, in the dtype of the tensor: 1.5 added to integers is 1.
    return getattr(x.at[_places(index, dim)], reduce)(jnp.asarray(value).astype(x.dtype))


def scatter_reduce_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction into places, right for integers as well; that of floats is torchax's, except for
    products, which JAX differentiates only if no place is named twice."""

    def run(
        x: TensorLike,
        dim: int,
        index: TensorLike,
        src: TensorLike,
        reduce: str,
        *,
        include_self: bool = True,
    ) -> Any:
        floats = jnp.issubdtype(x.dtype, jnp.inexact)
        if floats and reduce != "prod":
            return theirs(x, dim, index, src, reduce, include_self=include_self)
        if not x.ndim:
            row = [jnp.reshape(part, (1,)) for part in (x, index, src)]
            alone = run(row[0], 0, row[1], row[2], reduce, include_self=include_self)
            return alone.reshape(())
        at = _places(index, dim)
        source = src[tuple(slice(n) for n in index.shape)]
        if floats:
            touched = jnp.zeros(x.shape, bool).at[at].set(True)
            return _products(
                x if include_self else jnp.where(touched, 1, x), source, index, dim % x.ndim
            )
        wide, source = x.astype(jnp.int32), source.astype(jnp.int32)
        # Neutral numbers, where a place begins without its own entry.
        limits = jnp.iinfo(jnp.int32)
        start = {"amax": limits.min, "amin": limits.max, "prod": 1}.get(reduce, 0)
        touched = jnp.zeros(x.shape, bool).at[at].set(True)
        base = wide if include_self else jnp.where(touched, start, wide)
        how = {"amax": "max", "amin": "min", "prod": "multiply"}.get(reduce, "add")
        out = getattr(base.at[at], how)(source)
        if reduce == "mean":
            count = jnp.full(x.shape, int(include_self)).at[at].add(1)
            out = out // jnp.maximum(jnp.where(touched, count, 1), 1)
        return out.astype(x.dtype)

    return run


def _searchsorted(
    ordered: TensorLike,
    values: Tree,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: TensorLike = None,
) -> Any:
    """Where values go among sorted ones: rows of both, or one row for all."""
    if sorter is not None:
        ordered = jnp.take_along_axis(ordered, sorter, -1)
    values = jnp.asarray(values, ordered.dtype)
    before = functools.partial(jnp.searchsorted, side="right" if right else side or "left")
    if not ordered.size or not values.size:
        return jnp.zeros(values.shape, int)
    if ordered.ndim < 2:
        return before(ordered, values)
    rows = [part.reshape(-1, part.shape[-1]) for part in (ordered, values)]
    return jax.vmap(before)(*rows).reshape(values.shape)


def _col2im(
    x: TensorLike,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """Patches added up to an image; with padding, those that reach beyond its edge are cut off."""
    size = [edge + 2 * more for edge, more in zip(output_size, padding, strict=True)]
    spans = [step * (kernel - 1) + 1 for step, kernel in zip(dilation, kernel_size, strict=True)]
    counts = [(n - span) // step + 1 for n, span, step in zip(size, spans, stride, strict=True)]
    patches = x.reshape(*x.shape[:-2], -1, *kernel_size, *counts)
    image = jnp.zeros((*patches.shape[:-4], *size), x.dtype)
    # A loop over the window, not over patches: as many additions as the kernel has entries.
    for place in itertools.product(*map(range, kernel_size)):
        first = [number * step for number, step in zip(place, dilation, strict=True)]
        along = zip(first, counts, stride, strict=True)
        rows, columns = (slice(start, start + n * step, step) for start, n, step in along)
        image = image.at[..., rows, columns].add(patches[..., place[0], place[1], :, :])
    (top, left), (height, width) = padding, output_size
    return image[..., top : top + height, left : left + width]


def _cholesky_ex(
    x: TensorLike, *, upper: bool = False, check_errors: bool = False
) -> tuple[Any, Any]:
    """The same, and 0 for each matrix: whether it could be done is not known before it runs."""
    return _cholesky(x, upper), jnp.zeros(x.shape[:-2], jnp.int32)


def _renorm(x: TensorLike, p: TensorLike, dim: int, maxnorm: float) -> Any:
    """Slices along one dim, each made shorter if its norm is too large."""
    others = [axis for axis in range(x.ndim) if axis != dim % x.ndim]
    norm = vector_norm(x, p, others, True)
    # 1e-7 is a constant of PyTorch's.
    return x * jnp.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1)


@jax.custom_jvp
def _nextafter(x: TensorLike, other: TensorLike) -> Any:
    return jnp.nextafter(x, other)


@_nextafter.defjvp
def _nextafter_jvp(given: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """As PyTorch's: the neighbour moves with the number, unless it is where it goes to."""
    return _nextafter(*given), jnp.where(given[0] == given[1], 0, tangents[0])


def polygamma_in_place(x: TensorLike, n: int) -> Any:
    """Its arguments are in another order than those of the function."""
    return x.copy_(torch.polygamma(n, x))


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} has no lowering: tensors have no strides here")

    return refuse


COMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._linalg_eigh.default: _eigh,
    aten.as_strided_.default: _refused("as_strided_"),
    aten.col2im.default: _col2im,
    aten.as_strided_scatter.default: _refused("as_strided_scatter"),
    aten.cholesky.default: _cholesky,
    aten.digamma.default: _digamma,
    aten.linalg_cholesky_ex.default: _cholesky_ex,
    aten.linalg_lu.default: _lu,
    aten.lu_unpack.default: _lu_unpack,
    aten.max_unpool2d.default: _unpooled,
    aten.max_unpool3d.default: _unpooled,
    aten.nextafter.default: _nextafter,
    aten.polygamma.default: _polygamma,
    aten.renorm.default: _renorm,
    aten.repeat_interleave: _repeat_interleave,
    aten.scatter.value_reduce: _scatter_number,
    aten.searchsorted: _searchsorted,
    aten.special_zeta: _zeta,
    torch.combinations: _combinations,
    torch.corrcoef: _corrcoef,
    torch.cov: _cov,
    torch.Tensor.corrcoef: _corrcoef,
    torch.Tensor.cov: _cov,
    torch.Tensor.repeat_interleave: _repeat_interleave,
}
"""By function or operation."""

WRAPPED: dict[Any, Callable[..., Any]] = {
    aten.cummax: at_indices_of,
    aten.cummin: at_indices_of,
    aten.cumprod: wide_sums_of,
    aten.cumsum: wide_sums_of,
    aten.linalg_pinv: pinv_of,
}
"""Lowerings of torchax that run inside others."""
