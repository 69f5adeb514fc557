"""`tf.layers`: functions that make a layer's variables by name, and find them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.base.array_like import DTypeLike, ShapeLike, TensorLike
from tailrace.compat.arguments import SeedLike
from tailrace.compat.ipu.graph.named_variables import free_scope, get_variable, variable_scope
from tailrace.compat.ipu.graph.state import kept
from tailrace.compat.tensorflow.operations import neural
from tailrace.compat.tensorflow.operations.matrices import tensordot
from tailrace.compat.tensorflow.operations.shapes import reshape, shape_of
from tailrace.compat.tensorflow.operations.table import OPERATIONS
from tailrace.errors import OptionError

Activation = Callable[[Any], Any] | None
Initializer = Callable[..., Any] | None


def _own_name(kind: str) -> str:
    """A name that no layer has yet. A program is traced more than once: there its n-th stays."""
    return kept().setdefault("name", free_scope(kind))


def _pair(value: ShapeLike) -> list[int]:
    found = list(shape_of(value))
    return found * 2 if len(found) == 1 else found


def _finished(
    out: TensorLike, channels: int, activation: Activation, use_bias: bool, initializer: Initializer
) -> Any:
    if use_bias:
        bias = get_variable("bias", [channels], initializer=initializer or _zeros)
        out = neural.bias_add(out, bias)
    return out if activation is None else activation(out)


def _zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    return OPERATIONS["zeros"](shape, dtype)


def dense(
    inputs: TensorLike,
    units: int,
    activation: Activation = None,
    use_bias: bool = True,
    kernel_initializer: Initializer = None,
    bias_initializer: Initializer = None,
    name: str | None = None,
    reuse: object = None,
) -> Any:
    """Sums of products with a matrix."""
    del reuse  # variables are always found again by their names
    with variable_scope(name or _own_name("dense")):
        # TensorFlow's names, by which its checkpoints are read.
        kernel = get_variable("kernel", [inputs.shape[-1], units], initializer=kernel_initializer)
        out = tensordot(inputs, kernel, 1)
        return _finished(out, units, activation, use_bias, bias_initializer)


def conv2d(
    inputs: TensorLike,
    filters: int,
    kernel_size: ShapeLike,
    strides: ShapeLike = (1, 1),
    padding: str = "valid",
    activation: Activation = None,
    use_bias: bool = True,
    kernel_initializer: Initializer = None,
    bias_initializer: Initializer = None,
    name: str | None = None,
    reuse: object = None,
) -> Any:
    """A convolution of images whose channels come last."""
    del reuse
    with variable_scope(name or _own_name("conv2d")):
        # The names and the order of axes of TensorFlow's checkpoints: `kernel`, then `bias`.
        shape = [*_pair(kernel_size), inputs.shape[-1], filters]
        kernel = get_variable("kernel", shape, initializer=kernel_initializer)
        out = OPERATIONS["nn.conv2d"](inputs, kernel, _pair(strides), padding.upper())
        return _finished(out, filters, activation, use_bias, bias_initializer)


def max_pooling2d(
    inputs: TensorLike,
    pool_size: ShapeLike,
    strides: ShapeLike,
    padding: str = "valid",
    data_format: str = "channels_last",
    name: str | None = None,
) -> Any:
    """The largest value of each part of an image."""
    _check_format("max_pooling2d", data_format)
    return OPERATIONS["nn.max_pool2d"](inputs, _pair(pool_size), _pair(strides), padding.upper())


def average_pooling2d(
    inputs: TensorLike,
    pool_size: ShapeLike,
    strides: ShapeLike,
    padding: str = "valid",
    data_format: str = "channels_last",
    name: str | None = None,
) -> Any:
    """The mean of each part of an image."""
    _check_format("average_pooling2d", data_format)
    return OPERATIONS["nn.avg_pool2d"](inputs, _pair(pool_size), _pair(strides), padding.upper())


def flatten(inputs: TensorLike, name: str | None = None, data_format: str = "channels_last") -> Any:
    """The elements of each row of a batch, in one axis."""
    _check_format("flatten", data_format)
    size = 1
    for length in inputs.shape[1:]:
        size *= length
    return reshape(inputs, [-1, size])


def _check_format(layer: str, data_format: str) -> None:
    if data_format != "channels_last":
        raise OptionError(
            f"tf.layers.{layer} takes images whose channels come last. Received: "
            f"data_format={data_format!r}. Use tf.transpose before."
        )


def dropout(
    inputs: TensorLike,
    rate: float = 0.5,
    noise_shape: ShapeLike = None,
    seed: SeedLike = None,
    training: bool = False,
    name: str | None = None,
) -> Any:
    """While training, elements set to zero at random; otherwise what is given.

    Raises:
        OptionError: whether it trains is a value of the device.
    """
    # Which elements go is drawn in the program; whether any do decides what is traced.
    if not isinstance(training, bool):
        raise OptionError(
            f"tf.layers.dropout(training=...) is True or False when the program is made. Received: "
            f"{type(training).__name__}. Use tf.cond(training, ...) around it."
        )
    return neural.dropout(inputs, rate, noise_shape, seed) if training else inputs


LAYERS = {
    function.__name__: function
    for function in (average_pooling2d, conv2d, dense, dropout, flatten, max_pooling2d)
}
