"""Operations that make, move and choose elements: `tf.zeros`, `tf.reshape`, `tf.gather`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from keras import ops

from tailrace.base.array_like import DTypeLike, ShapeLike, TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import Axes
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.tensorflow import host
from tailrace.compat.tensorflow.control.symbols import is_device_value
from tailrace.compat.tensorflow.dtypes import narrowed
from tailrace.compat.tensorflow.operations.elementwise import tensor
from tailrace.compat.tensorflow.operations.lengths import is_symbol, lengths_of
from tailrace.compat.tensorflow.operations.table import only, operation
from tailrace.errors import OptionError, ProgramError


def _listed(value: TensorLike) -> Any:
    """Lists as tensors; numbers as they are, so that they take the dtype of tensors beside them."""
    return tensor(value) if isinstance(value, list | tuple) else value


def shape_of(given: object) -> tuple[int, ...]:
    """A shape from a number, a list of numbers or an array of them."""
    if isinstance(given, int | np.integer):
        return (int(given),)
    if isinstance(given, list | tuple):
        return tuple(each if is_symbol(each) else int(each) for each in given)
    return tuple(int(each) for each in np.asarray(given).reshape(-1))


# -- making ---------------------------------------------------------------------------------------


@operation("constant")
def constant(value: TensorLike, dtype: DTypeLike = None, shape: ShapeLike = None) -> Any:
    """An array of a value; a number fills a shape. Text is TensorFlow's own: only the host has it."""
    if isinstance(value, str | bytes):
        return host.named("constant")(value, dtype, shape)
    found = tensor(value) if dtype is None else jnp.asarray(value, narrowed(dtype))
    if shape is None:
        return found
    wanted = shape_of(shape)
    # TensorFlow fills a shape with a single value, and reshapes anything else.
    if found.size == 1:
        return jnp.broadcast_to(found.reshape(()), wanted)
    return jnp.reshape(found, wanted)


@operation("convert_to_tensor")
def convert_to_tensor(
    value: TensorLike, dtype: DTypeLike = None, dtype_hint: DTypeLike = None
) -> Any:
    """A value as an array."""
    del dtype_hint
    return tensor(value) if dtype is None else ops.convert_to_tensor(value, narrowed(dtype))


@operation("zeros")
def zeros(shape: ShapeLike, dtype: DTypeLike = "float32") -> Any:
    """Zeros."""
    return jnp.zeros(shape_of(shape), narrowed(dtype))


@operation("ones")
def ones(shape: ShapeLike, dtype: DTypeLike = "float32") -> Any:
    """Ones."""
    return jnp.ones(shape_of(shape), narrowed(dtype))


@operation("fill")
def fill(dims: ShapeLike, value: TensorLike) -> Any:
    """A shape filled with a value."""
    return jnp.broadcast_to(tensor(value), shape_of(dims))


@operation("zeros_like")
def zeros_like(input: TensorLike, dtype: DTypeLike = None) -> Any:
    """Zeros of the shape of a tensor."""
    return ops.zeros_like(tensor(input), None if dtype is None else narrowed(dtype))


@operation("ones_like")
def ones_like(input: TensorLike, dtype: DTypeLike = None) -> Any:
    """Ones of the shape of a tensor."""
    return ops.ones_like(tensor(input), None if dtype is None else narrowed(dtype))


@operation("eye")
def eye(
    num_rows: int,
    num_columns: int | None = None,
    batch_shape: ShapeLike = None,
    dtype: DTypeLike = "float32",
) -> Any:
    """Ones on the diagonal."""
    found = jnp.eye(num_rows, num_columns, dtype=narrowed(dtype))
    batch = () if batch_shape is None else shape_of(batch_shape)
    return jnp.broadcast_to(found, (*batch, *found.shape))


@operation("linspace")
def linspace(start: TensorLike, stop: TensorLike, num: int, axis: int = 0) -> Any:
    """Numbers at equal distances."""
    return jnp.linspace(jnp.asarray(start), jnp.asarray(stop), int(num), axis=axis)


@operation("one_hot")
def one_hot(
    indices: TensorLike,
    depth: int,
    on_value: TensorLike = None,
    off_value: TensorLike = None,
    axis: int | None = None,
    dtype: DTypeLike = None,
) -> Any:
    """A row for each index, with `on_value` at it and `off_value` elsewhere."""
    kind = narrowed("float32" if dtype is None else dtype)
    found = ops.one_hot(tensor(indices), int(depth), axis=-1 if axis is None else axis, dtype=kind)
    if on_value is None and off_value is None:
        return found
    on, off = 1 if on_value is None else on_value, 0 if off_value is None else off_value
    return ops.where(ops.equal(found, 1), on, off)


