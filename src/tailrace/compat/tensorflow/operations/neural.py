"""Operations of networks: `tf.nn.*`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from keras import ops

from tailrace.base.array_like import ShapeLike, TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import Axes, SeedLike
from tailrace.compat.tensorflow.older_words import note_read
from tailrace.compat.tensorflow.operations.elementwise import tensor
from tailrace.compat.tensorflow.operations.random_numbers import next_seed
from tailrace.compat.tensorflow.operations.table import only, operation
from tailrace.errors import OptionError

ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "elu": ops.elu,
    "relu": ops.relu,
    "relu6": ops.relu6,
    "selu": ops.selu,
    "sigmoid": ops.sigmoid,
    "silu": ops.silu,
    "softplus": ops.softplus,
    "softsign": ops.softsign,
    "swish": ops.silu,
    "tanh": ops.tanh,
}


def _activation(name: str, function: Callable[..., Any]) -> None:
    def computed(features: TensorLike) -> Any:
        """Element by element, as in TensorFlow."""
        return function(tensor(features))

    operation(f"nn.{name}")(computed)


for _name, _function in ACTIVATIONS.items():
    _activation(_name, _function)


@operation("nn.gelu")
def gelu(features: TensorLike, approximate: bool = False) -> Any:
    """The Gaussian error linear unit."""
    return ops.gelu(tensor(features), approximate)


@operation("nn.leaky_relu")
def leaky_relu(features: TensorLike, alpha: float = 0.2) -> Any:
    """A rectifier with a slope for negative values."""
    return ops.leaky_relu(tensor(features), alpha)


@operation("nn.softmax")
def softmax(logits: TensorLike, axis: int | None = None) -> Any:
    """Shares along an axis, which add up to 1."""
    # None is the last axis in TensorFlow, and all axes in JAX.
    return ops.softmax(tensor(logits), -1 if axis is None else axis)


@operation("nn.log_softmax")
def log_softmax(logits: TensorLike, axis: int | None = None) -> Any:
    """Logarithms of shares along an axis."""
    return ops.log_softmax(tensor(logits), -1 if axis is None else axis)


@operation("nn.crelu")
def crelu(features: TensorLike, axis: int = -1) -> Any:
    """The positive part and the negative part, one after the other."""
    features = tensor(features)
    return ops.relu(ops.concatenate([features, ops.negative(features)], axis=axis))


# -- losses -------------------------------------------------------------------------------------------


@operation("nn.sigmoid_cross_entropy_with_logits")
def sigmoid_cross_entropy_with_logits(labels: TensorLike = None, logits: TensorLike = None) -> Any:
    """The cross entropy of independent probabilities, for each element."""
    logits, labels = tensor(logits), tensor(labels)
    # The form that does not overflow for large logits of either sign.
    less = ops.log1p(ops.exp(ops.negative(ops.absolute(logits))))
    return ops.add(ops.subtract(ops.relu(logits), ops.multiply(logits, labels)), less)


@operation("nn.softmax_cross_entropy_with_logits", "nn.softmax_cross_entropy_with_logits_v2")
def softmax_cross_entropy_with_logits(
    labels: TensorLike, logits: TensorLike, axis: int = -1
) -> Any:
    """The cross entropy of distributions, for each row."""
    logs = ops.log_softmax(tensor(logits), axis)
    return ops.negative(ops.sum(ops.multiply(labels, logs), axis=axis))


@operation("nn.sparse_softmax_cross_entropy_with_logits")
def sparse_softmax_cross_entropy_with_logits(labels: TensorLike, logits: TensorLike) -> Any:
    """The cross entropy of classes, for each row."""
    logs = ops.log_softmax(tensor(logits), -1)
    # Labels may be of any integer dtype; an index of JAX may not be a float.
    labels = ops.cast(tensor(labels), "int32")
    return ops.negative(
        ops.squeeze(ops.take_along_axis(logs, ops.expand_dims(labels, -1), axis=-1), -1)
    )


@operation("nn.l2_loss")
def l2_loss(t: TensorLike) -> Any:
    """Half of the sum of squares."""
    return ops.divide(ops.sum(ops.square(tensor(t))), 2)


# -- normalisation ------------------------------------------------------------------------------------


@operation("nn.l2_normalize", "math.l2_normalize", "linalg.l2_normalize")
def l2_normalize(x: TensorLike, axis: Axes = None, epsilon: float = 1e-12) -> Any:
    """Scaled so that the norm along an axis is 1."""
    x = tensor(x)
    total = ops.sum(ops.square(x), axis=axis, keepdims=True)
    return ops.multiply(x, ops.rsqrt(ops.maximum(total, epsilon)))


@operation("nn.moments")
def moments(x: TensorLike, axes: Axes, shift: object = None, keepdims: bool = False) -> Any:
    """Mean and variance over axes."""
    del shift
    return ops.moments(tensor(x), tuple(axes) if isinstance(axes, list) else axes, keepdims)


@operation("nn.batch_normalization")
def batch_normalization(
    x: TensorLike,
    mean: TensorLike,
    variance: TensorLike,
    offset: TensorLike,
    scale: TensorLike,
    variance_epsilon: float,
) -> Any:
    """Scaled and moved by statistics that are given."""
    # TensorFlow's order of operations: one product and one sum for each element.
    factor = ops.rsqrt(ops.add(variance, variance_epsilon))
    factor = factor if scale is None else ops.multiply(factor, scale)
    moved = ops.multiply(ops.negative(mean), factor)
    moved = moved if offset is None else ops.add(moved, offset)
    return ops.add(ops.multiply(x, factor), moved)


@operation("nn.dropout")
def dropout_now(
    x: TensorLike,
    rate: TensorLike = None,
    noise_shape: ShapeLike = None,
    seed: SeedLike = None,
    **older: Any,
) -> Any:
    """Elements set to 0 by chance, the others scaled up; the second argument is the share that goes."""
    if "keep_prob" not in older:
        note_read("nn.dropout")
    return dropout(x, rate, noise_shape, seed, **older)


def dropout(
    x: TensorLike,
    rate: TensorLike = None,
    noise_shape: ShapeLike = None,
    seed: SeedLike = None,
    **older: Any,
) -> Any:
    """Elements set to 0 by chance, the others scaled up."""
    import keras

    only("nn.dropout", older, "keep_prob")
    rate = 1 - older["keep_prob"] if "keep_prob" in older else rate
    return keras.random.dropout(tensor(x), rate, noise_shape, seed=next_seed(seed))


@operation("nn.bias_add")
def bias_add(value: TensorLike, bias: TensorLike, data_format: str | None = None) -> Any:
    """A bias for each channel."""
    # Channels are the second axis: the bias is broadcast over those after it.
    if data_format is not None and data_format.startswith("NC") and data_format != "NC":
        bias = ops.reshape(bias, (-1, *[1] * (len(value.shape) - 2)))
    return ops.add(value, bias)


@operation("nn.embedding_lookup")
def embedding_lookup(
    params: Tree, ids: TensorLike, max_norm: TensorLike = None, **partition: Any
) -> Any:
    """Rows of a table.

    Raises:
        OptionError: `max_norm` is given, or the table comes in parts.
    """
    only("nn.embedding_lookup", partition, "partition_strategy", "validate_indices")
    # Refused, not joined: TensorFlow distributes rows over the parts by its `partition_strategy`.
    if isinstance(params, list | tuple) and len(params) > 1:
        raise OptionError(
            f"tf.nn.embedding_lookup takes one table. Received: a list of {len(params)}, which "
            f"TensorFlow takes for the parts of one. Join them first: tf.concat(params, 0)."
        )
    if max_norm is not None:
        raise OptionError(
            "tf.nn.embedding_lookup is available without max_norm: clip the rows after it."
        )
    return ops.take(params, ids, axis=0)


# -- convolutions and pools ---------------------------------------------------------------------------


def _format(data_format: str | None) -> str:
    first = data_format is not None and data_format.startswith("NC")
    return "channels_first" if first else "channels_last"


def _middle(strides: ShapeLike, dims: int, data_format: str | None) -> Any:
    """The strides of the axes of an image, from a number, one for each of them or one for each axis."""
    if isinstance(strides, int):
        return strides
    strides = [int(each) for each in strides]
    if len(strides) == dims + 2:
        strides = strides[2:] if _format(data_format) == "channels_first" else strides[1:-1]
    return strides[0] if len(strides) == 1 else tuple(strides)


def _padding(padding: str) -> str:
    if not isinstance(padding, str):
        raise OptionError(
            f'padding is "SAME" or "VALID". Received: {padding!r}. For other widths use tf.pad before.'
        )
    return padding.lower()


def _convolution(dims: int) -> None:
    @operation(f"nn.conv{dims}d")
    def convolution(
        input: TensorLike,
        filters: TensorLike = None,
        strides: ShapeLike = 1,
        padding: str = "VALID",
        data_format: str | None = None,
        dilations: ShapeLike = None,
        **older: Any,
    ) -> Any:
        """A convolution; `padding` is "SAME" or "VALID"."""
        only(f"nn.conv{dims}d", older, "filter", "stride", "use_cudnn_on_gpu")
        # TensorFlow 1's names of the same arguments.
        kernel = older.get("filter", filters)
        strides = older.get("stride", strides)
        dilation = 1 if dilations is None else _middle(dilations, dims, data_format)
        steps = _middle(strides, dims, data_format)
        return ops.conv(
            tensor(input), tensor(kernel), steps, _padding(padding), _format(data_format), dilation
        )


for _dims in (1, 2, 3):
    _convolution(_dims)


@operation("nn.depthwise_conv2d")
def depthwise_conv2d(
    input: TensorLike,
    filter: TensorLike,
    strides: ShapeLike,
    padding: str,
    data_format: str | None = None,
    dilations: ShapeLike = None,
) -> Any:
    """A convolution of each channel by itself."""
    dilation = 1 if dilations is None else _middle(dilations, 2, data_format)
    return ops.depthwise_conv(
        tensor(input),
        tensor(filter),
        _middle(strides, 2, data_format),
        _padding(padding),
        _format(data_format),
        dilation,
    )


@operation("nn.conv2d_transpose")
def conv2d_transpose(
    input: TensorLike,
    filters: TensorLike,
    output_shape: ShapeLike,
    strides: ShapeLike,
    padding: str = "SAME",
    data_format: str | None = None,
    dilations: ShapeLike = None,
) -> Any:
    """The gradient of a convolution, as an operation of its own.

    Raises:
        OptionError: no such convolution has an output of this shape.
    """
    given, kernel = tensor(input), tensor(filters)  # [rows, columns, out, in]
    shape = tuple(int(each) for each in output_shape)
    steps = _middle(strides, 2, data_format)
    dilation = 1 if dilations is None else _middle(dilations, 2, data_format)

    def forward(image: TensorLike) -> Any:
        return ops.conv(image, kernel, steps, _padding(padding), _format(data_format), dilation)

    wanted = jax.ShapeDtypeStruct(shape, given.dtype)
    if jax.eval_shape(forward, wanted).shape != given.shape:
        raise OptionError(
            f"tf.nn.conv2d_transpose goes the way of a convolution back. One of an output of shape "
            f"{shape} has the shape {jax.eval_shape(forward, wanted).shape}. Received: {given.shape}."
        )
    # What TensorFlow defines it as, so padding and strides agree without rules of their own.
    (found,) = jax.linear_transpose(forward, wanted)(given)
    return found


def _pool(name: str, dims: int, function: Callable[..., Any]) -> None:
    def pooled(
        input: TensorLike,
        ksize: ShapeLike,
        strides: ShapeLike,
        padding: str,
        data_format: str | None = None,
    ) -> Any:
        """The largest or the mean element of each window."""
        size, steps = (_middle(each, dims, data_format) for each in (ksize, strides))
        found = function(tensor(input), size, steps, _padding(padding), _format(data_format))
        return found.astype(jnp.asarray(input).dtype)

    operation(*([f"nn.{name}_pool{dims}d"] + [f"nn.{name}_pool"] * (dims == 2)))(pooled)


for _dims in (1, 2, 3):
    _pool("max", _dims, ops.max_pool)
    _pool("avg", _dims, ops.average_pool)
