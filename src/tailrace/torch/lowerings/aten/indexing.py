"""Entries read and written by indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import TensorLike
from tailrace.errors import ProgramError
from tailrace.torch.lowerings.promotion import BOOL, as_dtype, default_int, is_inexact
from tailrace.torch.lowerings.table import lowering
from tailrace.torch.torchax.ops import compositions

aten = torch.ops.aten


def rows_of(weight: TensorLike, index: TensorLike) -> Any:
    """Rows of a table; NaN, where PyTorch would raise an error, for an index that is out of range."""
    mode = "fill" if is_inexact(weight.dtype) else "clip"
    return weight.at[index].get(mode=mode, wrap_negative_indices=False)


@lowering(aten.embedding.default)
def embedding(
    weight: TensorLike,
    indices: TensorLike,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of a table; that of the padding has no gradient."""
    rows = rows_of(weight, indices)
    if scale_grad_by_freq:
        # How often the row of each entry is looked up; the value is that of the rows unchanged.
        times = jnp.zeros(weight.shape[0], rows.dtype).at[indices].add(1)[indices][..., None]
        scaled = rows / times
        rows = jax.lax.stop_gradient(rows) + (scaled - jax.lax.stop_gradient(scaled))
    if padding_idx >= 0:
        is_padding = (indices == padding_idx)[..., None]
        rows = jnp.where(is_padding, jax.lax.stop_gradient(rows), rows)
    return rows


@lowering(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: TensorLike,
    indices: TensorLike,
    offsets: TensorLike,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: TensorLike = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, Any, Any, Any]:
    """Sums, means or maxima over bags of rows; and three results of PyTorch's for its backward pass."""
    if scale_grad_by_freq:
        raise ProgramError(
            "embedding_bag has no form with scale_grad_by_freq on the device. Received: "
            "scale_grad_by_freq=True. Use embedding with it, and sum the rows."
        )
    starts = offsets[:-1] if include_last_offset else offsets
    count = starts.shape[0]
    bags = jnp.searchsorted(starts, jnp.arange(indices.size), side="right") - 1
    kept = indices != padding_idx
    rows = rows_of(weight, indices)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    sizes = jax.ops.segment_sum(kept.astype(default_int()), bags, count)
    if mode == 2:
        rows = jnp.where(kept[:, None], rows, -jnp.inf)
        out = jax.ops.segment_max(rows, bags, count)
        out = jnp.where(jnp.isneginf(out), jnp.zeros((), out.dtype), out)
    else:
        out = jax.ops.segment_sum(jnp.where(kept[:, None], rows, 0), bags, count)
        if mode == 1:
            out = out / jnp.maximum(sizes, 1)[:, None].astype(out.dtype)
    empty = jnp.zeros((0,), default_int())
    return out, bags.astype(default_int()), sizes, empty


@lowering(aten.gather.default)
def gather(x: TensorLike, dim: int, index: TensorLike, *, sparse_grad: bool = False) -> Any:
    """An entry along a dim for each index."""
    if not index.size:
        return jnp.zeros(index.shape, x.dtype)
    if not x.ndim or not index.ndim:
        flat = x.reshape(-1)[index.reshape(-1)]
        return flat.reshape(index.shape)
    dim = dim % x.ndim
    # PyTorch reads only as many entries along the other dims as there are indices.
    part = tuple(slice(None) if axis == dim else slice(n) for axis, n in enumerate(index.shape))
    return jnp.take_along_axis(x[part], index, dim)


@lowering(aten.index_select.default)
def index_select(x: TensorLike, dim: int, index: TensorLike) -> Any:
    """Entries along a dim, by one row of indices."""
    if not x.ndim:
        return x
    return jnp.take(x, index.reshape(-1), dim, mode="clip")