@operation("sequence_mask")
def sequence_mask(lengths: TensorLike, maxlen: int | None = None, dtype: DTypeLike = "bool") -> Any:
    """For each length, true for as many places."""
    # Of a list the longest is known, in a program too.
    longest = np.max(lengths) if isinstance(lengths, list | tuple) else jnp.max(tensor(lengths))
    lengths = tensor(lengths)
    size = int(longest if maxlen is None else maxlen)
    return (jnp.arange(size) < lengths[..., None]).astype(narrowed(dtype))


@operation("meshgrid")
def meshgrid(*args: Any, indexing: str = "xy") -> Any:
    """Coordinates of a grid."""
    return ops.meshgrid(*map(tensor, args), indexing=indexing)


# -- shapes -----------------------------------------------------------------------------------------


@operation("shape")
def shape(input: TensorLike, out_type: DTypeLike = "int32") -> Any:
    """The shape, as an array; its lengths stay known in a program."""
    input = tensor(input)
    lengths: Any = ops.shape(input)
    return lengths_of(input, tuple(lengths), out_type)


@operation("size")
def size(input: TensorLike, out_type: DTypeLike = "int32") -> Any:
    """How many elements there are."""
    input = tensor(input)
    return lengths_of(input, math.prod(input.shape), out_type)


@operation("rank")
def rank(input: TensorLike) -> Any:
    """How many axes there are."""
    input = tensor(input)
    return lengths_of(input, len(input.shape), "int32")


# -- moving -----------------------------------------------------------------------------------------


@operation("reshape")
def reshape(tensor: TensorLike, shape: ShapeLike) -> Any:
    """The elements in another shape; one length may be -1, or the unknown one of a symbolic tensor."""
    if isinstance(shape, list | tuple):
        shape = [-1 if length is None else length for length in shape]
    return ops.reshape(tensor, shape_of(shape))


@operation("ensure_shape")
def ensure_shape(x: TensorLike, shape: ShapeLike) -> Any:
    """The tensor, if it has this shape; None is any length.

    Raises:
        IPUValueError: it has another.
    """
    found, wanted = tensor(x), tuple(shape)
    same = len(found.shape) == len(wanted) and all(
        b is None or a == b for a, b in zip(found.shape, wanted, strict=True)
    )
    if not same:
        raise IPUValueError(
            f"tf.ensure_shape: shape {tuple(found.shape)} is not compatible with {wanted}."
        )
    return found


@operation("expand_dims")
def expand_dims(input: TensorLike, axis: int) -> Any:
    """One more axis, of length 1."""
    return ops.expand_dims(input, axis)


@operation("squeeze")
def squeeze(input: TensorLike, axis: Axes = None, **older: Any) -> Any:
    """Without axes of length 1."""
    only("squeeze", older, "squeeze_dims")
    axis = older.get("squeeze_dims", axis)
    axis = None if axis is None or axis == [] else axis
    return ops.squeeze(input, tuple(axis) if isinstance(axis, list) else axis)


@operation("transpose")
def transpose(a: TensorLike, perm: ShapeLike = None, conjugate: bool = False) -> Any:
    """Axes in another order; backwards if none is given."""
    found = ops.transpose(a, None if perm is None else list(shape_of(perm)))
    return ops.conjugate(found) if conjugate else found


@operation("concat")
def concat(values: TensorLike, axis: int) -> Any:
    """Tensors one after the other along an axis."""
    return ops.concatenate(list(values), axis=int(axis))


@operation("stack")
def stack(values: TensorLike, axis: int = 0) -> Any:
    """Tensors along a new axis."""
    return ops.stack(list(values), axis=axis)


@operation("unstack")
def unstack(value: TensorLike, num: int | None = None, axis: int = 0) -> Any:
    """The parts along an axis, as a list."""
    parts: Any = ops.unstack(tensor(value), num, axis)
    return list(parts)


@operation("split")
def split(
    value: TensorLike, num_or_size_splits: ShapeLike, axis: int = 0, num: int | None = None
) -> Any:
    """A tensor cut along an axis, into equal parts or parts of these lengths."""
    del num
    if isinstance(num_or_size_splits, int | np.integer):
        parts: Any = ops.split(tensor(value), int(num_or_size_splits), axis=axis)
        return list(parts)
    sizes = list(shape_of(num_or_size_splits))
    if -1 in sizes:
        # The sum counts the -1 itself.
        sizes[sizes.index(-1)] = tensor(value).shape[axis] - sum(sizes) - 1
    parts = ops.split(tensor(value), list(np.cumsum(sizes)[:-1]), axis=axis)
    return list(parts)


