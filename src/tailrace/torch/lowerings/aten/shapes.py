"""Shapes: views of PyTorch are values here, because the graph is functional."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import ShapeLike, TensorLike
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.lowerings.promotion import as_dtype, common_dtype
from tailrace.torch.lowerings.table import lowering

aten = torch.ops.aten


@lowering(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default
)
def view(x: TensorLike, size: ShapeLike) -> Any:
    """In another shape; -1 is what is left."""
    return jnp.reshape(x, tuple(size))


@lowering(aten.view.dtype)
def view_dtype(x: TensorLike, dtype: torch.dtype) -> Any:
    """The bits as another dtype."""
    return x.view(dtype_on_device(dtype))


@lowering(aten.permute.default, aten.permute_copy.default)
def permute(x: TensorLike, dims: Sequence[int]) -> Any:
    """With its dims in another order."""
    return jnp.transpose(x, tuple(dims))


@lowering(aten.transpose.int)
def transpose(x: TensorLike, dim0: int, dim1: int) -> Any:
    """With two dims exchanged."""
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowering(aten.t.default)
def t(x: TensorLike) -> Any:
    """A matrix turned."""
    return x.T


@lowering(aten.expand.default)
def expand(x: TensorLike, size: ShapeLike, *, implicit: bool = False) -> Any:
    """Repeated along dims of one entry; -1 keeps a dim."""
    before = len(size) - x.ndim
    shape = [x.shape[dim - before] if n == -1 else n for dim, n in enumerate(size)]
    return jnp.broadcast_to(x, shape)


@lowering(aten.unsqueeze.default)
def unsqueeze(x: TensorLike, dim: int) -> Any:
    """With a dim of one entry."""
    return jnp.expand_dims(x, dim)


@lowering(aten.squeeze.default)
def squeeze_all(x: TensorLike) -> Any:
    """Without dims of one entry."""
    return jnp.squeeze(x)


@lowering(aten.squeeze.dim)
def squeeze(x: TensorLike, dim: int) -> Any:
    """Without a dim, if it has one entry."""
    return squeeze_dims(x, [dim])


@lowering(aten.squeeze.dims)
def squeeze_dims(x: TensorLike, dims: Sequence[int]) -> Any:
    """Without those dims that have one entry."""
    if not x.ndim:
        return x
    return jax.lax.squeeze(x, [dim % x.ndim for dim in dims if x.shape[dim] == 1])


@lowering(aten.select.int)
def select(x: TensorLike, dim: int, index: int) -> Any:
    """One entry along a dim."""
    return jax.lax.index_in_dim(x, index, dim, keepdims=False)


def bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Where a slice starts and ends, by Python's rules for what is negative or beyond."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


@lowering(aten.slice.Tensor)
def slice_of(
    x: TensorLike, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """A slice along a dim."""
    first, last = bounds(x.shape[dim], start, end)
    if (first, last, step) == (0, x.shape[dim], 1):
        return x
    return jax.lax.slice_in_dim(x, first, last, step, dim)


@lowering(aten.narrow.default)
def narrow(x: TensorLike, dim: int, start: int, length: int) -> Any:
    """A slice by its length."""
    start = start + x.shape[dim] if start < 0 else start
    return jax.lax.slice_in_dim(x, start, start + length, 1, dim)


def _place(x: TensorLike, dim: int, part: Any) -> tuple[Any, ...]:
    return (*(slice(None),) * (dim % x.ndim), part)


@lowering(aten.slice_scatter.default)
def slice_scatter(
    x: TensorLike,
    source: TensorLike,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    """With a slice replaced."""
    first, last = bounds(x.shape[dim], start, end)
    source = as_dtype(source, x.dtype)
    if step == 1:
        shape = list(x.shape)
        shape[dim] = last - first
        if (first, last) == (0, x.shape[dim]):
            return jnp.broadcast_to(source, shape)
        starts = [0] * x.ndim
        starts[dim] = first
        return jax.lax.dynamic_update_slice(x, jnp.broadcast_to(source, shape), starts)
    return x.at[_place(x, dim, slice(first, last, step))].set(source)


@lowering(aten.select_scatter.default)
def select_scatter(x: TensorLike, source: TensorLike, dim: int, index: int) -> Any:
    """With one entry along a dim replaced."""
    return x.at[_place(x, dim, index)].set(as_dtype(source, x.dtype))


@lowering(aten.diagonal.default)
def diagonal(x: TensorLike, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """The diagonal of two dims, as the last dim."""
    return jnp.diagonal(x, offset, dim1, dim2)


@lowering(aten.diagonal_scatter.default)
def diagonal_scatter(
    x: TensorLike, source: TensorLike, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    """With a diagonal replaced."""
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows, columns = moved.shape[-2:]
    first, second = max(-offset, 0), max(offset, 0)
    count = max(0, min(rows - first, columns - second))
    at = np.arange(count)
    moved = moved.at[..., at + first, at + second].set(as_dtype(source, x.dtype))
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


@lowering(aten.cat.default)
def cat(arrays: Sequence[TensorLike], dim: int = 0) -> Any:
    """One after the other; what PyTorch calls empty, [0], counts for nothing."""
    dtype = common_dtype(*arrays)
    real = [one for one in arrays if one.shape != (0,)] or arrays[:1]
    parts = [as_dtype(one, dtype) for one in real]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, dim)


@lowering(aten.stack.default)
def stack(arrays: Sequence[TensorLike], dim: int = 0) -> Any:
    """Along a new dim."""
    dtype = common_dtype(*arrays)
    return jnp.stack([as_dtype(one, dtype) for one in arrays], dim)


@lowering(aten.split_with_sizes.default, aten.split_with_sizes_copy.default)
def split_with_sizes(x: TensorLike, sizes: Sequence[int], dim: int = 0) -> tuple[Any, ...]:
    """In parts of these sizes."""
    ends = np.cumsum([0, *sizes])
    return tuple(
        jax.lax.slice_in_dim(x, int(first), int(last), 1, dim)
        for first, last in itertools.pairwise(ends)
    )


@lowering(aten.split.Tensor)
def split(x: TensorLike, size: int, dim: int = 0) -> tuple[Any, ...]:
    """In parts of one size; the last may be smaller."""
    total = x.shape[dim]
    count = max(1, -(-total // size)) if size else 1
    sizes = [size] * (count - 1) + [total - size * (count - 1)]
    return split_with_sizes(x, sizes, dim)


@lowering(aten.chunk.default)
def chunk(x: TensorLike, chunks: int, dim: int = 0) -> tuple[Any, ...]:
    """In a number of parts."""
    return split(x, -(-x.shape[dim] // chunks), dim)


@lowering(aten.unbind.int)
def unbind(x: TensorLike, dim: int = 0) -> tuple[Any, ...]:
    """Each entry along a dim."""
    return tuple(jax.lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim]))


@lowering(aten.repeat.default)
def repeat(x: TensorLike, repeats: Sequence[int]) -> Any:
    """Copies along each dim."""
    return jnp.tile(x, tuple(repeats))


@lowering(aten.flip.default)
def flip(x: TensorLike, dims: Sequence[int]) -> Any:
    """From the end to the beginning."""
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@lowering(aten.roll.default)
def roll(x: TensorLike, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Moved along dims; what leaves comes in at the other end."""
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowering(aten.unfold.default)
def unfold(x: TensorLike, dimension: int, size: int, step: int) -> Any:
    """Windows along a dim, as the last dim."""
    if not x.ndim:
        return x.reshape(1)[:size]
    count = (x.shape[dimension] - size) // step + 1
    index = np.arange(count)[:, None] * step + np.arange(size)
    windows = jnp.take(x, index, dimension)
    return jnp.moveaxis(windows, dimension % x.ndim + 1, -1)


