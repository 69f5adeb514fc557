"""Operations that reduce: `tf.reduce_*`, `tf.argmax`, cumulative sums, sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from keras import ops

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.compat.arguments import Axes
from tailrace.compat.tensorflow.control.symbols import is_device_value
from tailrace.compat.tensorflow.dtypes import narrowed
from tailrace.compat.tensorflow.operations.elementwise import tensor
from tailrace.compat.tensorflow.operations.table import only, operation
from tailrace.errors import ProgramError


def _euclidean(x: TensorLike, axis: Axes = None, keepdims: bool = False) -> Any:
    return ops.sqrt(ops.sum(ops.square(x), axis=axis, keepdims=keepdims))


def _sum(x: TensorLike, axis: Axes = None, keepdims: bool = False) -> Any:
    return _same(x, ops.sum(x, axis=axis, keepdims=keepdims))


def _prod(x: TensorLike, axis: Axes = None, keepdims: bool = False) -> Any:
    return _same(x, ops.prod(x, axis=axis, keepdims=keepdims))


def _mean(x: TensorLike, axis: Axes = None, keepdims: bool = False) -> Any:
    # TensorFlow's mean of integers is an integer.
    found = ops.mean(x, axis=axis, keepdims=keepdims)
    if not jnp.issubdtype(_dtype(x), jnp.integer):
        return _same(x, found)
    total: Any = ops.sum(x, axis=axis, keepdims=keepdims)
    count = x.size // total.size
    return ops.cast(ops.trunc(ops.true_divide(total, count)), _dtype(x))


def _dtype(x: TensorLike) -> Any:
    return jnp.dtype(str(getattr(x.dtype, "name", x.dtype)))


def _same(x: TensorLike, found: object) -> Any:
    """With the dtype of `x`, which TensorFlow keeps where others widen it."""
    return found if _dtype(found) == _dtype(x) else ops.cast(found, _dtype(x))


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_all": ops.all,
    "reduce_any": ops.any,
    "reduce_euclidean_norm": _euclidean,
    "reduce_logsumexp": ops.logsumexp,
    "reduce_max": ops.max,
    "reduce_mean": _mean,
    "reduce_min": ops.min,
    "reduce_prod": _prod,
    "reduce_std": ops.std,
    "reduce_sum": _sum,
    "reduce_variance": ops.var,
}


def _axes(axis: Axes) -> Any:
    if axis is None or isinstance(axis, int):
        return axis
    found = [int(each) for each in np.asarray(axis).reshape(-1)]
    return tuple(found)


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(
        input_tensor: TensorLike, axis: Axes = None, keepdims: bool = False, **older: Any
    ) -> Any:
        """Over an axis, several, or all of them, as in TensorFlow."""
        only("reduce_...", older, "reduction_indices", "keep_dims")
        axis = older.get("reduction_indices", axis)
        keepdims = older.get("keep_dims", keepdims)
        if axis is not None and _axes(axis) == ():  # each element by itself
            one = ops.expand_dims(tensor(input_tensor), -1)
            return function(one, axis=-1, keepdims=False)
        return function(tensor(input_tensor), axis=_axes(axis), keepdims=bool(keepdims))

    return computed


_AT_TOP = ("all", "any", "logsumexp", "max", "mean", "min", "prod", "sum")
for _name, _function in REDUCTIONS.items():
    _top = _name.removeprefix("reduce_") in _AT_TOP
    operation(f"math.{_name}", *[_name] * _top)(_reduction(_function))


@operation("math.argmax", "argmax")
def argmax(
    input: TensorLike, axis: Axes = None, output_type: DTypeLike = "int64", **older: Any
) -> Any:
    """The place of the largest element along an axis; along the first if none is given."""
    only("argmax", older, "dimension")
    axis = older.get("dimension", axis)
    return ops.cast(ops.argmax(input, axis=0 if axis is None else axis), narrowed(output_type))


@operation("math.argmin", "argmin")
def argmin(
    input: TensorLike, axis: Axes = None, output_type: DTypeLike = "int64", **older: Any
) -> Any:
    """The place of the smallest element along an axis; along the first if none is given."""
    only("argmin", older, "dimension")
    axis = older.get("dimension", axis)
    return ops.cast(ops.argmin(input, axis=0 if axis is None else axis), narrowed(output_type))


@operation("math.count_nonzero")
def count_nonzero(
    input: TensorLike, axis: Axes = None, keepdims: bool = False, dtype: DTypeLike = "int64"
) -> Any:
    """How many elements are not 0."""
    some = ops.cast(ops.not_equal(tensor(input), 0), "int32")
    return ops.cast(ops.sum(some, axis=_axes(axis), keepdims=keepdims), narrowed(dtype))


@operation("math.zero_fraction", "nn.zero_fraction")
def zero_fraction(value: TensorLike) -> Any:
    """The share of elements that are 0."""
    return ops.mean(ops.cast(ops.equal(tensor(value), 0), "float32"))


def _cumulated(
    function: Callable[..., Any],
    start: float,
    x: TensorLike,
    axis: int,
    exclusive: bool,
    reverse: bool,
) -> Any:
    x = tensor(x)
    x = ops.flip(x, axis=axis) if reverse else x
    found = _same(x, function(x, axis=axis))
    # Shifted by one, with the neutral element in front.
    if exclusive:
        first = ops.full_like(jax.lax.slice_in_dim(x, 0, 1, axis=axis), start)
        found = ops.concatenate(
            [first, jax.lax.slice_in_dim(found, 0, x.shape[axis] - 1, axis=axis)], axis=axis
        )
    return ops.flip(found, axis=axis) if reverse else found


@operation("math.cumsum", "cumsum")
def cumsum(x: TensorLike, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Any:
    """Sums of the elements up to each; without it if `exclusive`."""
    return _cumulated(ops.cumsum, 0, x, axis, exclusive, reverse)


@operation("math.cumprod")
def cumprod(x: TensorLike, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Any:
    """Products of the elements up to each; without it if `exclusive`."""
    return _cumulated(ops.cumprod, 1, x, axis, exclusive, reverse)


@operation("sort")
def sort(values: TensorLike, axis: int = -1, direction: str = "ASCENDING") -> Any:
    """The elements along an axis in order."""
    found = ops.sort(tensor(values), axis=axis)
    return ops.flip(found, axis=axis) if direction.upper() == "DESCENDING" else found


@operation("argsort")
def argsort(
    values: TensorLike, axis: int = -1, direction: str = "ASCENDING", stable: bool = False
) -> Any:
    """Where the elements along an axis are, in order."""
    values = tensor(values)
    # Always stable, which fulfils both: without it TensorFlow promises no order of equal elements.
    return jnp.argsort(values, axis=axis, descending=direction.upper() == "DESCENDING", stable=True)


@operation("searchsorted")
def searchsorted(
    sorted_sequence: TensorLike,
    values: TensorLike,
    side: str = "left",
    out_type: DTypeLike = "int32",
) -> Any:
    """Where values would be inserted, in each row of sorted ones."""
    rows, given = jnp.asarray(sorted_sequence), jnp.asarray(values)

    def places(row: jax.Array, value: jax.Array) -> Any:
        return jnp.searchsorted(row, value, side=side).astype(narrowed(out_type))

    # `jnp.searchsorted` takes one row: mapped over each axis before the last.
    for _ in rows.shape[:-1]:
        places = jax.vmap(places)
    return places(rows, given)


class TopK(NamedTuple):
    """What `top_k` returns."""

    values: Any
    indices: Any


@operation("math.top_k", "nn.top_k")
def top_k(input: TensorLike, k: int = 1, sorted: bool = True) -> Any:
    """The k largest elements of each row, and where they are."""
    found: Any = ops.top_k(tensor(input), k, sorted)
    return TopK(*found)


@operation("math.in_top_k", "nn.in_top_k")
def in_top_k(targets: TensorLike, predictions: TensorLike, k: int) -> Any:
    """Whether the target of each row is among its k largest elements."""
    return ops.in_top_k(tensor(targets), tensor(predictions), k)


@operation("math.bincount")
def bincount(arr: TensorLike, weights: TensorLike = None, minlength: int | None = None) -> Any:
    """How often each number occurs."""
    return ops.bincount(tensor(arr), weights=weights, minlength=minlength or 0)


def _segments(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(data: TensorLike, segment_ids: TensorLike, num_segments: TensorLike = None) -> Any:
        """Over the rows of each segment, by the numbers in `segment_ids`.

        Raises:
            ProgramError: the number of segments is known only when the program runs.
        """
        if num_segments is None and is_device_value(segment_ids):
            raise ProgramError(
                "How many segments there are is a part of the shape of the result, and must be known "
                "when the program is made. Use tf.math.unsorted_segment_... with num_segments=."
            )
        count = int(np.max(segment_ids)) + 1 if num_segments is None else int(num_segments)
        return function(jnp.asarray(data), jnp.asarray(segment_ids), num_segments=count)

    return computed


for _name, _function in {
    "segment_max": jax.ops.segment_max,
    "segment_min": jax.ops.segment_min,
    "segment_prod": jax.ops.segment_prod,
    "segment_sum": jax.ops.segment_sum,
}.items():
    # One function for both: sorted numbers are a special case.
    operation(f"math.unsorted_{_name}")(_segments(_function))
    operation(f"math.{_name}")(_segments(_function))