@operation("tile")
def tile(input: TensorLike, multiples: ShapeLike) -> Any:
    """A tensor repeated along its axes."""
    return ops.tile(tensor(input), shape_of(multiples))


@operation("repeat")
def repeat(input: TensorLike, repeats: TensorLike, axis: int | None = None) -> Any:
    """Each element repeated."""
    # How often is a part of the shape of the result, and so known when the program is made.
    known = repeats if is_device_value(repeats) else np.asarray(repeats)
    return ops.repeat(tensor(input), known, axis=axis)


@operation("pad")
def pad(
    tensor: TensorLike,
    paddings: Sequence[Any],
    mode: str = "CONSTANT",
    constant_values: TensorLike = 0,
) -> Any:
    """A tensor with more elements around it."""
    tensor = _listed(tensor)
    widths = [tuple(shape_of(each)) for each in paddings]
    kind = mode.lower()
    # Keras refuses a value for the other modes.
    if kind == "constant":
        return ops.pad(tensor, widths, mode=kind, constant_values=constant_values)
    return ops.pad(tensor, widths, mode=kind)


@operation("broadcast_to")
def broadcast_to(input: TensorLike, shape: ShapeLike) -> Any:
    """A tensor repeated to fill a shape."""
    return ops.broadcast_to(tensor(input), shape_of(shape))


@operation("reverse")
def reverse(tensor: TensorLike, axis: Axes) -> Any:
    """Backwards along these axes."""
    return ops.flip(_listed(tensor), axis=tuple(shape_of(axis)))


@operation("roll")
def roll(input: TensorLike, shift: TensorLike, axis: Axes) -> Any:
    """Elements shifted along an axis; those shifted out are inserted at the other end."""
    return ops.roll(tensor(input), shift, axis)


# -- choosing ---------------------------------------------------------------------------------------


@operation("where")
def where(condition: TensorLike, x: TensorLike = None, y: TensorLike = None) -> Any:
    """The one where a condition holds and the other elsewhere; or the places where it holds."""
    # How many places there are is a shape: outside of programs only, where JAX refuses it by itself.
    if x is None and y is None:
        return jnp.argwhere(jnp.asarray(condition))
    return ops.where(*map(_listed, (condition, x, y)))


@operation("gather")
def gather(
    params: Tree,
    indices: TensorLike,
    validate_indices: object = None,
    axis: int | None = None,
    batch_dims: int = 0,
) -> Any:
    """The parts at these places along an axis.

    Raises:
        OptionError: `axis` is not the one after `batch_dims`.
    """
    del validate_indices
    axis = batch_dims if axis is None else axis
    if not batch_dims:
        return ops.take(params, indices, axis=axis)
    if axis != batch_dims:
        raise OptionError(
            f"tf.gather with batch_dims gathers along the axis after them. Received: axis={axis}, "
            f"batch_dims={batch_dims}. Transpose first."
        )
    params, indices = jnp.asarray(params), jnp.asarray(indices)
    # The batch's own indices, so that each row of `indices` reads from its own part.
    grid = jnp.ogrid[tuple(slice(0, length) for length in params.shape[:batch_dims])]
    extra = indices.ndim - batch_dims
    places = tuple(each.reshape(each.shape + (1,) * extra) for each in grid)
    return params[(*places, indices)]


@operation("gather_nd")
def gather_nd(params: Tree, indices: TensorLike, batch_dims: int = 0) -> Any:
    """The parts at these places; a place is a row of `indices`, in each element of a batch."""

    def parts(rows: jax.Array, places: jax.Array) -> Any:
        return rows[tuple(jnp.moveaxis(places, -1, 0))]

    for _ in range(batch_dims):
        parts = jax.vmap(parts)
    return parts(jnp.asarray(params), jnp.asarray(indices))