def _key(x: TensorLike, indices: Sequence[TensorLike | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


@lowering(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(x: TensorLike, indices: Sequence[TensorLike | None]) -> Any:
    """Entries by indices for some dims."""
    _refuse_masks(indices)
    return x[_key(x, indices)]


def _refuse_masks(indices: Sequence[TensorLike | None]) -> None:
    if any(one is not None and one.dtype in (bool, jnp.uint8) for one in indices):
        raise ProgramError(
            "An index may be no mask on the device: how many entries it selects would depend on "
            "values. "
            "Received: a boolean tensor as index. Select by torch.where, or multiply by the mask."
        )


@lowering(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    x: TensorLike,
    indices: Sequence[TensorLike | None],
    values: TensorLike,
    accumulate: bool = False,
) -> Any:
    """With entries by indices replaced, or added to."""
    values = as_dtype(values, x.dtype)
    masks = [one for one in indices if one is not None and one.dtype in (bool, jnp.uint8)]
    if masks:
        return _put_by_mask(x, indices, values, accumulate)
    return _written(x.at[_key(x, indices)], values, "add" if accumulate else "set")


def _put_by_mask(
    x: TensorLike, indices: Sequence[TensorLike | None], values: TensorLike, accumulate: bool
) -> Any:
    """One mask alone: a choice, or a count along it for a value for each entry."""
    given = [(place, one) for place, one in enumerate(indices) if one is not None]
    if len(given) > 1:
        _refuse_masks(indices)
    place, mask = given[0]
    mask = mask != 0
    shape = (*(1,) * place, *mask.shape, *(1,) * (x.ndim - place - mask.ndim))
    after = x.ndim - place - mask.ndim
    spread = mask.reshape(shape)
    entries = values.ndim - after - 1  # the dim of the values that goes along the mask
    if entries < 0 or values.shape[entries] == 1:
        if entries >= 0:
            lead = values.shape[:entries]
            values = values.reshape(*lead, *(1,) * mask.ndim, *values.shape[entries + 1 :])
        new = values
    else:
        order = jnp.cumsum(mask.ravel()) - 1
        found = jnp.take(values, order, entries, mode="clip")
        new = found.reshape(*values.shape[:entries], *mask.shape, *values.shape[entries + 1 :])
    if accumulate:
        new = x | new if x.dtype == BOOL else x + new
    return jnp.where(spread, new, x)


@lowering(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x: TensorLike, mask: TensorLike, value: TensorLike) -> Any:
    """A number where a mask is true."""
    return jnp.where(mask, as_dtype(value, x.dtype), x)


@lowering(aten.masked_scatter.default)
def masked_scatter(x: TensorLike, mask: TensorLike, source: TensorLike) -> Any:
    """The next entry of another array wherever a mask is true."""
    x, mask = jnp.broadcast_arrays(x, mask)
    order = (jnp.cumsum(mask.ravel()) - 1).reshape(mask.shape)
    return jnp.where(mask, jnp.take(source.ravel(), order, mode="clip"), x)


def _spots(index: TensorLike, dim: int) -> tuple[Any, ...]:
    """The place of each entry of an index along one dim."""
    spots: list[Any] = list(jnp.indices(index.shape, sparse=True))
    spots[dim] = index
    return tuple(spots)


def _scattered(x: TensorLike, dim: int, index: TensorLike, source: TensorLike, how: str) -> Any:
    if not x.ndim or not index.ndim:
        row = [jnp.reshape(part, -1) for part in (x, index, source)]
        return _scattered(row[0], 0, row[1], row[2], how).reshape(x.shape)
    source = as_dtype(source, x.dtype)
    if source.ndim:
        source = source[tuple(slice(n) for n in index.shape)]
    return _written(x.at[_spots(index, dim)], source, how)


def _written(place: Any, values: TensorLike, how: str) -> Any:
    """Values written to a place. A sum of booleans is whether one is true, a product whether all."""
    if values.dtype == BOOL:
        how = {"add": "max", "multiply": "min"}.get(how, how)
    return getattr(place, how)(values)


@lowering(aten.scatter.src, aten.scatter.value)
def scatter(x: TensorLike, dim: int, index: TensorLike, source: TensorLike) -> Any:
    """With an entry along a dim replaced for each index."""
    if not hasattr(source, "ndim"):
        source = jnp.full(index.shape, as_dtype(source, x.dtype))
    return _scattered(x, dim, index, source, "set")


@lowering(aten.scatter_add.default)
def scatter_add(x: TensorLike, dim: int, index: TensorLike, source: TensorLike) -> Any:
    """With something added along a dim for each index."""
    return _scattered(x, dim, index, source, "add")


@lowering(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_with(
    x: TensorLike, dim: int, index: TensorLike, source: TensorLike, *, reduce: str
) -> Any:
    """With something added, or multiplied, along a dim for each index."""
    if not hasattr(source, "ndim"):
        source = jnp.full(index.shape, as_dtype(source, x.dtype))
    return _scattered(x, dim, index, source, reduce)


@lowering(aten.scatter_reduce.two)
def scatter_reduce(
    x: TensorLike,
    dim: int,
    index: TensorLike,
    source: TensorLike,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """With a reduction along a dim for each index."""
    if not x.ndim or not index.ndim:
        row = [jnp.reshape(part, -1) for part in (x, index, source)]
        found = scatter_reduce(row[0], 0, row[1], row[2], reduce, include_self=include_self)
        return found.reshape(x.shape)
    dim = dim % x.ndim
    if not is_inexact(x.dtype) or reduce == "prod":
        return _reduce_exactly(x, dim, index, source, reduce, include_self=include_self)
    spots = _spots(index, dim)
    source = source[tuple(slice(n) for n in index.shape)]
    touched = jnp.zeros(x.shape, bool).at[spots].set(True)
    if reduce in ("amax", "amin"):
        return _extreme(x, source, spots, touched, reduce, include_self)
    base = x if include_self else jnp.where(touched, jnp.zeros((), x.dtype), x)
    out = base.at[spots].add(source)
    if reduce == "mean":
        count = jnp.full(x.shape, int(include_self)).at[spots].add(1)
        out = out / jnp.where(touched, jnp.maximum(count, 1), 1).astype(x.dtype)
    return out


_reduce_exactly = compositions.scatter_reduce_of(lambda *_: None)


def _extreme(
    x: TensorLike, source: TensorLike, spots: Any, touched: Any, reduce: str, include_self: bool
) -> Any:
    """The largest or smallest at each place; equal ones share the gradient, as in PyTorch."""
    start = -jnp.inf if reduce == "amax" else jnp.inf
    base = x if include_self else jnp.where(touched, jnp.asarray(start, x.dtype), x)
    fixed_base, fixed = jax.lax.stop_gradient((base, source))
    place = fixed_base.at[spots]
    found = place.max(fixed) if reduce == "amax" else place.min(fixed)
    # The value is the extreme itself; beside it the terms that reach it, which are 0 and have the
    # gradient.
    own = (fixed_base == found) & (include_self | ~touched)
    hit = fixed == found[spots]
    count = own.astype(x.dtype).at[spots].add(hit.astype(x.dtype))
    share = 1 / jnp.maximum(count, 1)
    change = jnp.where(own, (base - fixed_base) * share, 0)
    change = change.at[spots].add(jnp.where(hit, (source - fixed) * share[spots], 0))
    return found + change


@lowering(aten.index_add.default)
def index_add(
    x: TensorLike, dim: int, index: TensorLike, source: TensorLike, *, alpha: complex = 1
) -> Any:
    """With slices added along a dim."""
    if not x.ndim:
        return index_add(x.reshape(1), 0, index, source.reshape(-1), alpha=alpha).reshape(())
    source = as_dtype(source, x.dtype) * as_dtype(alpha, x.dtype)
    if not source.ndim:
        source = source.reshape((1,) * x.ndim)
    at = (*(slice(None),) * (dim % x.ndim), index.reshape(-1))
    return x.at[at].add(source)


@lowering(aten.index_copy.default)
def index_copy(x: TensorLike, dim: int, index: TensorLike, source: TensorLike) -> Any:
    """With slices replaced along a dim."""
    if not x.ndim:
        return as_dtype(source, x.dtype).reshape(())
    if not source.ndim:
        source = source.reshape((1,) * x.ndim)
    at = (*(slice(None),) * (dim % x.ndim), index.reshape(-1))
    return x.at[at].set(as_dtype(source, x.dtype))


@lowering(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(x: TensorLike, dim: int, index: TensorLike, value: TensorLike) -> Any:
    """With one number in slices along a dim."""
    if not x.ndim:
        return jnp.broadcast_to(as_dtype(value, x.dtype), ())
    at = (*(slice(None),) * (dim % x.ndim), index.reshape(-1))
    return x.at[at].set(as_dtype(value, x.dtype))


@lowering(aten.index_reduce.default)
def index_reduce(
    x: TensorLike,
    dim: int,
    index: TensorLike,
    source: TensorLike,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """With slices reduced along a dim."""
    if not source.ndim:
        x, source = x.reshape(1), source.reshape(1)
        return index_reduce(x, 0, index, source, reduce, include_self=include_self).reshape(())
    shape = [1] * source.ndim
    shape[dim] = -1
    places = jnp.broadcast_to(index.reshape(shape), source.shape)
    return scatter_reduce(x, dim, places, source, reduce, include_self=include_self)


@lowering(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats: TensorLike, *, output_size: int | None = None) -> Any:
    """The numbers of entries, each as often as it is counted."""
    if output_size is None:
        raise ProgramError(
            "repeat_interleave with a tensor of counts needs to know how many entries that makes. "
            "Received: no output_size. Pass output_size=."
        )
    places = jnp.arange(repeats.shape[0], dtype=default_int())
    return jnp.repeat(places, repeats, total_repeat_length=output_size)


@lowering(aten.take.default)
def take(x: TensorLike, index: TensorLike) -> Any:
    """Entries by their number."""
    return x.ravel()[index]


@lowering(aten.put.default)
def put(x: TensorLike, index: TensorLike, source: TensorLike, accumulate: bool = False) -> Any:
    """With entries by their number replaced, or added to."""
    place = x.ravel().at[index.ravel()]
    source = as_dtype(source, x.dtype).ravel()
    return (place.add(source) if accumulate else place.set(source)).reshape(x.shape)