@lowering(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(
    x: TensorLike, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """Entries by their places in memory, of an array that is contiguous."""
    flat = x.reshape(-1)
    start = storage_offset or 0
    if math.prod(size) == x.size and list(stride) == _strides(size) and not start:
        return flat.reshape(tuple(size))
    return flat[_places(size, stride, start)]


@lowering(aten.as_strided_scatter.default)
def as_strided_scatter(
    x: TensorLike,
    source: TensorLike,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    """With entries replaced by their places in memory."""
    index = _places(size, stride, storage_offset or 0)
    return x.reshape(-1).at[index].set(as_dtype(source, x.dtype)).reshape(x.shape)


def _strides(size: Sequence[int]) -> list[int]:
    return [math.prod(size[dim + 1 :]) for dim in range(len(size))]


def _places(size: Sequence[int], stride: Sequence[int], start: int) -> np.ndarray:
    index = np.full(tuple(size), start)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[dim] = count
        index = index + (np.arange(count) * step).reshape(shape)
    return index


@lowering(
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.clone.default,
    aten.contiguous.default,
)
def same(x: TensorLike) -> Any:
    """The value as it is: what is not differentiated is said by an operation of its own."""
    return x


@lowering(aten.view_as_real.default)
def view_as_real(x: TensorLike) -> Any:
    """Complex numbers as pairs."""
    return jnp.stack([jnp.real(x), jnp.imag(x)], -1)


@lowering(aten.view_as_complex.default)
def view_as_complex(x: TensorLike) -> Any:
    """Pairs as complex numbers."""
    return jax.lax.complex(x[..., 0], x[..., 1])


@lowering(aten.constant_pad_nd.default)
def constant_pad_nd(x: TensorLike, pad: Sequence[int], value: complex = 0) -> Any:
    """A number around; less than none cuts off."""
    widths = [(0, 0, 0)] * x.ndim
    for number, (low, high) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        widths[x.ndim - 1 - number] = (low, high, 0)
    return jax.lax.pad(x, as_dtype(value, x.dtype), widths)


def _padded(x: TensorLike, padding: Sequence[int], mode: str) -> Any:
    widths = [(0, 0)] * x.ndim
    cuts = [slice(None)] * x.ndim
    for number, (low, high) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        dim = x.ndim - 1 - number
        widths[dim] = (max(0, low), max(0, high))
        cuts[dim] = slice(max(0, -low), min(0, high) or None)
    # What is cut off is cut afterwards: the border is that of the whole.
    return jnp.pad(x, widths, mode=mode)[tuple(cuts)]


@lowering(
    aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default
)
def reflection_pad(x: TensorLike, padding: Sequence[int]) -> Any:
    """A mirror image around."""
    return _padded(x, padding, "reflect")


@lowering(
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default
)
def replication_pad(x: TensorLike, padding: Sequence[int]) -> Any:
    """The border repeated around."""
    return _padded(x, padding, "edge")


@lowering(aten.tril.default)
def tril(x: TensorLike, diagonal: int = 0) -> Any:
    """0 above a diagonal."""
    return jnp.tril(x, diagonal)


@lowering(aten.triu.default)
def triu(x: TensorLike, diagonal: int = 0) -> Any:
    """0 below a diagonal."""
    return jnp.triu(x, diagonal)


@lowering(aten.sym_size.int)
def sym_size(x: TensorLike, dim: int) -> int:
    """The entries along a dim."""
    return x.shape[dim]


@lowering(aten.sym_numel.default)
def sym_numel(x: TensorLike) -> int:
    """All entries."""
    return x.size