@operation("nn.space_to_depth")
def space_to_depth(input: TensorLike, block_size: int, data_format: str = "NHWC") -> Any:
    """Blocks of neighbouring places, each as the channels of one place.

    Raises:
        OptionError: channels do not come last.
    """
    found, size = _channels_last(input, data_format), block_size
    count, rows, columns, channels = found.shape
    parts = found.reshape(count, rows // size, size, columns // size, size, channels)
    # TensorFlow's order of channels: by the place within a block, then by channel.
    return parts.transpose(0, 1, 3, 2, 4, 5).reshape(
        count, rows // size, columns // size, size * size * channels
    )


@operation("nn.depth_to_space")
def depth_to_space(input: TensorLike, block_size: int, data_format: str = "NHWC") -> Any:
    """Channels of a place as a block of neighbouring places.

    Raises:
        OptionError: channels do not come last.
    """
    found, size = _channels_last(input, data_format), block_size
    count, rows, columns, channels = found.shape
    parts = found.reshape(count, rows, columns, size, size, channels // size**2)
    return parts.transpose(0, 1, 3, 2, 4, 5).reshape(
        count, rows * size, columns * size, channels // size**2
    )


def _channels_last(input: TensorLike, data_format: str) -> Any:
    if data_format != "NHWC":
        raise OptionError(
            f"Blocks are moved where channels come last: data_format 'NHWC'. "
            f"Received: {data_format!r}. Transpose before and after."
        )
    return tensor(input)


@operation("slice")
def slice_(input_: TensorLike, begin: ShapeLike, size: ShapeLike) -> Any:
    """A part that begins at a place and has a size; -1: up to the end."""
    found = tensor(input_)
    starts, sizes = shape_of(begin), shape_of(size)
    ends = [n if s == -1 else b + s for b, s, n in zip(starts, sizes, found.shape, strict=True)]
    return found[tuple(slice(b, e) for b, e in zip(starts, ends, strict=True))]


@operation("strided_slice")
def strided_slice(
    input_: TensorLike,
    begin: ShapeLike,
    end: ShapeLike,
    strides: ShapeLike = None,
    begin_mask: int = 0,
    end_mask: int = 0,
) -> Any:
    """A part of a tensor: along each axis from `begin` to before `end`, in steps."""
    starts, ends = shape_of(begin), shape_of(end)
    steps = [1] * len(starts) if strides is None else shape_of(strides)
    parts = [
        # Bit i of a mask: axis i has no begin, or no end.
        slice(None if begin_mask >> i & 1 else b, None if end_mask >> i & 1 else e, s)
        for i, (b, e, s) in enumerate(zip(starts, ends, steps, strict=True))
    ]
    return tensor(input_)[tuple(parts)]


@operation("boolean_mask")
def boolean_mask(tensor: TensorLike, mask: TensorLike, axis: int | None = None) -> Any:
    """The parts for which a mask holds; its values must be known, so not those of a program.

    Raises:
        ProgramError: the mask is a device value.
    """
    if is_device_value(mask):
        raise ProgramError(
            "tf.boolean_mask in a program: how many parts a mask selects is known only when it runs, "
            "and shapes must be known before. Use tf.where(mask, tensor, 0), or weights."
        )
    # numpy's places: how many there are must be known, and JAX would trace them.
    chosen = np.asarray(mask)
    before = (slice(None),) * (axis or 0)
    return jnp.asarray(tensor)[(*before, *np.nonzero(chosen))]


@operation("unique")
def unique(x: TensorLike, out_idx: DTypeLike = "int32") -> Any:
    """The different values in the order in which they come, and for each element which it is."""
    # NumPy sorts the values; TensorFlow keeps the order in which they come. On the host: how many
    # there are is a shape.
    values, first, inverse = np.unique(np.asarray(x), return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank_of = np.argsort(order)
    return jnp.asarray(values[order]), jnp.asarray(rank_of[inverse], narrowed(out_idx))


@operation("scatter_nd")
def scatter_nd(indices: TensorLike, updates: Tree, shape: ShapeLike) -> Any:
    """Zeros with values added at these places."""
    updates = jnp.asarray(updates)
    places = tuple(jnp.moveaxis(jnp.asarray(indices), -1, 0))
    return jnp.zeros(shape_of(shape), updates.dtype).at[places].add(updates)


def _scattered(name: str) -> None:
    @operation(f"tensor_scatter_nd_{name}")
    def scattered(tensor: TensorLike, indices: TensorLike, updates: Tree) -> Any:
        """A copy of a tensor with values put, or added, subtracted or compared, at these places."""
        places = tuple(jnp.moveaxis(jnp.asarray(indices), -1, 0))
        at = jnp.asarray(tensor).at[places]
        how = {"update": "set", "sub": "subtract"}.get(name, name)
        return getattr(at, how)(jnp.asarray(updates))


for _name in ("update", "add", "sub", "max", "min"):
    _scattered(_name)


for _name in ("dsplit", "hsplit", "vsplit", "dstack", "hstack", "vstack"):
    operation(f"experimental.numpy.{_name}")(getattr(ops, _name))
